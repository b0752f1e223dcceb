// SPDX-License-Identifier: Apache-2.0
// What passes between the part of FP8 that is compiled once (fp8_quantize.cpp, fp8_dequantize.cpp: blocks, scales, threads) and the
// part that is compiled once per instruction set (fp8_<target>.cpp: lines of elements). Plain data and declarations only.
#pragma once

#include "attention_job.h"

namespace cqsa::cpu {

constexpr int64_t fp8_line = 1024;  // most elements of a line that is staged

// How a line of numbers becomes codes.
struct fp8_coding {
  cqsa_dtype format;
  bool saturate;
  bool streams;  // codes may go past the caches: there are more than they hold
  bool finite;   // the largest of the finite elements is wanted
};

// Lines are compact and aligned to their elements unless a stride says otherwise; their type is F32 or BF16.
struct fp8_target {
  // n elements of any type but I8, `stride` elements apart, to f32. raw: room for n elements.
  void (*load)(const char* from, cqsa_dtype type, int64_t stride, int64_t n, char* raw, float* to);
  // n f32 to F32, F16 or BF16 with one NaN.
  void (*save)(float* from, cqsa_dtype type, int64_t stride, int64_t n, const scalar_ops* ops, char* raw, char* to);
  void (*multiply)(float* x, float factor, int64_t n);
  void (*silu)(float* x, const float* up, int64_t n);
  // most[i / group] = the larger of it and the bits of |x[i]|; finite: those of other elements do not count.
  void (*largest)(const void* x, cqsa_dtype type, int64_t n, int64_t group, bool finite, uint32_t* most);
  // to[i] = the code of x[i] * scales[i / group]. *most, unless most is NULL: the larger of it and the bits of the largest |x[i]|.
  void (*encode)(const void* x, cqsa_dtype type, int64_t n, int64_t group, const float* scales, const fp8_coding* how, uint8_t* to, uint32_t* most);
  void (*sum)(const float* x, int64_t n, double* sums);
  // out[j * out_stride + i] = x[i * stride + j]
  void (*transpose)(const uint8_t* x, int64_t stride, int64_t rows, int64_t columns, bool streams, uint8_t* out, int64_t out_stride);
  // to[i] = code i * scale, as F32 or BF16 with one NaN.
  void (*decode)(const uint8_t* codes, cqsa_dtype format, int64_t n, float scale, cqsa_dtype type, void* to);
  void (*finish)();  // by each worker at its end: what went past the caches is in memory
};

// acc[r][c] += sum over k of a[r][k] * b[k][c] for `rows` rows r and `columns` columns c; rows of a, of acc lie lda, ld apart.
struct fp8_gemm_kernel {
  int64_t rows, columns;
  void (*multiply)(const float* a, int64_t lda, const float* b, int64_t k, float* acc, int64_t ld);
};

extern const fp8_target fp8_baseline;
extern const fp8_gemm_kernel fp8_gemm_baseline;
#if defined(CQSA_CPU_X86)
extern const fp8_target fp8_avx2, fp8_avx512;
extern const fp8_gemm_kernel fp8_gemm_avx2, fp8_gemm_avx512;
#endif

struct fp8_gemm_target {
  const fp8_target* lines;
  const fp8_gemm_kernel* kernel;
};

// fp8_quantize.cpp, fp8_dequantize.cpp. The best that this CPU has; for tests, which compare the instruction sets.
const fp8_target& fp8_best();
cqsa_status fp8_quantize_on(const fp8_target& target, const cqsa_fp8_quantize_leaf* leaf, const cqsa_exec* exec);
cqsa_status fp8_dequantize_on(const fp8_target& target, const cqsa_fp8_dequantize_leaf* leaf, const cqsa_exec* exec);
// .. fp8_gemm.cpp. The workspace is as the list's entries say.
cqsa_status fp8_gemm_on(const fp8_gemm_target& target, const cqsa_fp8_gemm_leaf* leaf, void* workspace, uint64_t bytes, const cqsa_exec* exec);
cqsa_status fp8_transpose_on(const fp8_target& target, const cqsa_fp8_transpose_leaf* leaf, const cqsa_exec* exec);

}  // namespace cqsa::cpu
