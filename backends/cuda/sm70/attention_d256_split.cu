// SPDX-License-Identifier: Apache-2.0
#include "attention.cuh"

CQSA_TUNED_KERNEL(256, 1, cqsa_sm70_attention_d256_split, cqsa::gpu::sm70_params) {
  cqsa::gpu::sm70_attention<false, cqsa::gpu::sm70_dense<256, true>>(p);
}
