// SPDX-License-Identifier: Apache-2.0
// The keys of a range in the plain kernels of the sm_80 attention.
#pragma once

#include "attention_mask.cuh"

namespace cqsa::gpu::sm80 {

// Tiles begin .. end - 1 of a range.
struct tile_span {
  int begin, end;
};

// What a block and its warps know of a range, in the shared memory where general kernels have slopes: registers are for the sums.
struct range_plan {
  int64_t k_at, v_at;  // offsets of the first row
  int keys, tiles;
  tile_span whole;     // tiles that hide nothing from any row
  tile_span seen[4];   // by warp: tiles of which it sees something
};
template <class S> CQSA_DEVICE range_plan& plan_of(const tile_memory<S>& mem) { return *reinterpret_cast<range_plan*>(mem.row_slope()); }

CQSA_DEVICE int tiles_before(int keys, int tile_keys, bool up) {
  if (keys <= 0) return 0;
  return (keys + (up ? tile_keys - 1 : 0)) / tile_keys;
}

// One thread, for the block.
template <class S> CQSA_DEVICE void plan_range(const attention_params& p, const tile_memory<S>& mem) {
  static_assert(sizeof(range_plan) <= (S::ahead ? 64 : 4 * S::rows), "its place");
  const block_facts& f = mem.facts();
  range_plan& plan = plan_of<S>(mem);
  const range_window w = window_of(p, f);
  const int64_t row = f.range.row + w.first;
  plan.k_at = offset_of(p.k, f.batch, f.kv_head, row, 0);
  plan.v_at = offset_of(p.v, f.batch, f.kv_head, row, 0);
  plan.keys = w.end - w.first;
  plan.tiles = tiles_before(plan.keys, S::keys, true);
  plan.whole.begin = tiles_before(w.lo + f.queries - 1 - w.first, S::keys, true);
  plan.whole.end = tiles_before((w.hi < w.end ? w.hi : w.end) - w.first, S::keys, false);
}
// All lanes of a warp, for it.
template <class S> CQSA_DEVICE void plan_warp(const attention_params& p, const tile_memory<S>& mem) {
  const warp_place me = place_of_warp<S>(mem);
  const range_window w = window_of(p, mem.facts());
  const int hi = w.hi + me.last_query < w.end ? w.hi + me.last_query : w.end;
  tile_span seen = {tiles_before(w.lo + me.first_query - w.first, S::keys, false), tiles_before(hi - w.first, S::keys, true)};
  if (!me.active) seen = {0, 0};
  if (thread_now() % 32 == 0) plan_of<S>(mem).seen[me.warp] = seen;
  lanes_barrier<32>();
}

// Sends for tile n of k or of v, or for nothing past the end.
template <class S, int D, bool Values> CQSA_DEVICE void send_tile(const attention_params& p, const tile_memory<S>& mem, int n, unsigned char* to) {
  using layout = copy_plan<S, D, S::keys>;
  const range_plan& plan = plan_of<S>(mem);
  const int left = plan.keys - n * S::keys;
  if (left <= 0) return;
  const gpu_view& x = Values ? p.v : p.k;
  const int t = thread_in_loop();
  const int64_t at = (Values ? plan.v_at : plan.k_at) + (int64_t(n) * S::keys + t / layout::group) * x.stride[2];
  copy_rows<S, D, S::keys>(to, x.data + 2 * at + t % layout::group * 16, 2 * x.stride[2], left, Values ? p.head_dim_v : p.head_dim);
}

// m, l and o for the maxima of a tile's logits.
template <class S>
CQSA_DEVICE void raise_maxima(const attention_params& p, const tile_memory<S>& mem, int warp, const logit_tile<S>& x, row_references<S>& references,
                              row_sums<S>& sums) {
  row_factors<S> factors;
#pragma unroll
  for (int mt = 0; mt < S::m_tiles; ++mt)
#pragma unroll
    for (int r = 0; r < 2; ++r)
      raise_maximum<S>(largest_logit<S>(x, mt, r) * p.softmax_scale, mt, r, maximum_of<S>(mem, warp, mt, r), references, factors);
  scale_sums<S>(mem, factors, sums);
}

// From logits to p. It is one block of code with the product by v: p of the first keys is multiplied while that of the last ones is
// computed.
template <class S>
CQSA_DEVICE void weigh(const attention_params& p, const tile_memory<S>& mem, const row_references<S>& references, logit_tile<S>& x) {
  const float scale2 = product_f32(p.softmax_scale, log2_of_e);
  float2x l[S::m_tiles];
#pragma unroll
  for (int mt = 0; mt < S::m_tiles; ++mt) l[mt] = mem.lane_l(mt);
#pragma unroll
  for (int nt = 0; nt < S::keys / 8; ++nt)
#pragma unroll
    for (int mt = 0; mt < S::m_tiles; ++mt)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x.s[mt][nt][i] = exp2_f32(fma_f32(x.s[mt][nt][i], scale2, -references.of[mt][i / 2]));
        l[mt].x[i / 2] += x.s[mt][nt][i];
      }
#pragma unroll
  for (int mt = 0; mt < S::m_tiles; ++mt) mem.lane_l(mt) = l[mt];
}

// The first tile of a range, as soon as the block knows where it is.
template <class S> CQSA_DEVICE void send_first(const attention_params& p, const tile_memory<S>& mem) {
  send_tile<S, S::d, false>(p, mem, 0, mem.k(0));
  if constexpr (S::ahead) send_tile<S, S::dv, true>(p, mem, 0, mem.v(0));
  cp_async_commit();
}

template <class S, int Kind>
CQSA_DEVICE void run_range_plain(const attention_params& p, const tile_memory<S>& mem, row_sums<S>& sums) {
  const block_facts& f = mem.facts();
  const range_plan& plan = plan_of<S>(mem);
  const int warp = thread_in_loop() / 32;
  plan_warp<S>(p, mem);
#pragma unroll 1
  for (int n = 0; n < plan.tiles; ++n) {
    const int turn = S::ahead ? n & 1 : 0;
    const tile_span seen = plan.seen[warp], whole = plan.whole;
    const bool busy = n >= seen.begin && n < seen.end, ragged = n < whole.begin || n >= whole.end;
    unsigned char* values = mem.v(turn);
    logit_tile<S> x;
    row_references<S> references;
    cp_async_wait<0>();
    barrier();
    if constexpr (S::ahead) send_tile<S, S::d, false>(p, mem, n + 1, mem.k(turn ^ 1));
    send_tile<S, S::dv, true>(p, mem, S::ahead ? n + 1 : n, S::ahead ? mem.v(turn ^ 1) : values);
    cp_async_commit();
    if (busy) multiply_qk<S, Kind>(mem, mem.k(turn), warp, x);
    if constexpr (!S::ahead) {
      cp_async_wait<0>();
      barrier();
      send_tile<S, S::d, false>(p, mem, n + 1, mem.k(0));
      cp_async_commit();
    }
    if (busy) {
      if (ragged) hide_logits<S>(mem, tile_of(window_of(p, f), int(f.first) + n * S::keys, S::keys), warp, x);
      raise_maxima<S>(p, mem, warp, x, references, sums);
    }
    if (ragged) settle_wild_values<S, Kind>(mem, tile_of(window_of(p, f), int(f.first) + n * S::keys, S::keys), warp, busy, values, x, sums);
    if (!busy) continue;
    weigh<S>(p, mem, references, x);
    multiply_pv<S, Kind>(values, x, sums);
  }
}

}  // namespace cqsa::gpu::sm80
