// SPDX-License-Identifier: Apache-2.0
// Codes of weights times codes of activations by AVX2. vpmaddubsw wants its first factor without a sign: codes of formats with a minimum have none, others
// give theirs to the activation. A pair of products is at most 2 * 128 * 127, so nothing saturates.
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

static inline float sum_of(__m256 v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// Two scales of 16 values each, four lanes each.
static inline __m256 two_scales(const float* s) {
  return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_castsi128_ps(_mm_loadl_epi64((const __m128i*)s))), _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
}

// Minus the minima times the sums of the codes.
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
    for (int c = 0; c < count; ++c) less[r][c] = sum_of(acc[r][c]);
}

template <bool has_least, int rows, int count> static void dot_tile(const dot_block& b, float* sums, int64_t step) {
  const int64_t n = b.w->padded;
  const __m256i ones = _mm256_set1_epi16(1);
  const int8_t *w[rows], *x[count];
  const float *ws[rows], *xs[count];
  __m256 acc[rows][count];
  for (int r = 0; r < rows; ++r) w[r] = b.w->code + (b.row + r) * n, ws[r] = b.w->scale + (b.row + r) * (n / 16);
  for (int c = 0; c < count; ++c) x[c] = b.x->code + b.index[c] * n, xs[c] = b.x->scale + b.index[c] * (n / 32);
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < count; ++c) acc[r][c] = _mm256_setzero_ps();
  for (int64_t g = 0; g < n / 32; ++g) {
    __m256i code[rows], magnitude[rows];
    __m256 scale[rows];
    for (int r = 0; r < rows; ++r) {
      code[r] = _mm256_loadu_si256((const __m256i*)(w[r] + 32 * g));
      magnitude[r] = has_least ? code[r] : _mm256_abs_epi8(code[r]);
      scale[r] = two_scales(ws[r] + 2 * g);
    }
    for (int c = 0; c < count; ++c) {
      const __m256i a = _mm256_loadu_si256((const __m256i*)(x[c] + 32 * g));
      const __m256 factor = _mm256_broadcast_ss(xs[c] + g);
      for (int r = 0; r < rows; ++r) {
        const __m256i pairs = _mm256_maddubs_epi16(magnitude[r], has_least ? a : _mm256_sign_epi8(a, code[r]));
        acc[r][c] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, ones)), _mm256_mul_ps(scale[r], factor), acc[r][c]);
      }
    }
  }
  float less[rows][count] = {};
  if (has_least) dot_least<rows, count>(b, less);
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < count; ++c) sums[c * step + r] = has_least ? sum_of(acc[r][c]) - less[r][c] : sum_of(acc[r][c]);
}

constexpr int dot_rows = 2, dot_count = 4;

}  // namespace
}  // namespace cqsa::cpu
