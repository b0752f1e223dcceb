// SPDX-License-Identifier: Apache-2.0
// From the leaf of cqsa_fp8_gemm() to the parameters of a kernel: shared by the portable product and the tuned ones.
#pragma once

#include "attention_fill.h"
#include "fp8_gemm_params.h"
#include "port.h"

namespace cqsa::gpu {

extern const cqsa_fp8_gemm_impl portable_fp8_gemm;  // fp8_gemm_leaf.cpp

int32_t gemm_kind_of(cqsa_dtype t);  // -1: none of them
bool is_gemm_output(const cqsa_fp8_gemm_leaf& a);  // d, c and bias have types that every kernel takes

// Bytes of workspace that d_amax needs: the header and two words.
uint64_t gemm_ticket_bytes(const cqsa_fp8_gemm_leaf& a);

// Everything but tiles. False: the workspace is too small.
bool fill_gemm(const cqsa_fp8_gemm_leaf& a, void* workspace, uint64_t workspace_bytes, gemm_params* out);

}  // namespace cqsa::gpu
