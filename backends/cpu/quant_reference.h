// SPDX-License-Identifier: Apache-2.0
// Every quantized format as docs/quant.md says it: one element at a time. The oracle of the fast decoders, and of the quantizers' tests.
#pragma once

#include "cqsa.h"

namespace cqsa::cpu {

// Element i of a block, in f32 with the operations of the public reference decoders. A NaN may be any.
using quant_element_fn = float (*)(const uint8_t* block, int i);
quant_element_fn quant_element(cqsa_quant_format format);  // nullptr: no such format

}  // namespace cqsa::cpu
