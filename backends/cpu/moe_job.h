// SPDX-License-Identifier: Apache-2.0
// What passes between the part of mixtures of experts that is compiled once (moe.cpp: pieces, grouping, threads) and the part that is compiled once per
// instruction set (moe_<target>.cpp: rows of weights, dot products, activations). Only plain data and declarations, as in attention_job.h.
#pragma once

#include "attention_job.h"

namespace cqsa::cpu {

// Rows of weights as int8 codes: value = scale * code - least, each for 16 values. Rows are padded to a multiple of moe_pad values, with zeros.
constexpr int64_t moe_pad = 128;
constexpr int64_t moe_padded(int64_t n) { return (n + moe_pad - 1) / moe_pad * moe_pad; }

struct moe_codes {
  int8_t* code;   // [row][padded]
  float* scale;   // [row][padded / 16]
  float* least;   // likewise; not looked at where has_least is 0
  int64_t padded;
  int32_t has_least; // then codes are 0..127
};

// Activations of q8: code * scale[g / 32]; sum[g / 16] = scale * (sum of the codes of 16). Rows are padded as those of weights.
struct moe_activations {
  int8_t* code;
  float* scale;  // [row][padded / 32]
  float* sum;    // [row][padded / 16]
  float* plain;  // [row][padded], as they are
  int64_t padded;
};

struct moe_activation {
  int32_t kind; // CQSA_MOE_SWIGLU, ..
  float alpha, beta, limit;
};

struct moe_target {
  // A row of n values of a format that has blocks, as row r of `to`.
  void (*unpack)(cqsa_quant_format format, const uint8_t* from, int64_t n, const moe_codes* to, int64_t r);
  // A row of any format as numbers; to: n values, at most padded.
  void (*decode)(cqsa_quant_format format, const uint8_t* from, int64_t n, float* to);
  // sums[i * step + r] = row r of w times row index[i] of x, for `rows` rows and `count` activations. The order of a sum depends on `padded` alone.
  void (*dot_codes)(const moe_codes* w, int64_t rows, const moe_activations* x, const int32_t* index, int64_t count, float* sums, int64_t step);
  void (*dot_plain)(const float* w, int64_t rows, const moe_activations* x, const int32_t* index, int64_t count, float* sums, int64_t step);
  // n values, a multiple of 32.
  void (*quantize)(const float* x, int64_t n, int8_t* code, float* scale, float* sum);
  // h[i] of g[i] (not looked at where nothing is gated) and u[i].
  void (*activate)(const moe_activation* how, const float* g, const float* u, int64_t n, float* h);
  // sum += factor * y, in f32.
  void (*add)(const float* y, float factor, int64_t n, float* sum);
  void (*load)(const char* from, cqsa_dtype dtype, int64_t stride, int64_t n, char* raw, float* to);
  void (*store)(const float* from, cqsa_dtype dtype, int64_t stride, int64_t n, const scalar_ops* ops, char* raw, char* to);
};

extern const moe_target moe_baseline;
#if defined(CQSA_CPU_X86)
extern const moe_target moe_avx2, moe_vnni;
#endif
// moe.cpp: the best that this CPU has.
const moe_target& moe_best();
const cqsa_moe_impl* moe_impls(int32_t* count);

// moe_reference.cpp
extern const cqsa_moe_impl moe_reference_impl;

// moe_parts.cpp
cqsa_status moe_route(void* device, const cqsa_moe_route_leaf* leaf, const cqsa_exec* exec, void* stream);
cqsa_status moe_group(void* device, const cqsa_moe_group_leaf* leaf, const cqsa_exec* exec, void* stream);
cqsa_status moe_quantize(void* device, const cqsa_moe_quantize_leaf* leaf, const cqsa_exec* exec, void* stream);
cqsa_status moe_combine(void* device, const cqsa_moe_combine_leaf* leaf, const cqsa_exec* exec, void* stream);

}  // namespace cqsa::cpu
