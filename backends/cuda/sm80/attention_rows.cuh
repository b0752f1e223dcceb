// SPDX-License-Identifier: Apache-2.0
// How a warp's sums begin and end in the sm_80 attention: from nothing or a state, to a state or the result.
#pragma once

#include "attention_mask.cuh"
#include "backends/gpu/row_end.cuh"

namespace cqsa::gpu::sm80 {

CQSA_DEVICE int64_t state_index(const attention_params& p, const block_facts& f, int query, int64_t h) {
  return (f.batch * p.num_heads + h) * p.state_rows + f.state_row + query;
}

// Calls f(mt, r, row) for the rows of a lane, r 0 and 1.
template <class S, class F> CQSA_DEVICE void for_each_row(int warp, const F& f) {
#pragma unroll
  for (int mt = 0; mt < S::m_tiles; ++mt)
#pragma unroll
    for (int r = 0; r < 2; ++r) f(mt, r, (warp * S::m_tiles + mt) * 16 + 8 * r + thread_now() % 32 / 4);
}

template <class S> CQSA_DEVICE void clear_sums(const tile_memory<S>& mem, int warp, row_sums<S>& sums) {
#pragma unroll
  for (int mt = 0; mt < S::m_tiles; ++mt) {
#pragma unroll
    for (int ct = 0; ct < S::dv / 8; ++ct)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums.o[mt][ct][i] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) maximum_of<S>(mem, warp, mt, r) = -infinity(), mem.lane_l(mt).x[r] = 0.0f;
  }
}

// Sums pass through shared memory, eight rows of a warp at a time, so that memory sees rows in runs of sixteen bytes. The warp's rows
// of q have that much room. Chunks of four channels are exchanged by the row, for the banks.
template <class S> struct row_stage {
  float* base;
  CQSA_DEVICE row_stage(const tile_memory<S>& mem, int warp) : base(reinterpret_cast<float*>(mem.q() + warp * (32 * S::m_tiles * S::d))) {}
  CQSA_DEVICE float* chunk(int row, int c) const { return base + row * S::dv + 4 * (c ^ (row & 3) * 2); }
  // The lane's two channels of fragment ct.
  CQSA_DEVICE float2x& pair(int ct) const {
    const int lane = thread_now() % 32;
    return *reinterpret_cast<float2x*>(chunk(lane / 4, 2 * ct + lane % 4 / 2) + lane % 2 * 2);
  }
};

// Four channels of a row of the state from or to the stage.
template <bool Store> CQSA_DEVICE void exchange_chunk(float* state, int channel, int channels, float* staged) {
  if (channels % 4 == 0) {
    if constexpr (Store) *reinterpret_cast<float4x*>(state + channel) = *reinterpret_cast<const float4x*>(staged);
    else *reinterpret_cast<float4x*>(staged) = *reinterpret_cast<const float4x*>(state + channel);
    return;
  }
#pragma unroll 1
  for (int i = 0; i < 4 && channel + i < channels; ++i) Store ? state[channel + i] = staged[i] : staged[i] = state[channel + i];
}

// The sums from the state between calls, or to it. l is a sum over the quad; when it comes back one lane has it.
template <class S, bool Store> CQSA_DEVICE void exchange_state(const attention_params& p, const tile_memory<S>& mem, int warp, row_sums<S>& sums) {
  const block_facts& f = mem.facts();
  const int lane = thread_now() % 32;
  const row_stage<S> stage(mem, warp);
  for_each_row<S>(warp, [&](int mt, int r, int row) {
    const bool mine = row < f.rows;
    const int64_t index = mine ? state_index(p, f, mem.row_query(row), mem.row_head(row)) : 0;
    if constexpr (Store) {
      const float total = quad_sum(mem.lane_l(mt).x[r]);
      if (mine && lane % 4 == 0) p.state_m[index] = mem.row_m()[row], p.state_l[index] = total;
    } else {
      if (mine) mem.row_m()[row] = p.state_m[index];
      if (mine && lane % 4 == 0) mem.lane_l(mt).x[r] = p.state_l[index];
    }
#pragma unroll
    for (int ct = 0; ct < S::dv / 8; ++ct) stage.pair(ct) = {{sums.o[mt][ct][2 * r], sums.o[mt][ct][2 * r + 1]}};
    lanes_barrier<32>();
#pragma unroll 1
    for (int n = lane; n < 8 * (S::dv / 4); n += 32) {
      const int down = n / (S::dv / 4), c = n % (S::dv / 4), at = row - lane / 4 + down;
      if (at >= f.rows || c * 4 >= p.head_dim_v) continue;
      float* acc = p.state_acc + state_index(p, f, mem.row_query(at), mem.row_head(at)) * p.head_dim_v;
      exchange_chunk<Store>(acc, c * 4, p.head_dim_v, stage.chunk(down, c));
    }
    lanes_barrier<32>();
    if constexpr (!Store) {
#pragma unroll
      for (int ct = 0; ct < S::dv / 8; ++ct) {
        const float2x two = stage.pair(ct);
        sums.o[mt][ct][2 * r] = two.x[0], sums.o[mt][ct][2 * r + 1] = two.x[1];
      }
    }
  });
}

