// SPDX-License-Identifier: Apache-2.0
#include "moe_small.cuh"

CQSA_KERNEL(256, cqsa_gpu_moe_combine, cqsa::gpu::moe_combine_params) { cqsa::gpu::combine_block(p); }
