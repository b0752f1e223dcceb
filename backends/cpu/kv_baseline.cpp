// SPDX-License-Identifier: Apache-2.0
// Rows of caches for one instruction set; CMakeLists.txt gives this file its flags.
#define HWY_COMPILE_ONLY_STATIC
#include "kv-inl.h"

namespace cqsa::cpu {

const kv_target kv_baseline = {HWY_NAMESPACE::append_row, HWY_NAMESPACE::gather_row, HWY_NAMESPACE::rotate_row};

}  // namespace cqsa::cpu
