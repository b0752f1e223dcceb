// SPDX-License-Identifier: Apache-2.0
#include "attention.cuh"

CQSA_TUNED_KERNEL(64, 4, cqsa_sm70_selected_d128_fast, cqsa::gpu::sm70_params) {
  cqsa::gpu::sm70_attention<true, cqsa::gpu::sm70_selected<128, false>>(p);
}
