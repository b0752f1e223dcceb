// SPDX-License-Identifier: Apache-2.0
// As backends/gpu/moe_few.cuh, for rows of one format that is known, with codes of q8: both rows at once, and of each some pieces on their way.
#pragma once

#include "backends/gpu/moe_few.cuh"

namespace cqsa::gpu::sm80 {

template <class Format, int Ahead> struct rows_of_format {
  struct pieces {
    typename Format::words words[2][Ahead];
    int part[Ahead];
  };
  static CQSA_DEVICE void load(const char* const (&row)[2], int64_t first, int64_t last, pieces& out) {
#pragma unroll
    for (int a = 0; a < Ahead; ++a)
#pragma unroll
      for (int i = 0; i < 2; ++i) out.words[i][a] = load_piece<Format>(row[i], min_i64(first + few_lanes * a, last), &out.part[a]);
  }
  static CQSA_DEVICE void add(const few_memory<true>& mem, int64_t first, int64_t last, const pieces& p, int count, few_sums& sums) {
#pragma unroll
    for (int a = 0; a < Ahead; ++a) {
      if (first + few_lanes * a > last) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        quant_codes c;
        Format::unpack(p.words[i][a], p.part[a], &c);
        add_piece(mem, first + few_lanes * a, c, count, sums.x[i]);
      }
    }
  }
  // A row that is not there is read as the other one; its sums are not stored.
  template <int Lanes> static CQSA_DEVICE void sum(const few_memory<true>& mem, const few_rows& rows, int64_t n, int count, few_sums& sums) {
#pragma unroll
    for (int i = 0; i < 2 * moe_few_tokens; ++i) sums.x[i / moe_few_tokens][i % moe_few_tokens] = 0.0f;
    const char* const row[2] = {rows.data[0] ? rows.data[0] : rows.data[1], rows.data[1] ? rows.data[1] : rows.data[0]};
    const int64_t last = n / 32 - 1;
    pieces now;
    if (row[0]) {
#pragma unroll 1
      for (int64_t first = thread_index() % few_lanes; first <= last; first += few_lanes * Ahead) {
        load(row, first, last, now);
        add(mem, first, last, now, count, sums);
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * moe_few_tokens; ++i) {
      float& x = sums.x[i / moe_few_tokens][i % moe_few_tokens];
      if (i % moe_few_tokens >= count) continue;
#pragma unroll
      for (int mask = 1; mask < few_lanes; mask *= 2) x += shuffle_xor<Lanes>(x, mask);
    }
  }
};

}  // namespace cqsa::gpu::sm80
