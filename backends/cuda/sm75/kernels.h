// SPDX-License-Identifier: Apache-2.0
// Every kernel of the tier, X(name, threads per block, tier).
#pragma once

#define CQSA_SM75_KERNELS(X)                       \
  X(cqsa_sm75_attention_f16_d64_plain, 128, 75)    \
  X(cqsa_sm75_attention_f16_d64_general, 128, 75)  \
  X(cqsa_sm75_attention_f16_d128_plain, 128, 75)   \
  X(cqsa_sm75_attention_f16_d128_general, 128, 75) \
  X(cqsa_sm75_attention_f16_d256_plain, 64, 75)    \
  X(cqsa_sm75_fp8_gemm, 256, 75)
