// SPDX-License-Identifier: Apache-2.0
#include "attention.cuh"

CQSA_TUNED_KERNEL(32, 8, cqsa_sm70_selected_d64_fast, cqsa::gpu::sm70_params) {
  cqsa::gpu::sm70_attention<true, cqsa::gpu::sm70_selected<64, false>>(p);
}
