// SPDX-License-Identifier: Apache-2.0
#include "moe.cuh"

CQSA_TUNED_KERNEL(128, 3, cqsa_sm80_moe_q2_0, cqsa::gpu::moe_multiply_params) { cqsa::gpu::sm80::moe_block<cqsa::gpu::blocks::q2_0>(p); }
