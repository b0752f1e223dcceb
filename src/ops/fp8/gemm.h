// SPDX-License-Identifier: Apache-2.0
// The FP8 matrix product, cqsa.h section 14: the first implementation of the backend that takes it.
#pragma once
#include <string>

#include "ops/fp8/operands.h"

namespace cqsa::fp8 {

cqsa_status gemm(const cqsa_context&, const cqsa_fp8_gemm_args* args, void* stream, bool capturing);
cqsa_status gemm_workspace(const cqsa_context&, const cqsa_fp8_gemm_args* args, uint64_t& bytes_out);
cqsa_status gemm_explain(const cqsa_context&, const cqsa_fp8_gemm_args* args, std::string& out);

inline constexpr int most_gemm_operands = 9;
// The arguments, checked, as the leaf, without the workspace.
cqsa_status bind_gemm(operand_list& list, const cqsa_fp8_gemm_args& args, cqsa_fp8_gemm_leaf& leaf);

}  // namespace cqsa::fp8
