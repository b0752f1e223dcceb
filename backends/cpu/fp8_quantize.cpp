// SPDX-License-Identifier: Apache-2.0
// FP8: the backend's calls.
#include "fp8_job.h"

namespace cqsa::cpu {

uint64_t fp8_quantize_workspace(const cqsa_fp8_quantize_leaf*, int64_t) { return 0; }
cqsa_status fp8_quantize(void*, const cqsa_fp8_quantize_leaf* leaf, void*, uint64_t, const cqsa_exec*, void*) { return fp8_quantize_reference(leaf); }
cqsa_status fp8_dequantize(void*, const cqsa_fp8_dequantize_leaf* leaf, const cqsa_exec*, void*) { return fp8_dequantize_reference(leaf); }
cqsa_status fp8_transpose(void*, const cqsa_fp8_transpose_leaf* leaf, const cqsa_exec*, void*) { return fp8_transpose_reference(leaf); }

const cqsa_fp8_gemm_impl* fp8_gemm_impls(int32_t* count) {
  *count = 1;
  return &fp8_gemm_reference_impl;
}

}  // namespace cqsa::cpu
