// SPDX-License-Identifier: Apache-2.0
// X(name, threads per block, tier): attention of a few queries (decode.cuh), by the type of q, the width of k and v, and the channels.
#pragma once

#define CQSA_SM80_DECODE_KERNELS(X)             \
  X(cqsa_sm80_decode_f16_d64, 128, 80)          \
  X(cqsa_sm80_decode_f16_d128, 128, 80)         \
  X(cqsa_sm80_decode_f16_d256, 128, 80)         \
  X(cqsa_sm80_decode_bf16_d64, 128, 80)         \
  X(cqsa_sm80_decode_bf16_d128, 128, 80)        \
  X(cqsa_sm80_decode_bf16_d256, 128, 80)        \
  X(cqsa_sm80_decode_f16_narrow_d64, 128, 80)   \
  X(cqsa_sm80_decode_f16_narrow_d128, 128, 80)  \
  X(cqsa_sm80_decode_f16_narrow_d256, 128, 80)  \
  X(cqsa_sm80_decode_bf16_narrow_d64, 128, 80)  \
  X(cqsa_sm80_decode_bf16_narrow_d128, 128, 80) \
  X(cqsa_sm80_decode_bf16_narrow_d256, 128, 80)
