// SPDX-License-Identifier: Apache-2.0
#include "moe_few.cuh"

CQSA_TUNED_KERNEL(128, 6, cqsa_sm80_moe_few_q2_0, cqsa::gpu::moe_multiply_params) {
  cqsa::gpu::few_block<32, true, cqsa::gpu::sm80::rows_of_format<cqsa::gpu::blocks::q2_0, 3>>(p);
}
