// SPDX-License-Identifier: Apache-2.0
// X(name, threads per block, tier) as in backends/gpu/kernels.h.
#pragma once

#define CQSA_SM70_KERNELS(X)                    \
  X(cqsa_sm70_attention_d64_fast, 128, 70)      \
  X(cqsa_sm70_attention_d128_fast, 128, 70)     \
  X(cqsa_sm70_attention_d256_fast, 256, 70)     \
  X(cqsa_sm70_attention_d64_split, 128, 70)     \
  X(cqsa_sm70_attention_d128_split, 128, 70)    \
  X(cqsa_sm70_attention_d256_split, 256, 70)    \
  X(cqsa_sm70_selected_d64_fast, 32, 70)        \
  X(cqsa_sm70_selected_d128_fast, 64, 70)       \
  X(cqsa_sm70_selected_d256_fast, 128, 70)      \
  X(cqsa_sm70_selected_d64_split, 32, 70)       \
  X(cqsa_sm70_selected_d128_split, 64, 70)      \
  X(cqsa_sm70_selected_d256_split, 128, 70)
