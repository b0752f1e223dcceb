// SPDX-License-Identifier: Apache-2.0
#include "selected.cuh"

using shape = cqsa::gpu::sm80::selected_tile<64, false, false>;
CQSA_TUNED_KERNEL(128, shape::blocks, cqsa_sm80_selected_f16_d64_fast, cqsa::gpu::selected_params) {
  cqsa::gpu::sm80::selected_block<shape>(p);
}
