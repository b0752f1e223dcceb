// SPDX-License-Identifier: Apache-2.0
// The attention kernels of sm_80: one for each type, size and form (attention_shape.h).
#pragma once

#define CQSA_SM80_ATTENTION_KERNELS_OF(X, kind)           \
  X(cqsa_sm80_attention_##kind##_d64_plain, 128, 80)      \
  X(cqsa_sm80_attention_##kind##_d96_plain, 128, 80)      \
  X(cqsa_sm80_attention_##kind##_d128_plain, 128, 80)     \
  X(cqsa_sm80_attention_##kind##_d192_plain, 128, 80)     \
  X(cqsa_sm80_attention_##kind##_d256_plain, 128, 80)     \
  X(cqsa_sm80_attention_##kind##_d64_general, 128, 80)    \
  X(cqsa_sm80_attention_##kind##_d96_general, 128, 80)    \
  X(cqsa_sm80_attention_##kind##_d128_general, 128, 80)   \
  X(cqsa_sm80_attention_##kind##_d192_general, 128, 80)   \
  X(cqsa_sm80_attention_##kind##_d256_general, 128, 80)
#define CQSA_SM80_ATTENTION_KERNELS(X) CQSA_SM80_ATTENTION_KERNELS_OF(X, f16) CQSA_SM80_ATTENTION_KERNELS_OF(X, bf16)
