// SPDX-License-Identifier: Apache-2.0
// Lines of FP8 for one instruction set; CMakeLists.txt gives this file its flags.
#define HWY_COMPILE_ONLY_STATIC
#include "fp8_target-inl.h"
#include "fp8_gemm-inl.h"

namespace cqsa::cpu {

const fp8_target fp8_baseline = HWY_NAMESPACE::lines_of_target;
const fp8_gemm_kernel fp8_gemm_baseline = HWY_NAMESPACE::gemm_of_target;

}  // namespace cqsa::cpu
