// SPDX-License-Identifier: Apache-2.0
// Partial states of a row, one for each split of its keys, to its result. A group of lanes per row: a lane weighs one split, then
// each lane sums its channels over the splits in their order, so that the bits depend on the states alone.
#pragma once

#include "combine_params.h"
#include "row_end.cuh"

namespace cqsa::gpu {

// Channels of a lane: 4 (lane + Lanes n) + {0 .. 3}.
template <int Lanes> struct combine_sums {
  static constexpr int quads = 512 / 4 / Lanes;
  float x[quads][4];
};

// Where row r of one split ends up.
struct combine_row {
  int64_t batch, head, row;
};
CQSA_DEVICE combine_row place_of(const combine_params& p, int64_t r) {
  const int64_t rest = r / p.row_capacity;
  return {rest / p.num_heads, rest % p.num_heads, r % p.row_capacity};
}

// First row of the batch item in out, and whether the row is one of its.
CQSA_DEVICE bool is_there(const combine_params& p, const combine_row& at, int64_t* first) {
  *first = p.q_row;
  if (!p.cu_seqlens_q) return true;
  const int64_t begin = clamp_i64(load_index(p.cu_seqlens_q, p.index_bytes, at.batch), 0, p.total_q);
  const int64_t end = clamp_i64(load_index(p.cu_seqlens_q, p.index_bytes, at.batch + 1), begin, p.total_q);
  *first = begin;
  return at.row < end - begin;
}

CQSA_DEVICE bool has_keys(float m, float l) { return m != -infinity() || l != 0.0f; }

// The largest m of all splits.
template <int Lanes> CQSA_DEVICE float largest_m(const combine_params& p, int64_t r, int lane) {
  float top = -infinity();
  for (int s = lane; s < p.splits; s += Lanes) top = max_f32(top, p.m[s * p.rows + r]);
#pragma unroll
  for (int mask = Lanes / 2; mask > 0; mask /= 2) top = max_f32(top, shuffle_xor<Lanes>(top, mask));
  return top;
}

CQSA_DEVICE float4x load_acc(const combine_params& p, const float* row, int channel) {
  float4x x;
  if (p.quads) return *reinterpret_cast<const float4x*>(row + channel);
#pragma unroll
  for (int c = 0; c < 4; ++c) x.x[c] = channel + c < p.head_dim_v ? row[channel + c] : 0.0f;
  return x;
}

// sums += the states of splits s0 .. s0 + Step - 1; what their loads have to wait for, they wait for together.
template <int Lanes, int Step>
CQSA_DEVICE void add_splits(const combine_params& p, int64_t r, int s0, int count, float weight, uint64_t used, int lane,
                            combine_sums<Lanes>& sums) {
#pragma unroll
  for (int n = 0; n < combine_sums<Lanes>::quads; ++n) {
    const int channel = 4 * (lane + Lanes * n);
    if (channel - 4 * lane >= p.head_dim_v) break;
    const bool mine = channel < p.head_dim_v;
#pragma unroll 1
    for (int i = 0; i < count; i += Step) {
      float4x part[Step];
#pragma unroll
      for (int k = 0; k < Step; ++k) {
        part[k] = {{0.0f, 0.0f, 0.0f, 0.0f}};
        if (mine && (used >> (i + k) & 1)) part[k] = load_acc(p, p.acc + ((s0 + i + k) * p.rows + r) * p.head_dim_v, channel);
      }
#pragma unroll
      for (int k = 0; k < Step; ++k) {
        const float w = shuffle<Lanes>(weight, (i + k) % Lanes);
        if (!(used >> (i + k) & 1)) continue;
#pragma unroll
        for (int c = 0; c < 4; ++c) sums.x[n][c] = fma_f32(w, part[k].x[c], sums.x[n][c]);
      }
    }
  }
}

// The merged state of row r. All lanes get m and l.
template <int Lanes>
CQSA_DEVICE void combine_states(const combine_params& p, int64_t r, int lane, combine_sums<Lanes>& sums, float* m, float* l) {
  for (auto& quad : sums.x)
    for (float& x : quad) x = 0.0f;
  const float top = largest_m<Lanes>(p, r, lane), ref = top == -infinity() ? 0.0f : top;
  float sum = 0.0f;
  for (int s0 = 0; s0 < p.splits; s0 += Lanes) {
    const int count = p.splits - s0 < Lanes ? p.splits - s0 : Lanes;
    const bool mine = lane < count;
    const float part_m = mine ? p.m[(s0 + lane) * p.rows + r] : -infinity();
    const float part_l = mine ? p.l[(s0 + lane) * p.rows + r] : 0.0f;
    const uint64_t used = ballot<Lanes>(CQSA_MUTANT(11) ? mine : mine && has_keys(part_m, part_l));
    const float weight = CQSA_MUTANT(12) ? 1.0f : exp_f32(part_m - ref);
    for (int i = 0; i < count; ++i) {
      const float w = shuffle<Lanes>(weight, i), x = shuffle<Lanes>(part_l, i);
      if (used >> i & 1) sum = fma_f32(w, x, sum);
    }
    add_splits<Lanes, 8>(p, r, s0, count, weight, used, lane, sums);
  }
  *m = top;
  *l = sum;
}

template <int Lanes>
CQSA_DEVICE void store_state(const combine_params& p, const combine_row& at, int lane, const combine_sums<Lanes>& sums, float m, float l) {
  const int64_t to = (at.batch * p.num_heads + at.head) * p.state_rows + p.state_row + at.row;
  for (int n = 0; n < combine_sums<Lanes>::quads; ++n)
    for (int c = 0; c < 4; ++c) {
      const int channel = 4 * (lane + Lanes * n) + c;
      if (channel < p.head_dim_v) p.state_acc[to * p.head_dim_v + channel] = sums.x[n][c];
    }
  if (lane != 0) return;
  p.state_m[to] = m;
  p.state_l[to] = l;
}

template <int Lanes>
CQSA_DEVICE void store_result(const combine_params& p, const combine_row& at, int64_t first, int lane, const combine_sums<Lanes>& sums,
                              float m, float l) {
  const row_end end = end_row(m, l, sink_of(p.sinks, at.head));
  const int64_t row = first + at.row, to = offset_of(p.out, at.batch, at.head, row, 0);
#pragma unroll
  for (int n = 0; n < combine_sums<Lanes>::quads; ++n)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int channel = 4 * (lane + Lanes * n) + c;
      if (channel < p.head_dim_v)
        store_element(p.out.data, p.out.kind, to + channel * p.out.stride[3], sums.x[n][c] * end.factor / end.divisor);
    }
  if (lane == 0 && p.lse.data) store_u32(p.lse.data + 4 * offset_of(p.lse, at.batch, at.head, row, 0), bits_of(end.lse));
}

template <int Lanes> CQSA_DEVICE void combine_block(const combine_params& p) {
  const int lane = thread_index() % Lanes, each = block_threads() / Lanes;
  for (int64_t r = block_index_x() * each + thread_index() / Lanes; r < p.rows; r += grid_size_x() * each) {
    const combine_row at = place_of(p, r);
    int64_t first = 0;
    if (!is_there(p, at, &first)) continue;
    combine_sums<Lanes> sums;
    float m = 0.0f, l = 0.0f;
    combine_states<Lanes>(p, r, lane, sums, &m, &l);
    if (p.state_acc) store_state<Lanes>(p, at, lane, sums, m, l);
    else store_result<Lanes>(p, at, first, lane, sums, m, l);
  }
}

}  // namespace cqsa::gpu
