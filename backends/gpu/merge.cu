// SPDX-License-Identifier: Apache-2.0
#include "merge.cuh"

CQSA_KERNEL(256, cqsa_merge, cqsa::gpu::merge_params) { cqsa::gpu::merge_block<CQSA_LANES>(p); }
