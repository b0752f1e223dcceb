// SPDX-License-Identifier: Apache-2.0
// A warpgroup of the Hopper attention and its 64 query rows: s = q k^T, softmax, o += p v over the tiles of keys that the loader brings.
//
// The product of p with v of one tile and that of q with the next keys are under way together; the softmax of the next tile runs while
// the former ends. Warpgroups take turns in starting their products, so that the softmax of one lies under the products of another.
#pragma once

#include "attention_softmax.cuh"

namespace cqsa::gpu::sm90 {

// Warpgroups start their products one after the other, in a ring.
constexpr int first_turn = 1;  // number of the first one's barrier
template <class S> CQSA_DEVICE void begin_turns(int group) {
  if (group == S::groups - 1) pass(first_turn, 256);
}
template <class S> CQSA_DEVICE void wait_for_turn(int group) { meet(first_turn + group, 256); }
template <class S> CQSA_DEVICE void pass_turn(int group) { pass(first_turn + (group + 1) % S::groups, 256); }

template <class S, int Kind> CQSA_DEVICE void start_qk(const tile_memory<S>& mem, int group, uint32_t n, float (&s)[S::keys / 2]) {
  const matrix_place queries(shared_address(mem.q(group)), 16), keys(shared_address(mem.k(n)), 16);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < (S::d + 15) / 16; ++step) {
    const uint32_t panel = step / 4, right = step % 4 * 32;
    wgmma_instruction<S::keys, Kind, 0>::shared(s, queries.at(panel * S::q_panel + right), keys.at(panel * S::k_panel + right), step > 0);
  }
  wgmma_commit();
}
template <class S, int Kind>
CQSA_DEVICE void start_pv(const tile_memory<S>& mem, uint32_t n, const packed_weights<S>& p, float (&o)[S::dv / 2]) {
  const matrix_place values(shared_address(mem.v(n)), S::k_panel);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < S::keys / 16; ++step) wgmma_instruction<S::dv, Kind, 1>::registers(o, p.of[step], values.at(step * 2048));
  wgmma_commit();
}

// Where a row of v is; item < 0: on a missing page.
struct value_place {
  int64_t item, row;
};
CQSA_DEVICE value_place place_of_value(const params& p, const block_facts& f, int64_t row) {
  if (p.page_part == 0) return {f.batch, row};
  const uint32_t page = uint32_t(row) / uint32_t(p.a.page_size);
  return {page_at(p.a, f.batch, page), row - page * p.a.page_size};
}

