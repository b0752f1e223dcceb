// SPDX-License-Identifier: Apache-2.0
// The warp that walks over lengths which only the device knows, and finds the block's tiles of queries (attention_walk.h).
#pragma once

#include "attention_memory.cuh"

namespace cqsa::gpu::sm90 {

template <class S> CQSA_DEVICE walk_rules rules_of(const params& p) {
  const uint32_t columns = uint32_t(p.a.num_kv_heads) * uint32_t(p.a.head_groups);
  return {p.a.left, p.a.right, uint32_t(p.a.tile_queries), S::keys, columns, uint32_t(p.a.batch), gridDim.x, p.order.walk};
}

// The segments as a warp sees them: one in each lane.
template <class S> struct warp_segments {
  const params& p;
  uint32_t first, tiles, items;  // of those looked at last
  bool pairs;

  CQSA_DEVICE segment_work work(uint32_t segment) const {
    if (segment >= uint32_t(p.a.batch)) return {0, 0, 0};
    block_facts f;
    f.batch = segment;
    whole_problem(p.a, f);
    return work_of(rules_of<S>(p), {f.group.q_len, f.range.len, f.position});
  }
  CQSA_DEVICE segments_seen look(const walk_state& s) {
    const segment_work now = work(s.first + lane_now());
    first = s.first, tiles = now.tiles, pairs = s.level == now.pair;
    items = items_of(rules_of<S>(p), now, s.level);
    return {sum_of_warp(items), largest_of_warp(level_below(now, s.level))};
  }
  CQSA_DEVICE segment_item pick(uint32_t item) const {
    uint32_t end = items;
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t left = shuffle<32>(end, int(lane_now()) - step);
      if (int(lane_now()) >= step) end += left;
    }
    const int lane = __ffs(int(ballot<32>(item < end))) - 1;
    const uint32_t number = item - (end - items) + first_item(rules_of<S>(p), tiles, pairs);
    return {first + lane, shuffle<32>(tiles, lane), shuffle<32>(number, lane)};
  }
};

template <class S> struct block_walk {
  warp_segments<S> segments;
  walk_state state;
  CQSA_DEVICE explicit block_walk(const params& p) : segments{p, 0, 0, 0, false}, state(begin_walk(rules_of<S>(p), p.a.seqlen_k)) {}
  // Finds the next tile of queries for the loader.
  CQSA_DEVICE void tell_next(const tile_memory<S>& mem) {
    unit_place at{0, 0};
    const bool found = next_place(rules_of<S>(segments.p), segments, state, blockIdx.x, at);
    if (lane_now() != 0) return;
    mem.place() = {at, found};
    arrive(mem.barriers().full_place);
  }
};

}  // namespace cqsa::gpu::sm90
