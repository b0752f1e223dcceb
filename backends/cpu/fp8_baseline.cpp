// SPDX-License-Identifier: Apache-2.0
// Lines of FP8 for one instruction set; CMakeLists.txt gives this file its flags.
#define HWY_COMPILE_ONLY_STATIC
#include "fp8_target-inl.h"

namespace cqsa::cpu {

const fp8_target fp8_baseline = HWY_NAMESPACE::lines_of_target;

}  // namespace cqsa::cpu
