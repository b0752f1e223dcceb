// SPDX-License-Identifier: Apache-2.0
#include "moe_few.cuh"

CQSA_TUNED_KERNEL(128, 3, cqsa_gpu_moe_few_numbers, cqsa::gpu::moe_multiply_params) { cqsa::gpu::few_block<CQSA_LANES, false>(p); }
