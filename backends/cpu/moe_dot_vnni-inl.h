// SPDX-License-Identifier: Apache-2.0
// Codes of weights times codes of activations by AVX-512 VNNI, 64 at a time. vpdpbusd wants its first factor without a sign: codes with one get 128 added, and
// 128 times the activations, which is the same for every row, is what the sum begins with, negative. All of that is exact.
#pragma once

#include <immintrin.h>

#include "moe_job.h"

namespace cqsa::cpu {
namespace {

struct dot_block {
  const moe_codes* w;
  const moe_activations* x;
  int64_t row;           // the first
  const int32_t* index;  // of the first activation
};

static inline float sum_of(__m512 v) { return _mm512_reduce_add_ps(v); }

// Four scales of 16 values each, four lanes each; two of 32, eight each.
static inline __m512 four_scales(const float* s) {
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), _mm512_castps128_ps512(_mm_loadu_ps(s)));
}
static inline __m512 two_scales(const float* s) {
  const __m128 two = _mm_castsi128_ps(_mm_loadl_epi64((const __m128i*)s));
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1), _mm512_castps128_ps512(two));
}

template <int rows, int count> static inline void dot_least(const dot_block& b, float (&less)[rows][count]) {
  const int64_t n = b.w->padded / 16;
  __m256 acc[rows][count];
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < count; ++c) acc[r][c] = _mm256_setzero_ps();
  for (int64_t g = 0; g < n; g += 8)
    for (int r = 0; r < rows; ++r) {
      const __m256 least = _mm256_loadu_ps(b.w->least + (b.row + r) * n + g);
      for (int c = 0; c < count; ++c) acc[r][c] = _mm256_fmadd_ps(least, _mm256_loadu_ps(b.x->sum + b.index[c] * n + g), acc[r][c]);
    }
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < count; ++c) less[r][c] = sum_of(_mm512_zextps256_ps512(acc[r][c]));
}

template <bool has_least, int rows, int count> static void dot_tile(const dot_block& b, float* sums, int64_t step) {
  const int64_t n = b.w->padded;
  const __m512i top = _mm512_set1_epi8(-128);
  const int8_t *w[rows], *x[count];
  const float *ws[rows], *xs[count];
  __m512 acc[rows][count];
  for (int r = 0; r < rows; ++r) w[r] = b.w->code + (b.row + r) * n, ws[r] = b.w->scale + (b.row + r) * (n / 16);
  for (int c = 0; c < count; ++c) x[c] = b.x->code + b.index[c] * n, xs[c] = b.x->scale + b.index[c] * (n / 32);
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < count; ++c) acc[r][c] = _mm512_setzero_ps();
  for (int64_t g = 0; g < n / 64; ++g) {
    __m512i code[rows];
    __m512 scale[rows];
    for (int r = 0; r < rows; ++r) {
      const __m512i signed_code = _mm512_loadu_si512(w[r] + 64 * g);
      code[r] = has_least ? signed_code : _mm512_xor_si512(signed_code, top);
      scale[r] = four_scales(ws[r] + 4 * g);
    }
    for (int c = 0; c < count; ++c) {
      const __m512i a = _mm512_loadu_si512(x[c] + 64 * g), nothing = _mm512_setzero_si512();
      const __m512 factor = two_scales(xs[c] + 2 * g);
      const __m512i begin = has_least ? nothing : _mm512_sub_epi32(nothing, _mm512_dpbusd_epi32(nothing, top, a));
      for (int r = 0; r < rows; ++r)
        acc[r][c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_dpbusd_epi32(begin, code[r], a)), _mm512_mul_ps(scale[r], factor), acc[r][c]);
    }
  }
  float less[rows][count] = {};
  if (has_least) dot_least<rows, count>(b, less);
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < count; ++c) sums[c * step + r] = has_least ? sum_of(acc[r][c]) - less[r][c] : sum_of(acc[r][c]);
}

constexpr int dot_rows = 4, dot_count = 4;

}  // namespace
}  // namespace cqsa::cpu
