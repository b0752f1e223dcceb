// SPDX-License-Identifier: Apache-2.0
// Exact attention of one tile of query rows over all its keys with the matrix instructions of sm_80, f16 and bf16, sums in f32.
//
// For each tile of keys a warp multiplies its rows of q with k, turns the logits in its registers into p with a running maximum, and
// multiplies p, rounded to halves, with v. The next keys and values travel meanwhile. docs/kernels/NOTES-attention-sm80.md has the
// reasons and the figures.
//
// A row's sums run over keys in tiles that begin at multiples of the tile from the first key of a range, in an order that neither
// its place in the block nor its neighbours change.
#pragma once

#include "attention_mask.cuh"

namespace cqsa::gpu::sm80 {

CQSA_DEVICE int64_t state_index(const attention_params& p, const block_facts& f, int query, int64_t h) {
  return (f.batch * p.num_heads + h) * p.state_rows + f.state_row + query;
}

// Calls f(mt, r, row) for the rows of a lane, r 0 and 1.
template <class S, class F> CQSA_DEVICE void for_each_row(int warp, const F& f) {
#pragma unroll
  for (int mt = 0; mt < S::m_tiles; ++mt)
#pragma unroll
    for (int r = 0; r < 2; ++r) f(mt, r, (warp * S::m_tiles + mt) * 16 + 8 * r + thread_index() % 32 / 4);
}

template <class S> CQSA_DEVICE void clear_sums(row_sums<S>& sums) {
#pragma unroll
  for (int mt = 0; mt < S::m_tiles; ++mt) {
#pragma unroll
    for (int ct = 0; ct < S::dv / 8; ++ct)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums.o[mt][ct][i] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) sums.m[mt][r] = -infinity(), sums.l[mt][r] = 0.0f;
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
    const int lane = thread_index() % 32;
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
  const int lane = thread_index() % 32;
  const row_stage<S> stage(mem, warp);
  for_each_row<S>(warp, [&](int mt, int r, int row) {
#pragma unroll
    for (int ct = 0; ct < S::dv / 8; ++ct) stage.pair(ct) = {{sums.o[mt][ct][2 * r], sums.o[mt][ct][2 * r + 1]}};
    lanes_barrier<32>();
#pragma unroll 1
    for (int n = lane; n < 8 * (S::dv / 4); n += 32) {
      const int down = n / (S::dv / 4), c = n % (S::dv / 4), at = row - lane / 4 + down;
      if (at >= f.rows || c * 4 >= p.head_dim_v) continue;
      float* acc = p.state_acc + state_index(p, f, mem.row_query()[at], mem.row_head()[at]) * p.head_dim_v;
      exchange_chunk<Store>(acc, c * 4, p.head_dim_v, stage.chunk(down, c));
    }
    lanes_barrier<32>();
    const float total = quad_sum(sums.l[mt][r]);
    const bool mine = row < f.rows;
    const int64_t at = mine ? state_index(p, f, mem.row_query()[row], mem.row_head()[row]) : 0;
    if constexpr (Store) {
      if (mine && lane % 4 == 0) p.state_m[at] = sums.m[mt][r], p.state_l[at] = total;
    } else {
#pragma unroll
      for (int ct = 0; ct < S::dv / 8; ++ct) {
        const float2x two = stage.pair(ct);
        sums.o[mt][ct][2 * r] = two.x[0], sums.o[mt][ct][2 * r + 1] = two.x[1];
      }
      lanes_barrier<32>();
      if (mine) sums.m[mt][r] = p.state_m[at];
      if (mine && lane % 4 == 0) sums.l[mt][r] = p.state_l[at];
    }
  });
}

// One thread per row: its lse, and the factor that makes its sums the result.
template <class S> CQSA_DEVICE void close_row(const attention_params& p, const tile_memory<S>& mem, int row) {
  const block_facts& f = mem.facts();
  const int64_t h = mem.row_head()[row];
  const float m = mem.row_m()[row];
  double top = m, sum = mem.row_l()[row], factor = 1.0;
  const double none = -double(infinity());
  const bool empty = sum == 0.0 && m == -infinity();
  if (empty) factor = 0.0;
  if (p.sinks.data) {
    const double sink = load_element(p.sinks.data, kind_f32, h * p.sinks.stride[1]);
    if (empty) {
      top = sink;
      sum = 1.0;
    } else if (sink != none) {
      top = sink > top ? sink : top;
      factor = exp_f64(double(m) - top);
      sum = sum * factor + exp_f64(sink - top);
    }
  }
  const bool nothing = top == none && !(sum != sum);
  if (p.lse.data)
    store_u32(p.lse.data + 4 * offset_of(p.lse, f.batch, h, f.q_row + mem.row_query()[row], 0),
              bits_of(nothing ? -infinity() : float(top + log_f64(sum))));
  mem.row_m()[row] = empty || nothing ? 0.0f : float(factor / sum);
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
  const int lane = thread_index() % 32;
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
      const int64_t to = offset_of(p.out, f.batch, mem.row_head()[at], f.q_row + mem.row_query()[at], 0);
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
    const float total = quad_sum(sums.l[mt][r]);
    if (thread_index() % 4 == 0) mem.row_m()[row] = sums.m[mt][r], mem.row_l()[row] = total;
  });
  lanes_barrier<32>();
  const int row = warp * 16 * S::m_tiles + thread_index() % 32;
  if (thread_index() % 32 < 16 * S::m_tiles && row < f.rows) close_row<S>(p, mem, row);
  lanes_barrier<32>();
  store_rows<S>(p, mem, warp, sums);
}

