// SPDX-License-Identifier: Apache-2.0
#include "attention.cuh"

CQSA_TUNED_KERNEL(128, 2, cqsa_sm70_attention_d128_fast, cqsa::gpu::sm70_params) {
  cqsa::gpu::sm70_attention<false, cqsa::gpu::sm70_dense<128, false>>(p);
}
