// SPDX-License-Identifier: Apache-2.0
// A warpgroup of the Hopper attention and its 64 query rows: s = q k^T, softmax, o += p v over the tiles of keys that the loader brings.
//
// The product of p with v of one tile and that of q with the next keys are under way together; the softmax of the next tile runs while
// the former ends. Warpgroups take turns in starting their products, so that the softmax of one lies under the products of another.
#pragma once

#include "attention_softmax.cuh"

namespace cqsa::gpu::sm90 {

template <class S> struct group_place {
  uint32_t q;     // shared address of the warpgroup's rows of q
  int group;      // of those that compute
};

// Warpgroups start their products one after the other, in a ring.
constexpr int first_turn = 1;  // number of the first one's barrier
template <class S> CQSA_DEVICE void begin_turns(int group) {
  if (group == S::groups - 1) pass(first_turn, 256);
}
template <class S> CQSA_DEVICE void wait_for_turn(int group) { meet(first_turn + group, 256); }
template <class S> CQSA_DEVICE void pass_turn(int group) { pass(first_turn + (group + 1) % S::groups, 256); }

template <class S, int Kind> CQSA_DEVICE void start_qk(const tile_memory<S>& mem, const group_place<S>& me, uint32_t n, float (&s)[S::keys / 2]) {
  const uint32_t keys = shared_address(mem.k(n));
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < (S::d + 15) / 16; ++step) {
    const uint32_t panel = step / 4, right = step % 4 * 32;
    wgmma_instruction<S::keys, Kind, 0>::shared(s, matrix_at(me.q + panel * S::q_panel + right, 16), matrix_at(keys + panel * S::k_panel + right, 16),
                                                step > 0);
  }
  wgmma_commit();
}
template <class S, int Kind>
CQSA_DEVICE void start_pv(const tile_memory<S>& mem, uint32_t n, const uint32_t (&p)[S::keys / 16][4], float (&o)[S::dv / 2]) {
  const uint32_t values = shared_address(mem.v(n));
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < S::keys / 16; ++step)
    wgmma_instruction<S::dv, Kind, 1>::registers(o, p[step], matrix_at(values + step * 2048, S::k_panel));
  wgmma_commit();
}

// What NaN and Inf in a tile of v make of the rows that see them, from global memory: they are 0 in shared memory. Slow; nobody waits
// for it.
template <class S, int Kind>
CQSA_DEVICE void add_wild(const params& p, const block_facts& f, const key_tile& t, const thread_rows& rows, float (&o)[S::dv / 2]) {
  const key_span a = visible(t, rows.query[0]), b = visible(t, rows.query[1]);
  const int column = int(lane_now()) % 4 * 2;
#pragma unroll 1
  for (int key = 0; key < t.keys; ++key) {
    const bool see[2] = {uint32_t(key - a.begin) < a.count, uint32_t(key - b.begin) < b.count};
    const char* row = p.a.v.data + 2 * offset_of(p.a.v, f.batch, f.kv_head, t.row + key, 0);
#pragma unroll
    for (int n = 0; n < S::dv / 8; ++n) {
      if (8 * n + column >= p.a.head_dim_v) continue;
      const uint32_t two = *reinterpret_cast<const uint32_t*>(row + 2 * (8 * n + column));
      if (!is_wild<Kind>(two)) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t half = two >> 16 * (i % 2) & 0xffffu;
        if (see[i / 2] && without_wild<Kind>(half) != half) o[4 * n + i] += Kind == kind_f16 ? f16_to_f32(uint16_t(half)) : bf16_to_f32(half);
      }
    }
  }
}

// Values of tile n are there, also looked through where they have to be.
template <class S> CQSA_DEVICE void wait_for_values(const tile_memory<S>& mem, uint32_t n) {
  block_barriers<S>& b = mem.barriers();
  wait_phase(b.full_v[slot_of<S>(n)], parity_of<S>(n));
  if (mem.info(n).flags & tile_ragged) wait_phase(b.seen_v[slot_of<S>(n)], parity_of<S>(n));
}
template <class S, int Kind>
CQSA_DEVICE void end_pv(const params& p, const tile_memory<S>& mem, uint32_t unit, uint32_t n, const thread_rows& rows, float (&o)[S::dv / 2]) {
  wgmma_wait<0>();
  after_wait(o);
  const key_tile& t = mem.info(n);
  if (t.flags & tile_wild) add_wild<S, Kind>(p, mem.facts(unit).f, t, rows, o);
  warp_arrives(mem.barriers().empty_v[slot_of<S>(n)]);
}

// The logits are there: their keys' place is free, and after the last ones that of q.
template <class S> CQSA_DEVICE key_tile end_qk(const tile_memory<S>& mem, uint32_t n) {
  const key_tile t = mem.info(n);
  warp_arrives(mem.barriers().empty_k[slot_of<S>(n)]);
  if (t.flags & tile_last) warp_arrives(mem.barriers().empty_q);
  return t;
}

template <class S>
CQSA_DEVICE void soften(const attention_params& p, const key_tile& t, thread_rows& rows, float (&factor)[2], float (&s)[S::keys / 2]) {
  if (p.softcap > 0) cap_logits<S>(p, s);
  if (t.flags & tile_ragged) hide_logits<S>(t, rows, s);
  const float scale = scale_of(p);
  raise_maxima<S>(scale, s, rows, factor);
  weigh<S>(scale, rows, s);
}

// All tiles of keys of a tile of queries, n of them from `keys` on.
template <class S, int Kind>
CQSA_DEVICE void run_keys(const params& p, const tile_memory<S>& mem, const group_place<S>& me, uint32_t unit, uint32_t& keys, thread_rows& rows,
                          float (&o)[S::dv / 2]) {
  block_barriers<S>& b = mem.barriers();
  float s[S::keys / 2], factor[2];
  uint32_t weights[S::keys / 16][4];
  wait_phase(b.full_k[slot_of<S>(keys)], parity_of<S>(keys));
  start_qk<S, Kind>(mem, me, keys, s);
  wgmma_wait<0>();
  after_wait(s);
  key_tile t = end_qk<S>(mem, keys);
  soften<S>(p.a, t, rows, factor, s);
  pack_p<S, Kind>(s, weights);
  scale_sums<S>(factor, o);
  while (!(t.flags & tile_last)) {
    ++keys;
    wait_phase(b.full_k[slot_of<S>(keys)], parity_of<S>(keys));
    wait_for_turn<S>(me.group);
    start_qk<S, Kind>(mem, me, keys, s);
    wait_for_values<S>(mem, keys - 1);
    start_pv<S, Kind>(mem, keys - 1, weights, o);
    pass_turn<S>(me.group);
    wgmma_wait<1>();
    after_wait(s);
    t = end_qk<S>(mem, keys);
    soften<S>(p.a, t, rows, factor, s);
    end_pv<S, Kind>(p, mem, unit, keys - 1, rows, o);
    pack_p<S, Kind>(s, weights);
    scale_sums<S>(factor, o);
  }
  wait_for_values<S>(mem, keys);
  start_pv<S, Kind>(mem, keys, weights, o);
  end_pv<S, Kind>(p, mem, unit, keys, rows, o);
  ++keys;
}

}  // namespace cqsa::gpu::sm90
