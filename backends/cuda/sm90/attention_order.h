// SPDX-License-Identifier: Apache-2.0
// In which order the blocks of the Hopper attention take tiles of queries: for the kernels, and for the test that walks through it.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define CQSA_EVERYWHERE __host__ __device__ __forceinline__
#else
#define CQSA_EVERYWHERE inline
#endif

namespace cqsa::gpu::sm90 {

// Whether lengths are such that only the device knows them. Then blocks find their tiles as attention_walk.h says, and take as an item
// one tile of a column after the other, a late one and the early one that makes up for it, or the last ones of all columns first.
enum class walk_mode : uint32_t { none, columns, pairs, rows };

struct unit_order {
  uint32_t units, tiles;    // tiles of queries in all, and of a column: batch item, key head and part of its query heads
  uint32_t longest_first;   // late queries have the most keys
  // Then within so many columns, whose keys the L2 cache holds, in so many turns of the blocks.
  uint32_t columns_at_once, turns_of_columns;
  uint32_t turns;           // of a block in all
  walk_mode walk;           // not none: nothing else of this matters
};
struct unit_place {
  uint32_t tile, column;
};

// What block b of `blocks` takes in its turn; false: nothing. Where tiles get shorter, blocks take them in alternating order, so that
// none gets the longer one each time.
CQSA_EVERYWHERE bool find_unit(const unit_order& o, uint32_t blocks, uint32_t b, uint32_t turn, unit_place& out) {
  if (!o.longest_first) {
    const uint32_t unit = turn * blocks + b;
    out = {unit % o.tiles, unit / o.tiles};
    return unit < o.units;
  }
  const uint32_t columns = o.units / o.tiles, section = turn / o.turns_of_columns, inner = turn - section * o.turns_of_columns;
  const uint32_t first = section * o.columns_at_once, left = columns - first, wide = left < o.columns_at_once ? left : o.columns_at_once;
  const uint32_t unit = inner * blocks + (inner % 2 ? blocks - 1 - b : b);
  out = {o.tiles - 1 - unit / wide, first + unit % wide};
  return unit < wide * o.tiles;
}

}  // namespace cqsa::gpu::sm90
