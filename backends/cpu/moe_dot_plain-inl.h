// SPDX-License-Identifier: Apache-2.0
// Codes of weights times codes of activations, for any CPU.
#pragma once

#include "moe_job.h"

namespace cqsa::cpu {
namespace {

struct dot_block {
  const moe_codes* w;
  const moe_activations* x;
  int64_t row;           // the first
  const int32_t* index;  // of the first activation
};

static inline int32_t dot_16(const int8_t* a, const int8_t* b) {
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += int16_t(a[i]) * int16_t(b[i]);
  return sum;
}

template <bool has_least, int rows, int count> static void dot_tile(const dot_block& b, float* sums, int64_t) {
  static_assert(rows == 1 && count == 1);
  const int64_t n = b.w->padded, at = b.row * n, i = b.index[0];
  float sum = 0, less = 0;
  for (int64_t g = 0; g < n / 16; ++g) {
    const float scale = b.w->scale[at / 16 + g] * b.x->scale[i * (n / 32) + g / 2];
    sum += float(dot_16(b.w->code + at + 16 * g, b.x->code + i * n + 16 * g)) * scale;
    if (has_least) less += b.w->least[at / 16 + g] * b.x->sum[i * (n / 16) + g];
  }
  *sums = has_least ? sum - less : sum;
}

constexpr int dot_rows = 1, dot_count = 1;

}  // namespace
}  // namespace cqsa::cpu