// One thread per row: its lse, and the factor that makes its sums the result.
template <class S> CQSA_DEVICE void close_row(const attention_params& p, const tile_memory<S>& mem, int row) {
  const block_facts& f = mem.facts();
  const int64_t h = mem.row_head(row);
  const row_end end = end_row(mem.row_m()[row], mem.row_l()[row], sink_of(p.sinks, h));
  if (p.lse.data) store_u32(p.lse.data + 4 * offset_of(p.lse, f.batch, h, f.q_row + mem.row_query(row), 0), bits_of(end.lse));
  mem.row_m()[row] = end.factor / end.divisor;
}

// Eight channels of the result.
CQSA_DEVICE void store_chunk(const gpu_view& out, int64_t at, int channel, int channels, const float4x& low, const float4x& high) {
  if (out.quads && out.kind == kind_f32) {
    *reinterpret_cast<float4x*>(out.data + 4 * (at + channel)) = low;
    *reinterpret_cast<float4x*>(out.data + 4 * (at + channel) + 16) = high;
  } else if (out.quads) {
    const bool f16 = out.kind == kind_f16;
    word4x w;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float a = i < 2 ? low.x[2 * i] : high.x[2 * i - 4], b = i < 2 ? low.x[2 * i + 1] : high.x[2 * i - 3];
      w.x[i] = f16 ? pack_f16(a, b) : pack_bf16(a, b);
    }
    *reinterpret_cast<word4x*>(out.data + 2 * (at + channel)) = w;
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (channel + i < channels) store_element(out.data, out.kind, at + (channel + i) * out.stride[3], i < 4 ? low.x[i % 4] : high.x[i % 4]);
  }
}

template <class S> CQSA_DEVICE void store_rows(const attention_params& p, const tile_memory<S>& mem, int warp, const row_sums<S>& sums) {
  const block_facts& f = mem.facts();
  const int lane = thread_now() % 32;
  const row_stage<S> stage(mem, warp);
  for_each_row<S>(warp, [&](int mt, int r, int row) {
    const float factor = mem.row_m()[row];
#pragma unroll
    for (int ct = 0; ct < S::dv / 8; ++ct) stage.pair(ct) = {{sums.o[mt][ct][2 * r] * factor, sums.o[mt][ct][2 * r + 1] * factor}};
    lanes_barrier<32>();
#pragma unroll 1
    for (int n = lane; n < S::dv; n += 32) {
      const int down = n / (S::dv / 8), c = n % (S::dv / 8), at = row - lane / 4 + down;
      if (at >= f.rows || c * 8 >= p.head_dim_v) continue;
      const int64_t to = offset_of(p.out, f.batch, mem.row_head(at), f.q_row + mem.row_query(at), 0);
      store_chunk(p.out, to, c * 8, p.head_dim_v, *reinterpret_cast<const float4x*>(stage.chunk(down, 2 * c)),
                  *reinterpret_cast<const float4x*>(stage.chunk(down, 2 * c + 1)));
    }
    lanes_barrier<32>();
  });
}

template <class S> CQSA_DEVICE void finish_rows(const attention_params& p, const tile_memory<S>& mem, int warp, row_sums<S>& sums) {
  const block_facts& f = mem.facts();
  if (p.flags & flag_state_out) {
    exchange_state<S, true>(p, mem, warp, sums);
    return;
  }
  for_each_row<S>(warp, [&](int mt, int r, int row) {
    const float total = quad_sum(mem.lane_l(mt).x[r]);
    if (thread_now() % 4 == 0) mem.row_l()[row] = total;
  });
  lanes_barrier<32>();
  const int row = warp * 16 * S::m_tiles + thread_now() % 32;
  if (thread_now() % 32 < 16 * S::m_tiles && row < f.rows) close_row<S>(p, mem, row);
  lanes_barrier<32>();
  store_rows<S>(p, mem, warp, sums);
}

}  // namespace cqsa::gpu::sm80
