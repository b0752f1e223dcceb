// SPDX-License-Identifier: Apache-2.0
// Decoders of every quantized format, 32 elements at a time, for kernels that read such matrices. The bits are those of backends/cpu/quant_reference.cpp.
//
//   using format = blocks::q4_k;
//   const format::words w = format::load(block, part);   // 16 and 32-bit loads from a block at an even address (MXFP4: at any)
//   quant_codes c;
//   format::unpack(w, part, &c);                         // int8 x 4 words, two scales, two minima
//   value_of(c.scale[i / 16], byte i of c.code, c.least[i / 16])
//
// A kernel may load the words of the next part while it works on this one. `part` may be a run-time value: no array is indexed with it.
#pragma once

#include "quant_iq.cuh"
#include "quant_k.cuh"
#include "quant_simple.cuh"
