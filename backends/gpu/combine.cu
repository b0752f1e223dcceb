// SPDX-License-Identifier: Apache-2.0
#include "combine.cuh"

CQSA_KERNEL(128, cqsa_attention_combine, cqsa::gpu::combine_params) { cqsa::gpu::combine_block<CQSA_LANES>(p); }
