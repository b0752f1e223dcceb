// SPDX-License-Identifier: Apache-2.0
// Which keys a query sees by position alone: causality and window. Shared by planner and schedules.
#pragma once
#include <algorithm>
#include <cstdint>

#include "ops/attention/problem.h"

namespace cqsa {

// Tiles of `step` that hold `value` rows.
inline int64_t divided_up(int64_t value, int64_t step) { return (value + step - 1) / step; }

struct key_range {
  int64_t begin, end;  // [begin, end); empty when begin >= end
  int64_t length() const { return std::max<int64_t>(0, end - begin); }
};

// The band of keys visible to query i is [i + low, i + high], clipped to [0, seqlen_k); unbounded sides are +-far.
struct key_band {
  static constexpr int64_t far = int64_t{1} << 61;
  int64_t low, high;

  static key_band of(const cqsa_attention_params& p, int64_t seqlen_q, int64_t seqlen_k) {
    const int64_t off = p.causal == CQSA_CAUSAL_TOP_LEFT ? 0 : seqlen_k - seqlen_q;
    key_band band{-far, far};
    if (p.window_left >= 0) band.low = off - std::min(p.window_left, far);
    if (p.window_right >= 0) band.high = off + std::min(p.window_right, far);
    if (p.causal != CQSA_CAUSAL_NONE) band.high = std::min(band.high, off);
    return band;
  }

  bool everything() const { return low == -far && high == far; }

  // Keys that at least one of the queries [q_begin, q_begin + q_len) sees.
  key_range of_rows(int64_t q_begin, int64_t q_len, int64_t seqlen_k) const {
    if (q_len <= 0) return {0, 0};
    const int64_t begin = low == -far ? 0 : std::clamp<int64_t>(q_begin + low, 0, seqlen_k);
    const int64_t end = high == far ? seqlen_k : std::clamp<int64_t>(q_begin + q_len + high, 0, seqlen_k);
    return {begin, std::max(begin, end)};
  }
};

// sum over i in [0, n) of clamp(i + a, 0, limit), in double: counts reach 2^80.
inline double sum_of_clamped(int64_t n, int64_t a, int64_t limit) {
  const int64_t first = std::clamp<int64_t>(-a, 0, n);         // below it the term is 0
  const int64_t last = std::clamp<int64_t>(limit - a, first, n);  // from it on the term is limit
  const double middle = static_cast<double>(last - first);
  return middle * (static_cast<double>(first + a) + static_cast<double>(last - 1 + a)) / 2 +
         static_cast<double>(n - last) * static_cast<double>(limit);
}

// Pairs (i, j) left by causality and window for one head of one sequence.
inline double visible_pairs(const key_band& band, int64_t seqlen_q, int64_t seqlen_k) {
  const double upper = band.high == key_band::far ? static_cast<double>(seqlen_q) * static_cast<double>(seqlen_k)
                                                  : sum_of_clamped(seqlen_q, band.high + 1, seqlen_k);
  const double lower = band.low == -key_band::far ? 0.0 : sum_of_clamped(seqlen_q, band.low, seqlen_k);
  return std::max(0.0, upper - lower);
}

}  // namespace cqsa
