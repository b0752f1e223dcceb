// SPDX-License-Identifier: Apache-2.0
// The implementations of the tuned tiers, which plugin.cpp lists before the portable one.
#pragma once

#include "backends/cqsa_backend.h"

namespace cqsa::gpu {

extern const cqsa_attention_impl sm90_attention;       // sm90/attention_leaf.cpp
extern const cqsa_attention_impl sm80_attention;       // sm80/attention_leaf.cpp
extern const cqsa_attention_impl sm80_decode;          // sm80/decode_leaf.cpp
extern const cqsa_fp8_gemm_impl cublaslt_fp8_gemm;     // leaves/cublaslt.cpp
extern const cqsa_fp8_gemm_impl sm90_fp8_gemm;         // sm90/fp8_gemm_leaf.cpp
extern const cqsa_fp8_gemm_impl sm80_fp8_gemm;         // sm80/fp8_gemm_leaf.cpp, for sm_75 too
extern const cqsa_moe_impl sm90_moe;                   // sm90/moe_leaf.cpp
extern const cqsa_moe_impl sm80_moe;                   // sm80/moe_leaf.cpp
extern const cqsa_selected_impl sm80_selected;         // sm80/selected_leaf.cpp
extern const cqsa_attention_impl sm75_attention;       // sm75/attention_leaf.cpp
extern const cqsa_attention_impl sm70_attention_impl;  // sm70/attention_leaf.cpp
extern const cqsa_selected_impl sm70_selected_impl;    // sm70/selected_leaf.cpp

}  // namespace cqsa::gpu
