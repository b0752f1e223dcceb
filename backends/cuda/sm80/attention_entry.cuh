// SPDX-License-Identifier: Apache-2.0
// CQSA_SM80_ATTENTION(f16 | bf16, head_dim, head_dim_v, plain | general): one kernel.
#pragma once

#include "attention.cuh"

namespace cqsa::gpu::sm80 {
constexpr bool plain = false, general = true;
}

#define CQSA_SM80_ATTENTION(kind, d, dv, form)                                                                           \
  CQSA_TUNED_KERNEL((cqsa::gpu::sm80::tile_shape<d, dv, cqsa::gpu::sm80::form>::threads),                                \
                    (cqsa::gpu::sm80::tile_shape<d, dv, cqsa::gpu::sm80::form>::blocks), cqsa_sm80_attention_##kind##_d##d##_##form, \
                    cqsa::gpu::attention_params) {                                                                       \
    using namespace cqsa::gpu;                                                                                           \
    sm80::attention_block<sm80::tile_shape<d, dv, sm80::form>, kind_##kind>(p);                                          \
  }
