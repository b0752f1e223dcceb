// SPDX-License-Identifier: Apache-2.0
// What passes between the part of quantized matrices that is compiled once (quant.cpp: rows, threads) and the part that is compiled once per
// instruction set (quant_<target>.cpp: a piece of a row). Only plain data and declarations, as in attention_job.h.
#pragma once

#include "attention_job.h"

namespace cqsa::cpu {

constexpr int64_t quant_piece = 4096;  // elements that are decoded at once: a multiple of every block

// The scratch of one worker, on its stack.
struct quant_scratch {
  alignas(64) float row[quant_piece];
  alignas(64) char raw[4 * quant_piece];
  const scalar_ops* ops;
};

struct quant_target {
  // n elements, at most quant_piece, from the blocks at `from` to elements of out_dtype that are out_stride[1] apart.
  void (*decode)(const cqsa_dequantize_leaf* leaf, const uint8_t* from, int64_t n, char* to, quant_scratch* mem);
  // n elements of x to f32.
  void (*load)(const char* from, cqsa_dtype dtype, int64_t stride, int64_t n, quant_scratch* mem);
};

extern const quant_target quant_baseline;
#if defined(CQSA_CPU_X86)
extern const quant_target quant_avx2;
#endif

// quant.cpp. The best that this CPU has; for tests, which compare the instruction sets.
const quant_target& quant_best();
cqsa_status dequantize_rows_on(const quant_target& target, const cqsa_dequantize_leaf* leaf, const cqsa_exec* exec);
// .. what the backend's struct has
cqsa_status dequantize_rows(void* device, const cqsa_dequantize_leaf* leaf, const cqsa_exec* exec, void* stream);
cqsa_status quantize_rows(void* device, const cqsa_quantize_leaf* leaf, const cqsa_exec* exec, void* stream);

// quant_encode.cpp. n values, a multiple of the format's block, to blocks.
void encode_blocks(cqsa_quant_format format, const float* x, int64_t n, uint8_t* to);

}  // namespace cqsa::cpu
