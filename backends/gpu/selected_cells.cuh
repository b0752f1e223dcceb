// SPDX-License-Identifier: Apache-2.0
// From an entry of a query's list to the rows of the pools: shared by all kernels of selected-cell attention.
#pragma once

#include "element.cuh"
#include "selected_params.h"

namespace cqsa::gpu {

// A block's place: a query, a key head, and 16 of its query heads.
struct selected_place {
  int64_t query;
  int32_t kv_head, first_head, heads, count;  // count: entries of the list
};

// Queries run fastest, so that blocks at work together read one head's cells, which neighbours mostly share.
CQSA_DEVICE selected_place find_place(const selected_params& p) {
  const int64_t unit = p.first_unit + block_index_x();
  selected_place x;
  x.query = unit % p.total_q;
  const int32_t rest = int32_t(unit / p.total_q);
  const int32_t part = rest % p.parts;
  x.kv_head = rest / p.parts;
  x.first_head = x.kv_head * p.group_heads + part * 16;
  x.heads = p.group_heads - part * 16 < 16 ? p.group_heads - part * 16 : 16;
  const int32_t count = int32_t(load_u32(p.counts + 4 * x.query * p.counts_stride));
  x.count = count < 0 ? 0 : int32_t(min_i64(count, p.capacity));
  return x;
}

// Entry n of the list, or -1 where there is none or it is to be skipped: a negative one, and one that is not above the one before.
CQSA_DEVICE int32_t read_cell(const selected_params& p, const selected_place& x, int64_t n) {
  if (n >= x.count) return -1;
  const char* at = p.cells + 4 * (x.query * p.cells_stride[0] + n * p.cells_stride[1]);
  const int32_t cell = int32_t(load_u32(at));
  if (n == 0) return cell;
  const int32_t before = int32_t(load_u32(at - 4 * p.cells_stride[1]));
  return cell > before || CQSA_MUTANT(1) ? cell : -1;
}

// Page and row of a cell; page -1: it is not there.
struct cell_place {
  int32_t page, row;
};
CQSA_DEVICE cell_place place_of(const selected_params& p, const selected_place& x, int32_t cell) {
  if (cell < 0) return {-1, 0};
  const uint32_t size = uint32_t(p.page_size), number = uint32_t(cell) / size;
  if (number >= p.pages) return {-1, 0};
  const int64_t at = x.query * p.page_table_stride[0] + number * p.page_table_stride[1];
  const int32_t page = int32_t(load_u32(p.page_table + 4 * at));
  return {page >= 0 && page < p.num_pages ? page : -1, int32_t(uint32_t(cell) - number * size)};
}

}  // namespace cqsa::gpu
