// SPDX-License-Identifier: Apache-2.0
#include "moe.cuh"

CQSA_TUNED_KERNEL(128, 2, cqsa_sm80_moe_any, cqsa::gpu::moe_multiply_params) { cqsa::gpu::sm80::moe_block<cqsa::gpu::sm80::any_format>(p); }
