// SPDX-License-Identifier: Apache-2.0
// In which order the blocks of the Hopper attention take tiles of queries where only the device knows lengths: for the kernels, and for
// the test that walks through it. Every block finds its own tiles, from the lengths alone.
//
// Items of work stand in the order of their size, largest first, those of a segment column by column, and blocks take one each in turns
// of alternating order. So neighbours read the same keys at the same time, and what blocks have differs by about one item. An item is a
// tile of queries or, where work falls towards the early queries, a late tile and the early one that makes up for it.
#pragma once

#include "attention_order.h"

namespace cqsa::gpu::sm90 {

constexpr uint32_t segments_at_once = 32;  // by one warp

// What a launch is like: uniform, from the parameters.
struct walk_rules {
  int64_t left, right;  // of the window, as attention_params has them
  uint32_t tile_queries, tile_keys;
  uint32_t columns;     // of a segment: its key heads, times the parts of their query heads
  uint32_t segments, blocks;
  walk_mode mode;
};
struct segment_lengths {
  int64_t queries, keys, position;  // of the first query, among the keys
};
// What a segment has: levels of the work of its single tiles and of its pairs, 0 where there are none.
struct segment_work {
  uint32_t tiles, single, pair;
};

constexpr uint32_t around_a_tile = 2;  // what a tile of queries costs beside its tiles of keys, in these

// Tiles of keys that tile `tile` of the queries sees.
CQSA_EVERYWHERE uint32_t tiles_of_keys(const walk_rules& r, const segment_lengths& s, uint32_t tile) {
  const int64_t skip = int64_t(tile) * r.tile_queries, left = s.queries - skip;
  const int64_t low = s.position + skip - r.left, high = s.position + skip + (left < r.tile_queries ? left : r.tile_queries) + r.right;
  const int64_t end = high < s.keys ? high : s.keys;
  if (end <= 0 || low >= end) return 0;
  const uint32_t first = low > 0 ? uint32_t(low) / r.tile_keys : 0;
  return (uint32_t(end) - 1) / r.tile_keys + 1 - first;
}

// Numbers that differ by less than a sixteenth have the same level, or two that are neighbours.
CQSA_EVERYWHERE uint32_t level_of(uint32_t work) {
  uint32_t octaves = 0;
  for (; work >= 32; work >>= 1) octaves += 16;
  return octaves + work;
}

// By the tile in the middle: windows make the outer ones shorter, and of falling work it is the mean.
CQSA_EVERYWHERE segment_work work_of(const walk_rules& r, const segment_lengths& s) {
  if (s.queries <= 0) return {0, 0, 0};
  const uint32_t tiles = (uint32_t(s.queries) - 1) / r.tile_queries + 1, work = around_a_tile + tiles_of_keys(r, s, tiles / 2);
  if (r.mode != walk_mode::pairs) return {tiles, level_of(work), 0};
  return {tiles, tiles % 2 ? level_of(work) : 0, tiles > 1 ? level_of(2 * work) : 0};
}

// Items of a level, and the highest level of a segment under it. Items are numbered pairs first.
CQSA_EVERYWHERE uint32_t items_of(const walk_rules& r, const segment_work& w, uint32_t level) {
  if (level == w.single) return r.columns * (r.mode == walk_mode::pairs ? 1 : w.tiles);
  return level == w.pair ? r.columns * (w.tiles / 2) : 0;
}
CQSA_EVERYWHERE uint32_t first_item(const walk_rules& r, uint32_t tiles, bool pairs) { return r.mode == walk_mode::pairs && !pairs ? r.columns * (tiles / 2) : 0; }
CQSA_EVERYWHERE uint32_t level_below(const segment_work& w, uint32_t level) {
  const uint32_t single = w.single < level ? w.single : 0, pair = w.pair < level ? w.pair : 0;
  return single > pair ? single : pair;
}

// Where a block is: in front of segment `first` of those of a level. below: the next level, as far as it is known. before: items that
// are behind. second: tile of the pair whose first one was taken last, in that column.
struct walk_state {
  uint32_t level, below, first, before, turn, second, column;
};
constexpr uint32_t no_tile = ~0u;

// What so many segments, from some one on, have: items of a level, and the highest level under it.
struct segments_seen {
  uint32_t items, below;
};
// An item: its number in the segment.
struct segment_item {
  uint32_t segment, tiles, number;
};

// From a level on that no item is above of.
CQSA_EVERYWHERE walk_state begin_walk(const walk_rules& r, int64_t most_keys) {
  const uint32_t most = around_a_tile + (uint32_t(most_keys) + r.tile_keys - 1) / r.tile_keys;
  return {level_of(r.mode == walk_mode::pairs ? 2 * most : most), 0, 0, 0, 0, no_tile, 0};
}

// `Segments` looks at segments, of which a warp has one in each lane and a test an array:
//   segments_seen look(const walk_state&);   the segments from state.first on
//   segment_item pick(uint32_t item);        of those that were looked at last
//
// Items are asked for in ascending order. False: there are fewer.
template <class Segments> CQSA_EVERYWHERE bool find_item(const walk_rules& r, Segments& segments, walk_state& s, uint32_t item, segment_item& out) {
  while (s.level > 0) {
    const segments_seen seen = segments.look(s);
    if (item - s.before < seen.items) {
      out = segments.pick(item - s.before);
      return true;
    }
    s.before += seen.items;
    if (s.below < seen.below) s.below = seen.below;
    s.first += segments_at_once;
    if (s.first >= r.segments) s.level = s.below, s.below = 0, s.first = 0;
  }
  return false;
}

CQSA_EVERYWHERE unit_place place_of(const walk_rules& r, walk_state& s, const segment_item& at) {
  const uint32_t begin = at.segment * r.columns, pairs = r.mode == walk_mode::pairs ? at.tiles / 2 : 0;
  if (r.mode == walk_mode::rows) return {at.tiles - 1 - at.number / r.columns, begin + at.number % r.columns};
  if (r.mode == walk_mode::pairs && at.number >= r.columns * pairs) return {pairs, begin + at.number - r.columns * pairs};
  const uint32_t per_column = pairs ? pairs : at.tiles, column = at.number / per_column, tile = at.number - column * per_column;
  if (!pairs) return {tile, begin + column};
  s.second = tile, s.column = begin + column;
  return {at.tiles - 1 - tile, begin + column};
}

// The next tile of queries of a block; false: there is none.
template <class Segments> CQSA_EVERYWHERE bool next_place(const walk_rules& r, Segments& segments, walk_state& s, uint32_t block, unit_place& out) {
  if (s.second != no_tile) {
    out = {s.second, s.column};
    s.second = no_tile;
    return true;
  }
  const uint32_t item = s.turn * r.blocks + (s.turn % 2 ? r.blocks - 1 - block : block);
  ++s.turn;
  segment_item at;
  if (!find_item(r, segments, s, item, at)) return false;
  out = place_of(r, s, at);
  return true;
}

}  // namespace cqsa::gpu::sm90
