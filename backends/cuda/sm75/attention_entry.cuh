// SPDX-License-Identifier: Apache-2.0
// CQSA_SM75_ATTENTION(head_dim, plain | general): one kernel, f16.
#pragma once

#include "backends/cuda/sm75/as_sm80.cuh"
// .. before
#include "backends/cuda/sm75/attention_shape.h"
#include "backends/cuda/sm80/attention.cuh"

namespace cqsa::gpu::sm75 {
constexpr bool plain = false, general = true;
}

#define CQSA_SM75_ATTENTION(d, form)                                                                                     \
  CQSA_TUNED_KERNEL((cqsa::gpu::sm75::tile_shape<d, d, cqsa::gpu::sm75::form>::threads),                                 \
                    (cqsa::gpu::sm75::tile_shape<d, d, cqsa::gpu::sm75::form>::blocks), cqsa_sm75_attention_f16_d##d##_##form, \
                    cqsa::gpu::attention_params) {                                                                       \
    using namespace cqsa::gpu;                                                                                           \
    sm80::attention_block<sm75::tile_shape<d, d, sm75::form>, kind_f16>(p);                                              \
  }
