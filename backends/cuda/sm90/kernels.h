// SPDX-License-Identifier: Apache-2.0
// The kernels of Hopper alone, X(name, threads, tier) as in backends/gpu/kernels.h.
#pragma once

#define CQSA_SM90_KERNELS_OF(X, kind)                   \
  X(cqsa_sm90_attention_##kind##_d64_usual, 512, 90)    \
  X(cqsa_sm90_attention_##kind##_d96_usual, 384, 90)    \
  X(cqsa_sm90_attention_##kind##_d128_usual, 384, 90)   \
  X(cqsa_sm90_attention_##kind##_d128_lengthy, 384, 90) \
  X(cqsa_sm90_attention_##kind##_d192_usual, 384, 90)   \
  X(cqsa_sm90_attention_##kind##_d256_usual, 384, 90)
#define CQSA_SM90_FP8_KERNELS_OF(X, formats)           \
  X(cqsa_sm90_fp8_##formats##_large_fast, 384, 90)     \
  X(cqsa_sm90_fp8_##formats##_large_plain, 384, 90)    \
  X(cqsa_sm90_fp8_##formats##_large_blocks, 384, 90)   \
  X(cqsa_sm90_fp8_##formats##_large_columns, 384, 90)  \
  X(cqsa_sm90_fp8_##formats##_medium_plain, 384, 90)   \
  X(cqsa_sm90_fp8_##formats##_medium_columns, 384, 90) \
  X(cqsa_sm90_fp8_##formats##_small_plain, 384, 90)    \
  X(cqsa_sm90_fp8_##formats##_small_columns, 384, 90)
#define CQSA_SM90_FP8_KERNELS(X) \
  CQSA_SM90_FP8_KERNELS_OF(X, e4m3fn_e4m3fn) CQSA_SM90_FP8_KERNELS_OF(X, e4m3fn_e5m2) CQSA_SM90_FP8_KERNELS_OF(X, e5m2_e4m3fn)
#define CQSA_SM90_MOE_KERNELS(X) \
  X(cqsa_sm90_moe_q2_0_n64, 384, 90)     \
  X(cqsa_sm90_moe_q2_0_n96, 384, 90)     \
  X(cqsa_sm90_moe_q2_0_n128, 384, 90)    \
  X(cqsa_sm90_moe_any_n64, 384, 90)      \
  X(cqsa_sm90_moe_any_n128, 384, 90)
#define CQSA_SM90_KERNELS(X) CQSA_SM90_KERNELS_OF(X, f16) CQSA_SM90_KERNELS_OF(X, bf16) CQSA_SM90_FP8_KERNELS(X) CQSA_SM90_MOE_KERNELS(X)
