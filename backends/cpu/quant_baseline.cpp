// SPDX-License-Identifier: Apache-2.0
// Rows of quantized matrices for one instruction set; CMakeLists.txt gives this file its flags.
#define HWY_COMPILE_ONLY_STATIC
#include "quant-inl.h"

namespace cqsa::cpu {

const quant_target quant_baseline = {HWY_NAMESPACE::decode_piece, HWY_NAMESPACE::load_piece};

}  // namespace cqsa::cpu
