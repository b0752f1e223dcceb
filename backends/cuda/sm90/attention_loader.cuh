// SPDX-License-Identifier: Apache-2.0
// The loading warpgroup of the Hopper attention. One thread walks over the block's tiles of queries and their tiles of keys and sends
// for them; three warps look through values under hidden pairs.
#pragma once

#include "attention_lengths.cuh"

namespace cqsa::gpu::sm90 {

// ------------------------------------------------------------------------------------------------------------ the schedule

CQSA_DEVICE void begin_unit(const params& p, const unit_place& at, block_facts& f) {
  const uint32_t parts = uint32_t(p.a.head_groups), kv_heads = uint32_t(p.a.num_kv_heads), group = uint32_t(p.a.num_heads) / kv_heads;
  const uint32_t up = at.column / parts, part = (at.column - up * parts) * uint32_t(p.a.heads_packed);
  f.batch = up / kv_heads;
  f.kv_head = up % kv_heads;
  f.first_head = f.kv_head * group + part;
  f.heads = int32_t(min_i64(group - part, p.a.heads_packed));
  begin_queries(p.a, f, at.tile);
}

// Tiles of keys of all ranges of a tile of queries.
struct key_cursor {
  int32_t range, first, end, lo, hi;  // relative to the first key of the range
  int32_t row;                        // of k and v, of that
};

// The first tile of the next range that has one.
template <class S> CQSA_DEVICE bool enter_range(const params& p, block_facts& f, key_cursor& c) {
  constexpr int64_t far = int64_t(1) << 30;  // more keys than a range has
  for (; c.range < int32_t(f.num_ranges); ++c.range) {
    begin_range(p.a, f, c.range, S::keys);
    if (f.first >= f.end) continue;
    const int64_t here = f.position - f.range.pos;
    c.first = int32_t(f.first);
    c.end = int32_t(f.end);
    c.lo = int32_t(clamp_i64(here - p.a.left, -far, far));
    c.hi = int32_t(clamp_i64(here + p.a.right + 1, -far, far));
    c.row = int32_t(f.range.row);
    return true;
  }
  return false;
}
template <class S> CQSA_DEVICE bool next_tile(const params& p, block_facts& f, key_cursor& c) {
  c.first += S::keys;
  if (c.first < c.end) return true;
  ++c.range;
  return enter_range<S>(p, f, c);
}
template <class S> CQSA_DEVICE key_tile tile_at(const key_cursor& c, const block_facts& f) {
  const int left = c.end - c.first;
  key_tile t{left < S::keys ? left : S::keys, c.lo - c.first, c.hi - c.first, 0, int64_t(c.row) + c.first};
  if (t.keys < S::keys || t.hi < t.keys || t.lo + f.queries - 1 > 0) t.flags = tile_ragged;
  if (c.range == 0) t.flags |= tile_early;
  if (c.range == int32_t(f.num_ranges) - 1) t.flags |= tile_late;
  return t;
}

// ------------------------------------------------------------------------------------------------------------------- loads

// Number n of those that there were keys for.
template <class S> CQSA_DEVICE void send_queries(const params& p, const tile_memory<S>& mem, const block_facts& f, uint32_t n) {
  block_barriers<S>& b = mem.barriers();
#pragma unroll 1
  for (int group = 0; group < S::groups; ++group) {
    wait_phase(b.empty_q[group], n % 2 ^ 1);
    arrive_and_expect(b.full_q[group], uint32_t(p.q_box_bytes) * S::panels);
    const int row = int(f.q_row) + group * p.group_queries;
    for (int i = 0; i < S::panels; ++i)
      copy_box(mem.q(group) + i * S::q_panel, p.q, b.full_q[group], 64 * i, int(f.first_head) * p.q_head, row, int(f.batch) * p.q_item);
  }
}

// A page outside of the pool hides its keys, and is nowhere for the copy engine, which brings zeros for it. Pages behind the last key may
// not be asked for.
template <class S> CQSA_DEVICE int32_t find_pages(const params& p, const tile_memory<S>& mem, const block_facts& f, uint32_t n, const key_tile& t) {
  const uint32_t size = uint32_t(p.a.page_size), part = uint32_t(p.page_part), bits = (1u << part / gone_keys) - 1;
  uint32_t page = uint32_t(t.row) / size, row = uint32_t(t.row) - page * size, gone = 0;
  int32_t* to = mem.pages(n);
#pragma unroll 4
  for (uint32_t key = 0; key < S::keys; key += part) {
    const bool wanted = key < uint32_t(t.keys);
    const int32_t id = wanted ? page_at(p.a, f.batch, page) : -1;
    if (wanted && id < 0) gone |= bits << key / gone_keys;
    *to++ = id;
    row += part;
    if (row >= size) row = 0, ++page;
  }
  return int32_t(gone << gone_from) | (gone ? int32_t(tile_ragged) : 0);
}

// Where a tensor's rows of a head are for the copy engine: coordinates of it and of a batch item or a page.
struct head_place {
  int head, item;
};
// A tile of keys or of values.
template <class S, int Panels>
CQSA_DEVICE void copy_tile(const params& p, const tile_memory<S>& mem, const tensor_map& map, block_barrier& full, unsigned char* to, uint32_t n, int64_t first,
                           const head_place& at, int item_step) {
  if (p.page_part == 0) {
    for (int i = 0; i < Panels; ++i) copy_box(to + i * S::k_panel, map, full, 64 * i, int(first), at.head, at.item);
    return;
  }
  const int part = p.page_part;
  const uint32_t size = uint32_t(p.a.page_size);
  uint32_t row = uint32_t(first) % size;
  const int32_t* pages = mem.pages(n);
#pragma unroll 1
  for (int key = 0; key < S::keys; key += part) {
    const int page = *pages++;
    for (int i = 0; i < Panels; ++i) copy_box(to + i * S::k_panel + key * 128, map, full, 64 * i, int(row), at.head, page < 0 ? -1 : page * item_step);
    row += part;
    if (row >= size) row = 0;
  }
}

template <class S> CQSA_DEVICE void send_keys(const params& p, const tile_memory<S>& mem, const block_facts& f, uint32_t n, const key_tile& t) {
  block_barriers<S>& b = mem.barriers();
  block_barrier& full = b.full_k[slot_of<S>(n)];
  wait_phase(b.empty_k[slot_of<S>(n)], parity_of<S>(n) ^ 1);
  mem.about_k(n) = t;
  arrive_and_expect(full, S::k_bytes);
  copy_tile<S, S::panels>(p, mem, p.k, full, mem.k(n), n, t.row, {int(f.kv_head) * p.k_head, int(f.batch) * p.k_item}, p.k_item);
}
template <class S> CQSA_DEVICE void send_values(const params& p, const tile_memory<S>& mem, const block_facts& f, uint32_t n, const key_tile& t) {
  block_barriers<S>& b = mem.barriers();
  block_barrier& full = b.full_v[slot_of<S>(n)];
  wait_phase(b.empty_v[slot_of<S>(n)], parity_of<S>(n) ^ 1);
  mem.about_v(n) = t;
  arrive_and_expect(full, S::v_bytes);
  copy_tile<S, S::v_panels>(p, mem, p.v, full, mem.v(n), n, t.row, {int(f.kv_head) * p.v_head, int(f.batch) * p.v_item}, p.v_item);
}

// What a block has done so far: tiles of queries that are planned, those whose queries were sent for, tiles of keys.
struct progress {
  uint32_t turn, units, queries, keys;
};

// The block's next tile of queries; false: there is none.
template <class S> CQSA_DEVICE bool next_unit(const params& p, const tile_memory<S>& mem, progress& done, unit_place& at) {
  if (p.order.walk != walk_mode::none) {
    wait_phase(mem.barriers().full_place, done.units % 2);
    at = mem.place().at;
    return mem.place().found;
  }
  while (done.turn < p.order.turns)
    if (find_unit(p.order, gridDim.x, blockIdx.x, done.turn++, at)) return true;
  return false;
}

// Finds it and tells everyone; after the last one that it was the last.
template <class S> CQSA_DEVICE bool plan_unit(const params& p, const tile_memory<S>& mem, progress& done) {
  block_barriers<S>& b = mem.barriers();
  unit_facts& facts = mem.facts(done.units);
  wait_phase(b.empty_facts[done.units % 2], done.units / 2 % 2 ^ 1);
  bool found = false;
  unit_place at;
  while (!found && next_unit<S>(p, mem, done, at)) {
    begin_unit(p, at, facts.f);
    found = facts.f.rows > 0 || p.order.walk != walk_mode::none;  // of those that are walked to, each is one's turn
  }
  key_cursor c{0, 0, 0, 0, 0, 0};
  facts.state = int32_t(!found ? unit_state::done : enter_range<S>(p, facts.f, c) ? unit_state::busy : unit_state::empty);
  arrive(b.full_facts[done.units % 2]);
  ++done.units;
  return found;
}

// Keys go one tile ahead of values, as they are needed. The next tile of queries is planned while the first keys are on their way. Values of
// the last tile go before the next queries, for which there is room only after the last product with keys.
template <class S> CQSA_DEVICE bool load_unit(const params& p, const tile_memory<S>& mem, progress& done) {
  unit_facts& facts = mem.facts(done.units - 1);
  block_facts& f = facts.f;
  if (facts.state == int32_t(unit_state::empty)) return plan_unit<S>(p, mem, done);
  key_cursor c{0, 0, 0, 0, 0, 0};
  bool more = enter_range<S>(p, f, c), another = false, first = true, planned = false;
  key_tile previous{0, 0, 0, 0, 0};
  while (more) {
    key_tile t = tile_at<S>(c, f);
    more = next_tile<S>(p, f, c);
    if (!more) t.flags |= tile_last;
    if (p.page_part) t.flags |= find_pages<S>(p, mem, f, done.keys, t);
    send_keys<S>(p, mem, f, done.keys, t);
    if (first) {
      send_queries<S>(p, mem, f, done.queries++);
    } else {
      send_values<S>(p, mem, f, done.keys - 1, previous);
      if (!planned) another = plan_unit<S>(p, mem, done);
      planned = true;
    }
    previous = t, first = false;
    ++done.keys;
  }
  send_values<S>(p, mem, f, done.keys - 1, previous);
  return planned ? another : plan_unit<S>(p, mem, done);
}

template <class S> CQSA_DEVICE void load_block(const params& p, const tile_memory<S>& mem) {
  progress done{0, 0, 0, 0};
  for (bool more = plan_unit<S>(p, mem, done); more;) more = load_unit<S>(p, mem, done);
}

// ---------------------------------------------------------------------------------------- values that are NaN or Inf

template <int Kind> CQSA_DEVICE uint32_t without_wild(uint32_t two) {
  constexpr uint32_t half = exponent_mask<Kind> & 0xffffu;
  if ((two & half) == half) two &= 0xffff0000u;
  if ((two >> 16 & half) == half) two &= 0x0000ffffu;
  return two;
}

// This warp's part of a tile: wild values become 0, true where there were some. Four chunks at a time: nobody shall wait for this.
template <class S, int Kind> CQSA_DEVICE bool clear_wild(unsigned char* values, int warp) {
  constexpr int chunks = S::v_bytes / 16, step = 32 * checkers;
  bool found = false;
#pragma unroll 1
  for (int first = warp * 32 + int(lane_now()); first < chunks; first += 4 * step) {
    word4x w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = *reinterpret_cast<const word4x*>(values + 16 * (first + i * step < chunks ? first + i * step : first));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!is_wild<Kind>(w[i].x[0]) && !is_wild<Kind>(w[i].x[1]) && !is_wild<Kind>(w[i].x[2]) && !is_wild<Kind>(w[i].x[3])) continue;
      for (uint32_t& two : w[i].x) two = without_wild<Kind>(two);
      *reinterpret_cast<word4x*>(values + 16 * (first + i * step < chunks ? first + i * step : first)) = w[i];
      found = true;
    }
  }
  return ballot<32>(found) != 0;
}