// Where the keys and values of a range come from: in the plain kernels an address that moves on, in the general ones tables.
template <class S, int Kind> struct key_source {
  const attention_params& p;
  const tile_memory<S>& mem;
  const char *k, *v;

  CQSA_DEVICE void begin(const block_facts& f) {
    if constexpr (S::general) return;
    const int64_t row = f.range.row + f.first;
    k = first_chunk<S, S::d, S::keys>(p.k, f.batch, f.kv_head, row);
    v = first_chunk<S, S::dv, S::keys>(p.v, f.batch, f.kv_head, row);
  }
  // The tile that begins with key `first` of the range; each once, in order. The general kernels have looked it up.
  CQSA_DEVICE void load_k(int first, int end) {
    const int turn = first / S::keys & 1;
    if constexpr (S::general) {
      load_keys<S, Kind, S::d, 0>(p, mem, turn, mem.k(0));
    } else {
      copy_rows<S, S::d, S::keys>(mem.k(S::stages == 2 ? turn : 0), k, 2 * p.k.stride[2], end - first, p.head_dim);
      k += 2 * S::keys * p.k.stride[2];
    }
  }
  CQSA_DEVICE void load_v(int first, int end) {
    const int turn = first / S::keys & 1;
    if constexpr (S::general) {
      load_keys<S, Kind, S::dv, 1>(p, mem, turn, mem.v(0));
    } else {
      copy_rows<S, S::dv, S::keys>(mem.v(S::stages == 2 ? turn : 0), v, 2 * p.v.stride[2], end - first, p.head_dim_v);
      v += 2 * S::keys * p.v.stride[2];
    }
  }
};

// What a warp knows of itself: its number, whether it has rows, and its first and last query.
struct warp_place {
  int warp, first_query, last_query;
  bool active;
};
template <class S> CQSA_DEVICE warp_place place_of_warp(const tile_memory<S>& mem) {
  constexpr int rows = 16 * S::m_tiles;
  const block_facts& f = mem.facts();
  const int warp = thread_index() / 32, first = warp * rows;
  return {warp, mem.row_query()[first], mem.row_query()[first + rows - 1], first < f.rows};
}

// The general kernels' facts of a tile besides its window.
template <class S> CQSA_DEVICE bool has_hidden_pairs(const attention_params& p, const tile_window& w, int queries) {
  return is_partly_hidden(w, queries) || (S::general && (p.mask.data || p.bias.data));
}

// Whether the tile has wild values under hidden pairs; then what they do is added, and they are made 0. All threads come here.
template <class S, int Kind>
CQSA_DEVICE void settle_wild_values(const tile_memory<S>& mem, const tile_window& w, int warp, bool busy, unsigned char* values,
                                    const logit_tile<S>& x, row_sums<S>& sums) {
  block_facts& f = mem.facts();
  if (has_wild_values<S, Kind>(values) && !CQSA_MUTANT(13)) atomic_or(&f.bad[0], 1);
  barrier();
  if (!f.bad[0]) return;
  if (busy) add_wild_values<S, Kind>(values, find_visible<S>(mem, w, warp, x), sums);
  barrier();
  zero_wild_values<S, Kind>(values);
  if (thread_index() == 0) f.bad[0] = 0;
  barrier();
}