// What NaN and Inf in a tile of v make of the rows that see them, from global memory: they are 0 in shared memory. Slow; nobody waits
// for it.
template <class S, int Kind>
CQSA_DEVICE void add_wild(const params& p, const block_facts& f, const key_tile& t, float (&o)[S::dv / 2]) {
  const key_span a = visible(t, place_of_row(p, first_row()).query), b = visible(t, place_of_row(p, first_row() + 8).query);
  const int column = int(lane_now()) % 4 * 2;
#pragma unroll 1
  for (int key = 0; key < t.keys; ++key) {
    const bool see[2] = {uint32_t(key - a.begin) < a.count, uint32_t(key - b.begin) < b.count};
    const value_place at = place_of_value(p, f, t.row + key);
    if (at.item < 0) continue;
    const char* row = p.a.v.data + 2 * offset_of(p.a.v, at.item, f.kv_head, at.row, 0);
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
  if (mem.about_v(n).flags & tile_ragged) wait_phase(b.seen_v[slot_of<S>(n)], parity_of<S>(n));
}
template <class S, int Kind>
CQSA_DEVICE void end_pv(const params& p, const tile_memory<S>& mem, uint32_t unit, uint32_t n, float (&o)[S::dv / 2]) {
  wgmma_wait<0>();
  after_wait(o);
  const key_tile& t = mem.about_v(n);
  if (__builtin_expect(t.flags & tile_wild, 0)) add_wild<S, Kind>(p, mem.facts(unit).f, t, o);
  warp_arrives(mem.barriers().empty_v[slot_of<S>(n)]);
}

CQSA_DEVICE bool is_last(const key_tile& t) { return t.flags & tile_last; }
template <class S> CQSA_DEVICE key_tile wait_for_keys(const tile_memory<S>& mem, uint32_t n) {
  wait_phase(mem.barriers().full_k[slot_of<S>(n)], parity_of<S>(n));
  return mem.about_k(n);
}
// The logits are there: their keys' place is free, and after the last ones that of q.
template <class S> CQSA_DEVICE void end_qk(const tile_memory<S>& mem, int group, uint32_t n, const key_tile& t) {
  warp_arrives(mem.barriers().empty_k[slot_of<S>(n)]);
  if (is_last(t)) warp_arrives(mem.barriers().empty_q[group]);
}

// The queries of a warpgroup, of those of the tile; last < first where it has none.
struct query_span {
  int first, last;
};
CQSA_DEVICE query_span queries_of(const params& p, const block_facts& f, int group) {
  const int first = group * p.group_queries, end = first + p.group_queries;
  return {first, (end < f.queries ? end : f.queries) - 1};
}
// Whether a warpgroup sees nothing in front of the end of this tile, or nothing from its beginning on.
CQSA_DEVICE bool is_before(const key_tile& t, const query_span& q) { return q.last < q.first || ((t.flags & tile_early) && t.lo + q.first >= t.keys); }
CQSA_DEVICE bool is_after(const key_tile& t, const query_span& q) { return (t.flags & tile_late) && t.hi + q.last <= 0; }

// A tile of which the warpgroup sees nothing.
template <class S> CQSA_DEVICE void pass_by(const tile_memory<S>& mem, int group, uint32_t n, const key_tile& t, bool first) {
  block_barriers<S>& b = mem.barriers();
  if (!first) wait_for_turn<S>(group), pass_turn<S>(group);
  end_qk<S>(mem, group, n, t);
  wait_phase(b.full_v[slot_of<S>(n)], parity_of<S>(n));
  warp_arrives(b.empty_v[slot_of<S>(n)]);
}

// What a warpgroup is at: number n of the tile whose p it has, and what the tile behind it is like.
template <class S> struct progress_of_group {
  int group;
  uint32_t unit, n;
  query_span mine;
  key_tile next;
  bool last;  // there is no tile behind n
  thread_rows rows;
};

// From logits to p.
template <class S> CQSA_DEVICE row_factors soften(const params& p, const key_tile& t, thread_rows& rows, float (&s)[S::keys / 2]) {
  if (__builtin_expect(p.a.softcap > 0, 0)) cap_logits<S>(p.a, s);
  if (__builtin_expect(t.flags & tile_ragged, 0)) hide_logits<S>(p, t, s);
  const row_factors factors = raise_maxima<S>(scale_of(p.a), s, rows);
  weigh<S>(scale_of(p.a), factors, rows, s);
  return factors;
}

// Looks at the tile behind n + skip.
template <class S> CQSA_DEVICE void look_ahead(const tile_memory<S>& mem, progress_of_group<S>& at, int skip) {
  at.last = is_last(at.next);
  if (!at.last) at.next = wait_for_keys<S>(mem, at.n + skip + 1);
}

// The first tile that the warpgroup sees; false: there is none.
template <class S, int Kind>
CQSA_DEVICE bool first_tile(const params& p, const tile_memory<S>& mem, progress_of_group<S>& at, packed_weights<S>& to, float (&o)[S::dv / 2]) {
  bool first = true;
  at.next = wait_for_keys<S>(mem, at.n);
  for (; is_before(at.next, at.mine); at.next = wait_for_keys<S>(mem, at.n), first = false) {
    pass_by<S>(mem, at.group, at.n++, at.next, first);
    if (is_last(at.next)) return false;  // n has gone on
  }
  float s[S::keys / 2];
  if (!first) wait_for_turn<S>(at.group);
  start_qk<S, Kind>(mem, at.group, at.n, s);
  if (!first) pass_turn<S>(at.group);
  wgmma_wait<0>();
  after_wait(s);
  end_qk<S>(mem, at.group, at.n, at.next);
  scale_sums<S>(soften<S>(p, at.next, at.rows, s), o);
  pack_weights<S, Kind>(s, to);
  look_ahead<S>(mem, at, 0);
  return true;
}

// The product of p of tile n with v, and p of the next one; false where the warpgroup sees no more.
template <class S, int Kind>
CQSA_DEVICE bool next_tile(const params& p, const tile_memory<S>& mem, progress_of_group<S>& at, packed_weights<S>& weights, float (&o)[S::dv / 2]) {
  if (at.last || is_after(at.next, at.mine)) return false;
  float s[S::keys / 2];
  wait_for_turn<S>(at.group);
  start_qk<S, Kind>(mem, at.group, at.n + 1, s);
  wait_for_values<S>(mem, at.n);
  start_pv<S, Kind>(mem, at.n, weights, o);
  pass_turn<S>(at.group);
  wgmma_wait<1>();
  after_wait(s);
  end_qk<S>(mem, at.group, at.n + 1, at.next);
  const row_factors factors = soften<S>(p, at.next, at.rows, s);
  // The branch in here also keeps the assembler from waiting for the product with v in front of the softmax.
  look_ahead<S>(mem, at, 1);
  end_pv<S, Kind>(p, mem, at.unit, at.n, o);
  pack_weights<S, Kind>(s, weights);
  scale_sums<S>(factors, o);
  ++at.n;
  return true;
}

// The last product, and tiles of which the warpgroup sees nothing more.
template <class S, int Kind>
CQSA_DEVICE void end_tiles(const params& p, const tile_memory<S>& mem, progress_of_group<S>& at, const packed_weights<S>& now, float (&o)[S::dv / 2]) {
  wait_for_values<S>(mem, at.n);
  start_pv<S, Kind>(mem, at.n, now, o);
  end_pv<S, Kind>(p, mem, at.unit, at.n, o);
  for (++at.n; !at.last; ++at.n) {
    at.next = wait_for_keys<S>(mem, at.n);
    at.last = is_last(at.next);
    pass_by<S>(mem, at.group, at.n, at.next, false);
  }
}

// All tiles of keys of a tile of queries, from number at.n on.
template <class S, int Kind>
CQSA_DEVICE void run_keys(const params& p, const tile_memory<S>& mem, progress_of_group<S>& at, float (&o)[S::dv / 2]) {
  at.mine = queries_of(p, mem.facts(at.unit).f, at.group);
  packed_weights<S> weights;
  if (!first_tile<S, Kind>(p, mem, at, weights, o)) return;
  while (next_tile<S, Kind>(p, mem, at, weights, o)) {
  }
  end_tiles<S, Kind>(p, mem, at, weights, o);
}

}  // namespace cqsa::gpu::sm90
