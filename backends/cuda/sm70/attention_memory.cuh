// SPDX-License-Identifier: Apache-2.0
// Shared memory of a block of the sm_70 attention, and where the block stands: its rows, the tile of keys at work and the next one.
//
// The facts of a tile exist twice: while one is computed with, the next is looked up. Nobody waits for that alone, see the loop in
// attention.cuh.
#pragma once

#include "attention_params.h"
#include "backends/gpu/attention_block.cuh"
#include "pack.cuh"

namespace cqsa::gpu {

struct sm70_tile {
  int64_t tile_pos, tile_col;
  int64_t row;           // of the first key: in k and v, or in the list of cells
  int32_t keys, lo, hi;  // as in block_facts
  int32_t there;         // keys of the tile that exist, seen or not: what a scale is chosen by depends on nobody's place
  int32_t valid;         // 0: there are no more tiles
  int32_t fix;
  uint32_t gone;         // bit n: key n is on a missing page, or not a cell
  uint32_t bad;          // some value is NaN or Inf
};
static_assert(sizeof(sm70_tile) <= 64, "its place in shared memory");

// The thread that looks for tiles keeps its place here.
struct sm70_walk {
  int64_t range, at;
};

template <class Shape> struct sm70_memory {
  unsigned char* base;
  CQSA_DEVICE uint16_t* tile(int n) const { return reinterpret_cast<uint16_t*>(base + n * Shape::tile_bytes); }  // k, v
  CQSA_DEVICE float* logits() const { return reinterpret_cast<float*>(base + 2 * Shape::tile_bytes); }
  CQSA_DEVICE float* scale(int n) const { return logits() + Shape::logit_bytes / 4 + n * Shape::groups * Shape::keys; }  // k, v, v as given
  CQSA_DEVICE int64_t* key_offset(int n) const { return reinterpret_cast<int64_t*>(scale(3)) + n * Shape::keys; }       // k, v, their scales
  CQSA_DEVICE int64_t* row_offset() const { return key_offset(4); }
  CQSA_DEVICE float* row_number(int n) const { return reinterpret_cast<float*>(row_offset() + Shape::rows) + n * Shape::rows; }
  CQSA_DEVICE float* row_m() const { return row_number(0); }
  CQSA_DEVICE float* row_l() const { return row_number(1); }
  CQSA_DEVICE float* row_slope() const { return row_number(2); }
  CQSA_DEVICE float* row_factor() const { return row_number(3); }  // of the sums, when the maximum has changed
  CQSA_DEVICE float* row_scale() const { return row_number(4); }   // from what the matrix unit gives to a logit
  CQSA_DEVICE int32_t* row_query() const { return reinterpret_cast<int32_t*>(row_number(5)); }
  CQSA_DEVICE int32_t* row_head() const { return reinterpret_cast<int32_t*>(row_number(6)); }
  CQSA_DEVICE block_facts& facts() const { return *reinterpret_cast<block_facts*>(row_number(7)); }
  CQSA_DEVICE sm70_walk& walk() const { return *reinterpret_cast<sm70_walk*>(reinterpret_cast<unsigned char*>(row_number(7)) + 256); }
  CQSA_DEVICE sm70_tile& facts_of(int n) const {
    return *reinterpret_cast<sm70_tile*>(reinterpret_cast<unsigned char*>(row_number(7)) + 272 + 64 * n);
  }
};
static_assert(sizeof(block_facts) <= 256, "its place in shared memory");

// Neighbouring keys of a tile of k or v begin eight pieces (of 8 channels) further round, so that eight lanes that read one piece of
// different keys do not meet in a bank. q waits in the same form.
template <class Shape> CQSA_DEVICE int piece_at(int key, int piece) { return key * Shape::dim + ((piece ^ (key & 7)) << 3); }

// Four neighbouring logits of a row, as a warp of the team has them. The exchange keeps the rows that are written at once apart, and
// those that are read at once.
template <class Shape> CQSA_DEVICE float* logits_at(const sm70_memory<Shape>& mem, int slab, int row, int quad) {
  const int turn = (row & 1) << 1 | (row >> 1 & 1) | (row >> 3 & 1) << 2;
  return mem.logits() + ((slab * Shape::team_rows + row) * 8 + (quad ^ turn)) * 4;
}

// One thread: which query and heads are the block's, and how many cells it has.
CQSA_DEVICE void begin_selected(const sm70_params& p, block_facts& f) {
  const int64_t unit = p.a.first_unit + block_index_x();
  const int64_t query = unit % p.a.q_tiles;  // neighbours share most of their cells: side by side they find them in the cache
  const int64_t rest = unit / p.a.q_tiles;
  const int64_t part = rest % p.a.head_groups * p.a.heads_packed, each = p.a.num_heads / p.a.num_kv_heads;
  f.batch = 0;
  f.kv_head = rest / p.a.head_groups;
  f.first_head = f.kv_head * each + part;
  f.heads = f.rows = int32_t(min_i64(each - part, p.a.heads_packed));
  f.queries = 1;
  const int32_t count = int32_t(load_u32(p.counts + 4 * query * p.counts_stride));
  f.range = {0, clamp_i64(count, 0, p.capacity), 0};
  f.group = {0, 1, query, 0, 0, 1, 0};
  f.q_row = query;
  f.position = f.mask_row = f.mask_shift = f.state_row = 0;
  f.num_ranges = 1;
}

// One thread: the next tile of keys, or that there is none.
template <bool Selected, class Shape> CQSA_DEVICE void next_tile(const sm70_params& p, const sm70_memory<Shape>& mem, sm70_tile& tile) {
  block_facts& f = mem.facts();
  sm70_walk& w = mem.walk();
  w.at += Shape::keys;
  while (w.at >= f.end) {
    if (++w.range >= f.num_ranges) {
      tile.valid = 0;
      return;
    }
    if constexpr (Selected) f.first = 0, f.end = f.range.len;
    else begin_range(p.a, f, w.range, Shape::keys);
    w.at = f.first;
  }
  begin_tile(p.a, f, w.at, Shape::keys);
  tile.tile_pos = f.tile_pos, tile.tile_col = f.tile_col;
  tile.row = f.range.row + w.at;
  tile.keys = f.keys, tile.lo = f.lo, tile.hi = f.hi, tile.fix = f.fix;
  tile.there = int32_t(min_i64(Shape::keys, f.range.len - w.at));
  tile.valid = 1;
  tile.gone = tile.bad = 0;
}

// Entry n of the list as a page and a row, or page -1. An entry that is negative or not above the one before it is skipped.
CQSA_DEVICE int64_t find_cell(const sm70_params& p, int64_t query, int64_t n, int64_t* row) {
  const char* at = p.cells + 4 * (query * p.cells_stride[0] + n * p.cells_stride[1]);
  const int32_t cell = int32_t(load_u32(at));
  const int32_t before = n > 0 ? int32_t(load_u32(at - 4 * p.cells_stride[1])) : -1;
  *row = 0;
  if (cell < 0 || (cell <= before && !CQSA_MUTANT(8)) || cell / p.a.page_size >= p.pages) return -1;
  *row = cell % p.a.page_size;
  return page_of(p.a, query, cell);
}

// A whole warp, a lane for each key: where it is in k and v.
template <bool Selected, class Shape> CQSA_DEVICE void find_keys(const sm70_params& p, const sm70_memory<Shape>& mem, sm70_tile& tile, int n) {
  const block_facts& f = mem.facts();
  int64_t item = f.batch, row = tile.row + n;
  const bool past = n >= tile.there;
  if (Selected && !past) {
    item = find_cell(p, f.q_row, tile.row + n, &row);
  } else if (!past && p.a.page_table) {
    item = page_of(p.a, f.batch, row);
    row %= p.a.page_size;
  }
  const bool gone = !past && item < 0;
  const bool none = past || gone;
  mem.key_offset(0)[n] = none ? no_row : offset_of(p.a.k, item, f.kv_head, row, 0);
  mem.key_offset(1)[n] = none ? no_row : offset_of(p.a.v, item, f.kv_head, row, 0);
  mem.key_offset(2)[n] = offset_of(p.a.k_scale, item, f.kv_head, row, 0);
  mem.key_offset(3)[n] = offset_of(p.a.v_scale, item, f.kv_head, row, 0);
  const uint32_t bits = uint32_t(ballot<32>(gone));
  if (n == 0) tile.gone = bits;
}

// One thread per row of the tile. Rows that are not in use have zeros for q and nobody looks at them.
template <class Shape> CQSA_DEVICE void begin_row(const sm70_params& params, const sm70_memory<Shape>& mem, int x) {
  const attention_params& p = params.a;
  const block_facts& f = mem.facts();
  const bool used = x < f.rows;
  const int query = used ? x / f.heads : 0, head = used ? x % f.heads : 0;
  const int64_t h = f.first_head + head;
  mem.row_query()[x] = query;
  mem.row_head()[x] = int32_t(h);
  mem.row_offset()[x] = used ? offset_of(p.q, f.batch, h, f.q_row + query, 0) : no_row;
  mem.row_slope()[x] = p.slopes.data ? load_element(p.slopes.data, kind_f32, offset_of(p.slopes, f.batch, h, 0, 0)) : 0.0f;
  mem.row_scale()[x] = p.softmax_scale;
  const bool from_state = used && (p.flags & flag_state_in);
  const int64_t at = (f.batch * p.num_heads + h) * p.state_rows + f.state_row + query;
  mem.row_m()[x] = from_state ? p.state_m[at] : -infinity();
  mem.row_l()[x] = from_state ? p.state_l[at] : 0.0f;
}

}  // namespace cqsa::gpu
