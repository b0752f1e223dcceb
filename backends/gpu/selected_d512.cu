// SPDX-License-Identifier: Apache-2.0
#include "selected.cuh"

CQSA_KERNEL(256, cqsa_selected_d512, cqsa::gpu::selected_params) { cqsa::gpu::selected_block<CQSA_LANES, 512>(p); }
