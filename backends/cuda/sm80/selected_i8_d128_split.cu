// SPDX-License-Identifier: Apache-2.0
#include "selected.cuh"

using shape = cqsa::gpu::sm80::selected_tile<128, true, true>;
CQSA_TUNED_KERNEL(128, shape::blocks, cqsa_sm80_selected_i8_d128_split, cqsa::gpu::selected_params) {
  cqsa::gpu::sm80::selected_block<shape>(p);
}
