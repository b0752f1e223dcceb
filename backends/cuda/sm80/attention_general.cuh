// SPDX-License-Identifier: Apache-2.0
// The keys of a range in the general kernels of the sm_80 attention: logits, what changes or hides them, p, values, one after the
// other. Each tile of k and of v is sent for when its place has become free; the other blocks of the multiprocessor compute meanwhile.
#pragma once

#include "attention_mask.cuh"

namespace cqsa::gpu::sm80 {

// s = q k^T where groups of channels of k have scales of their own: each group's product is multiplied with its scale in f32.
template <class S, int Kind>
CQSA_DEVICE void multiply_qk_grouped(const attention_params& p, const tile_memory<S>& mem, int parity, int warp, logit_tile<S>& x) {
  const matrix_place<S::d, false> place(mem.k(0), 0, thread_now());
  clear_logits<S>(x);
#pragma unroll
  for (int pair = 0; pair < S::keys / 16; ++pair) {
    float part[2][4] = {};
#pragma unroll 1
    for (int step = 0; step * 16 < p.head_dim; ++step) {
      uint32_t a[S::m_tiles][4], b[4];
      read_queries<S>(mem, step, warp, a);
      ldmatrix_x4(b, place.at(pair, step));
      mma<Kind>(part[0], a[0], b[0], b[1]);
      mma<Kind>(part[1], a[0], b[2], b[3]);
      if ((step + 1) * 16 % p.kv_group != 0 && (step + 1) * 16 < p.head_dim) continue;
#pragma unroll
      for (int n = 0; n < 4; ++n) {  // two keys of two tiles
        const int key = pair * 16 + n / 2 * 8 + thread_now() % 4 * 2 + n % 2;
        const bool gone = mem.key_factor(parity)[S::keys + key] != 0.0f;
        const float scale = gone ? 0.0f : group_scale(p, p.k_scale, mem.key_offset(parity, 2)[key], step * 16);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float& sum = part[n / 2][2 * r + n % 2];
          x.s[0][2 * pair + n / 2][2 * r + n % 2] = fma_f32(sum, scale, x.s[0][2 * pair + n / 2][2 * r + n % 2]);
          sum = 0.0f;
        }
      }
    }
  }
}

// From logits in natural units to p; m, l and o follow. The p of a pair that is hidden is -0, by which others know it.
template <class S> CQSA_DEVICE void softmax(const tile_memory<S>& mem, int warp, logit_tile<S>& x, row_sums<S>& sums) {
  row_factors<S> factors;
  row_references<S> references;
#pragma unroll
  for (int r = 0; r < 2; ++r) raise_maximum<S>(largest_logit<S>(x, 0, r), 0, r, maximum_of<S>(mem, warp, 0, r), references, factors);
  scale_sums<S>(mem, factors, sums);
  float2x l = mem.lane_l(0);
#pragma unroll
  for (int nt = 0; nt < S::keys / 8; ++nt)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float e = exp2_f32(fma_f32(x.s[0][nt][i], log2_of_e, -references.of[0][i / 2]));
      l.x[i / 2] += e;
      x.s[0][nt][i] = x.s[0][nt][i] == -infinity() ? -0.0f : e;
    }
  mem.lane_l(0) = l;
}

// Whether the warp has a row that sees something of the tile from key `first` on.
template <class S> CQSA_DEVICE bool sees_tile(const attention_params& p, const tile_memory<S>& mem, int first) {
  const warp_place me = place_of_warp<S>(mem);
  const tile_window w = tile_of(window_of(p, mem.facts()), first, S::keys);
  return me.active && w.hi + me.last_query > 0 && w.lo + me.first_query < w.keys;
}

template <class S, int Kind>
CQSA_DEVICE void run_range_general(const attention_params& p, const tile_memory<S>& mem, row_sums<S>& sums) {
  const block_facts& f = mem.facts();
  // The first turn only looks up and sends for the first tile. Where the block stands is read anew in each: registers are for the
  // sums.
#pragma unroll 1
  for (int first = int(f.first) - S::keys; first < int(f.end); first += S::keys) {
    const int turn = first / S::keys & 1;
    const bool more = first + S::keys < int(f.end), real = first >= int(f.first);
    const bool busy = real && sees_tile<S>(p, mem, first);
    const auto here = [&] { return tile_of(window_of(p, f), first, S::keys); };
    logit_tile<S> x;
    cp_async_wait<0>();
    barrier();
    if (real) load_keys<S, Kind, S::dv, 1>(p, mem, turn, mem.v(0));
    cp_async_commit();
    if (more) find_keys<S>(p, mem, turn ^ 1, first + S::keys, f.end);
    if (real && (p.mask.data || p.bias.data)) load_addend<S>(p, mem, here(), f.range.row + first + f.mask_shift);
    if (busy && p.scale_k == scale_per_group) multiply_qk_grouped<S, Kind>(p, mem, turn, thread_now() / 32, x);
    else if (busy) multiply_qk<S, Kind>(mem, mem.k(0), thread_now() / 32, x);
    cp_async_wait<0>();
    barrier();
    if (more) load_keys<S, Kind, S::d, 0>(p, mem, turn ^ 1, mem.k(0));
    cp_async_commit();
    if (busy) {
      fix_logits<S>(p, mem, here(), f.range.pos + first, turn, thread_now() / 32, x);
      softmax<S>(mem, thread_now() / 32, x, sums);
    }
    if (real && (is_partly_hidden(here(), f.queries) || p.mask.data || p.bias.data))
      settle_wild_values<S, Kind>(mem, here(), thread_now() / 32, busy, mem.v(0), x, sums);
    if (!busy) continue;
    if (p.scale_v != scale_none) multiply_pv_scaled<S, Kind>(mem.key_factor(turn) + 2 * S::keys, mem.v(0), x, sums);
    else multiply_pv<S, Kind>(mem.v(0), x, sums);
  }
}

}  // namespace cqsa::gpu::sm80
