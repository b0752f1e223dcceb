// SPDX-License-Identifier: Apache-2.0
// Attention over selected cells for one instruction set; CMakeLists.txt gives this file its flags.
#define HWY_COMPILE_ONLY_STATIC
#include "selected-inl.h"

namespace cqsa::cpu {

const selected_target selected_avx512 = {HWY_NAMESPACE::run_selected};

}  // namespace cqsa::cpu
