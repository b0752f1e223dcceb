// SPDX-License-Identifier: Apache-2.0
#include "attention.cuh"

CQSA_TUNED_KERNEL(128, 2, cqsa_sm70_selected_d256_fast, cqsa::gpu::sm70_params) {
  cqsa::gpu::sm70_attention<true, cqsa::gpu::sm70_selected<256, false>>(p);
}
