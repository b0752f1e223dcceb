// SPDX-License-Identifier: Apache-2.0
// Mixtures of experts for one instruction set; CMakeLists.txt gives this file its flags.
#define HWY_COMPILE_ONLY_STATIC
#include "moe_dot_plain-inl.h"
#include "moe-inl.h"

namespace cqsa::cpu {

const moe_target moe_baseline = {HWY_NAMESPACE::moe_unpack,   HWY_NAMESPACE::moe_decode,   HWY_NAMESPACE::moe_dot_codes, HWY_NAMESPACE::moe_dot_plain,
                           HWY_NAMESPACE::moe_quantize, HWY_NAMESPACE::moe_activate, HWY_NAMESPACE::moe_add,       HWY_NAMESPACE::load_row,
                           HWY_NAMESPACE::store_row};

}  // namespace cqsa::cpu
