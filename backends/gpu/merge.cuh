// SPDX-License-Identifier: Apache-2.0
// Merge of two partial results over disjoint keys, section 10 of cqsa.h. Weights in f64, one rounding at the end. A group of
// lanes per row.
#pragma once

#include "element.cuh"
#include "merge_params.h"

namespace cqsa::gpu {

CQSA_DEVICE float load_f32(const float* from) { return float_of(load_u32(reinterpret_cast<const char*>(from))); }
CQSA_DEVICE void store_f32(float* to, float value) { store_u32(reinterpret_cast<char*>(to), bits_of(value)); }

CQSA_DEVICE int64_t offset_at(const int64_t* stride, const int64_t* at) {
  return at[0] * stride[0] + at[1] * stride[1] + at[2] * stride[2] + at[3] * stride[3];
}

CQSA_DEVICE bool is_finite(float x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }

// The row that counts more first: then the same operations are done whichever way round the operands came, and a compiler's choice
// of contractions changes nothing. Equal weights need an expression that is symmetric by itself.
struct weighted_row {
  const float* row;
  int64_t step;
  float lse;
};

template <int Lanes> CQSA_DEVICE void merge_rows(weighted_row x, weighted_row y, int64_t channels, float* out, int64_t step, float* lse, int lane) {
  if (y.lse > x.lse) {
    const weighted_row swap = x;
    x = y;
    y = swap;
  }
  const double less = exp_f64(double(y.lse) - double(x.lse)), sum = 1.0 + less;
  const double wx = 1.0 / sum, wy = less / sum;
  const bool equal = x.lse == y.lse;
  for (int64_t c = lane; c < channels; c += Lanes) {
    const double a = load_f32(x.row + c * x.step), b = load_f32(y.row + c * y.step);
    store_f32(out + c * step, float(equal ? wx * (a + b) : wx * a + wy * b));
  }
  lanes_barrier<Lanes>();  // lse may be one of the operands'
  if (lane == 0) store_f32(lse, float(double(x.lse) + log_f64(sum)));
}

template <int Lanes> CQSA_DEVICE void merge_row(const cqsa_merge_leaf& m, const int64_t* at, int lane) {
  const weighted_row a = {m.out_a + offset_at(m.out_a_stride, at), m.out_a_stride[4], load_f32(m.lse_a + offset_at(m.lse_a_stride, at))};
  const weighted_row b = {m.out_b + offset_at(m.out_b_stride, at), m.out_b_stride[4], load_f32(m.lse_b + offset_at(m.lse_b_stride, at))};
  float* const out = m.out + offset_at(m.out_stride, at);
  float* const lse = m.lse + offset_at(m.lse_stride, at);
  const int64_t step = m.out_stride[4];
  const bool has_a = is_finite(a.lse), has_b = is_finite(b.lse);
  if (has_a && has_b) {
    merge_rows<Lanes>(a, b, m.head_dim_v, out, step, lse, lane);
    return;
  }
  const weighted_row& only = has_a ? a : b;
  const bool any = has_a || has_b;
  for (int64_t c = lane; c < m.head_dim_v; c += Lanes)
    store_u32(reinterpret_cast<char*>(out + c * step), any ? load_u32(reinterpret_cast<const char*>(only.row + c * only.step)) : 0u);
  lanes_barrier<Lanes>();
  if (lane == 0) store_f32(lse, any ? only.lse : -infinity());
}

template <int Lanes> CQSA_DEVICE void merge_block(const merge_params& p) {
  const int lane = thread_index() % Lanes, each = block_threads() / Lanes;
  for (int64_t n = block_index_x() * each + thread_index() / Lanes; n < p.rows; n += grid_size_x() * each) {
    int64_t at[4], rest = n;
#pragma unroll
    for (int axis = 3; axis >= 0; --axis) {
      at[axis] = rest % p.leaf.shape[axis];
      rest /= p.leaf.shape[axis];
    }
    merge_row<Lanes>(p.leaf, at, lane);
  }
}

}  // namespace cqsa::gpu
