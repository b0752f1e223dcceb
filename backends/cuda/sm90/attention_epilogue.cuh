// SPDX-License-Identifier: Apache-2.0
// How the sums of a thread's two rows begin and end in the Hopper attention: from nothing or a state, to a state or the result. Straight
// from and to global memory, so that the next queries may come into shared memory meanwhile.
#pragma once

#include "attention_softmax.cuh"
#include "backends/gpu/row_end.cuh"

namespace cqsa::gpu::sm90 {

// Where a row of the tile is. Rows are query * heads_packed + head.
struct row_place {
  int64_t head;
  int query;
  bool used;
};
CQSA_DEVICE row_place place_of_row(const attention_params& p, const block_facts& f, int row) {
  const uint32_t packed = uint32_t(p.heads_packed), query = packed == 1 ? uint32_t(row) : uint32_t(row) / packed;
  const int head = row - int(query * packed);
  return {f.first_head + head, int(query), int(query) < f.queries && head < f.heads};
}

CQSA_DEVICE int64_t state_row_of(const attention_params& p, const block_facts& f, const row_place& at) {
  return (f.batch * p.num_heads + at.head) * p.state_rows + f.state_row + at.query;
}

// Calls g(index into the sums, channel) for a thread's pairs of channels of row r.
template <class S, class G> CQSA_DEVICE void for_each_pair(int r, int channels, const G& g) {
  const int column = int(lane_now()) % 4 * 2;
#pragma unroll
  for (int n = 0; n < S::dv / 8; ++n)
    if (8 * n + column < channels) g(4 * n + 2 * r, 8 * n + column);
}

// row0: the thread's first row of the tile, the second one is 8 further.
template <class S>
CQSA_DEVICE void begin_rows(const attention_params& p, const block_facts& f, int row0, thread_rows& rows, float (&o)[S::dv / 2]) {
#pragma unroll
  for (int n = 0; n < S::dv / 2; ++n) o[n] = 0.0f;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const row_place at = place_of_row(p, f, row0 + 8 * r);
    rows.query[r] = at.query;
    rows.m[r] = -infinity();
    rows.l[r] = 0.0f;
    if (!(p.flags & flag_state_in) || !at.used) continue;
    const int64_t row = state_row_of(p, f, at);
    rows.m[r] = p.state_m[row];
    if (lane_now() % 4 == 0) rows.l[r] = p.state_l[row];
    const float* acc = p.state_acc + row * p.head_dim_v;
    for_each_pair<S>(r, p.head_dim_v, [&](int i, int channel) {
      o[i] = acc[channel];
      if (channel + 1 < p.head_dim_v) o[i + 1] = acc[channel + 1];
    });
  }
}

template <class S>
CQSA_DEVICE void store_state(const attention_params& p, const block_facts& f, const row_place& at, int r, float m, float l, const float (&o)[S::dv / 2]) {
  const int64_t row = state_row_of(p, f, at);
  if (lane_now() % 4 == 0) p.state_m[row] = m, p.state_l[row] = l;
  float* acc = p.state_acc + row * p.head_dim_v;
  for_each_pair<S>(r, p.head_dim_v, [&](int i, int channel) {
    acc[channel] = o[i];
    if (channel + 1 < p.head_dim_v) acc[channel + 1] = o[i + 1];
  });
}

template <class S> CQSA_DEVICE void store_row(const gpu_view& out, int64_t to, int channels, int r, float factor, const float (&o)[S::dv / 2]) {
  const bool pairs = out.quads && out.kind != kind_f32;
  for_each_pair<S>(r, channels, [&](int i, int channel) {
    const float a = o[i] * factor, b = o[i + 1] * factor;
    if (pairs) {
      *reinterpret_cast<uint32_t*>(out.data + 2 * (to + channel)) = out.kind == kind_f16 ? pack_f16(a, b) : pack_bf16(a, b);
    } else {
      store_element(out.data, out.kind, to + channel * out.stride[3], a);
      if (channel + 1 < channels) store_element(out.data, out.kind, to + (channel + 1) * out.stride[3], b);
    }
  });
}

template <class S>
CQSA_DEVICE void end_rows(const attention_params& p, const block_facts& f, int row0, const thread_rows& rows, const float (&o)[S::dv / 2]) {
  const float l[2] = {quad_sum(rows.l[0]), quad_sum(rows.l[1])};
  const row_place at[2] = {place_of_row(p, f, row0), place_of_row(p, f, row0 + 8)};
  if (p.flags & flag_state_out) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (at[r].used) store_state<S>(p, f, at[r], r, rows.m[r], l[r], o);
    return;
  }
  // Lanes 0 and 1 of four do a row each: logarithms in f64 take a while.
  const int mine = int(lane_now()) % 2;
  const row_place here = place_of_row(p, f, row0 + 8 * mine);
  const row_end end = end_row(mine ? rows.m[1] : rows.m[0], mine ? l[1] : l[0], here.used ? sink_of(p.sinks, here.head) : -infinity());
  if (here.used && p.lse.data && lane_now() % 4 < 2)
    store_u32(p.lse.data + 4 * offset_of(p.lse, f.batch, here.head, f.q_row + here.query, 0), bits_of(end.lse));
  const float scale = end.factor / end.divisor;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float factor = shuffle<32>(scale, int(lane_now()) / 4 * 4 + r);
    if (at[r].used) store_row<S>(p.out, offset_of(p.out, f.batch, at[r].head, f.q_row + at[r].query, 0), p.head_dim_v, r, factor, o);
  }
}

}  // namespace cqsa::gpu::sm90