template <class S>
CQSA_DEVICE void logits_to_p(const attention_params& p, const tile_memory<S>& mem, const tile_window& w, int64_t tile_pos, int turn, int warp,
                             logit_tile<S>& x, row_sums<S>& sums) {
  if constexpr (S::general) {
    fix_logits<S>(p, mem, w, tile_pos, turn, warp, x);
    softmax<S, true>(1.0f, log2_of_e, x, sums);
  } else {
    if (is_ragged(w, mem.facts().queries, S::keys)) hide_logits<S>(mem, w, warp, x);
    softmax<S, false>(p.softmax_scale, product_f32(p.softmax_scale, log2_of_e), x, sums);
  }
}

template <class S, int Kind>
CQSA_DEVICE void run_range(const attention_params& p, const tile_memory<S>& mem, const warp_place& me, const query_tile<S>& q, row_sums<S>& sums) {
  const block_facts& f = mem.facts();
  const range_window window = window_of(p, f);
  const int queries = f.queries;
  key_source<S, Kind> source{p, mem, nullptr, nullptr};
  source.begin(f);
  // The first turn only sends for the first tile.
#pragma unroll 1
  for (int first = window.first - S::keys; first < window.end; first += S::keys) {
    const int turn = first / S::keys & 1, next = first + S::keys;
    const bool more = next < window.end, real = next > window.first;
    const tile_window w = tile_of(window, first, S::keys);
    const bool visible = w.hi + me.last_query > 0 && w.lo + me.first_query < w.keys;  // something, to this warp
    const bool busy = real && me.active && visible;
    unsigned char* values = mem.v(S::stages == 2 ? turn : 0);
    logit_tile<S> x;
    cp_async_wait<0>();
    barrier();
    if constexpr (S::ahead) {
      if (more) source.load_k(next, window.end), source.load_v(next, window.end);
    } else {
      if (real) source.load_v(first, window.end);
      if constexpr (S::general) {
        if (more) find_keys<S>(p, mem, turn ^ 1, next, window.end);
        if (real && (p.mask.data || p.bias.data)) load_addend<S>(p, mem, w, f.range.row + first + f.mask_shift);
      }
    }
    cp_async_commit();
    if (busy) multiply_qk<S, Kind>(mem, mem.k(S::stages == 2 ? turn : 0), me.warp, q, x);
    if constexpr (!S::ahead) {
      cp_async_wait<0>();
      barrier();
      if (more) source.load_k(next, window.end);
      cp_async_commit();
    }
    if (busy) logits_to_p<S>(p, mem, w, f.range.pos + first, turn, me.warp, x, sums);
    if (real && has_hidden_pairs<S>(p, w, queries)) settle_wild_values<S, Kind>(mem, w, me.warp, busy, values, x, sums);
    if (!busy) continue;
    if constexpr (S::general) {
      if (p.scale_v != scale_none) {
        multiply_pv_scaled<S, Kind>(mem.key_factor(turn) + 2 * S::keys, values, x, sums);
        continue;
      }
    }
    multiply_pv<S, Kind>(values, x, sums);
  }
  cp_async_wait<0>();
}

template <class S, int Kind> CQSA_DEVICE void attention_block(const attention_params& p) {
  const tile_memory<S> mem{shared_memory()};
  block_facts& f = mem.facts();
  const int t = thread_index();
  if (t == 0) {
    begin_block(p, f);
    f.bad[0] = 0;
    if (f.num_ranges > 0) begin_range(p, f, 0, S::keys);
  }
  barrier();
  if (f.rows == 0) return;
  for (int x = t; x < S::rows; x += S::threads) begin_row<S>(p, mem, x);
  barrier();
  const warp_place me = place_of_warp<S>(mem);
  row_sums<S> sums;
  clear_sums<S>(sums);
  if (p.flags & flag_state_in) {
    exchange_state<S, false>(p, mem, me.warp, sums);
    barrier();  // the state came by way of the room for q
  }
  load_queries<S, Kind>(p, mem);
  cp_async_commit();
  query_tile<S> q{};
  if constexpr (S::q_in_registers) {
    cp_async_wait<0>();
    barrier();
#pragma unroll
    for (int step = 0; step < S::d / 16; ++step) read_queries<S>(mem, step, me.warp, q.a[step]);
  }
#pragma unroll 1
  for (int64_t n = 0; n < f.num_ranges; ++n) {
    if (n > 0) {
      barrier();  // the last range's facts and tiles are in use
      if (t == 0) begin_range(p, f, n, S::keys);
      barrier();
    }
    if (f.first < f.end) run_range<S, Kind>(p, mem, me, q, sums);
  }
  cp_async_wait<0>();
  barrier();
  finish_rows<S>(p, mem, me.warp, sums);
}

}  // namespace cqsa::gpu::sm80