template <class S, int Kind> CQSA_DEVICE void check_tile(const tile_memory<S>& mem, uint32_t n, int warp) {
  block_barriers<S>& b = mem.barriers();
  if ((mem.about_v(n).flags & tile_ragged) && clear_wild<S, Kind>(mem.v(n), warp)) {
    if (lane_now() == 0) atomic_or(reinterpret_cast<uint32_t*>(&mem.about_v(n).flags), tile_wild);
    publish_stores();
  }
  warp_arrives(b.seen_v[slot_of<S>(n)]);
  if (lane_now() == 0) arrive(b.empty_v[slot_of<S>(n)]);
}

// Warp number `warp` of those that look through values. The first one also finds tiles of queries, one ahead of the values that it looks
// at, where that takes a warp.
template <class S, int Kind> CQSA_DEVICE void check_block(const params& p, const tile_memory<S>& mem, int warp) {
  block_barriers<S>& b = mem.barriers();
  const bool walks = warp == 0 && p.order.walk != walk_mode::none;
  block_walk<S> walk(p);
  uint32_t keys = 0;
  bool more = false;
  for (uint32_t unit = 0;; ++unit) {
    if (walks) walk.tell_next(mem);
    for (; more; ++keys) {
      wait_phase(b.full_v[slot_of<S>(keys)], parity_of<S>(keys));
      more = !(mem.about_v(keys).flags & tile_last);
      check_tile<S, Kind>(mem, keys, warp);
    }
    if (unit > 0) warp_arrives(b.empty_facts[(unit - 1) % 2]);
    wait_phase(b.full_facts[unit % 2], unit / 2 % 2);
    const unit_state state = unit_state(mem.facts(unit).state);
    if (state == unit_state::done) return;
    more = state == unit_state::busy;
  }
}

}  // namespace cqsa::gpu::sm90
