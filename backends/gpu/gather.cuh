// SPDX-License-Identifier: Apache-2.0
// Rows of a view to compact rows. A few neighbouring threads per row, as many as it has units, so that short rows waste none.
#pragma once

#include "element.cuh"
#include "gather_params.h"

namespace cqsa::gpu {

// Row of the view that becomes row n, and the batch item or page it is in (-1: nowhere).
CQSA_DEVICE int64_t gathered_row(const gather_params& p, int64_t n, int64_t* item) {
  if (p.runs) {
    int64_t low = 0, high = p.num_runs - 1;
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (CQSA_MUTANT(1) ? p.runs[middle].first < n : p.runs[middle].first <= n) low = middle;
      else high = middle - 1;
    }
    return p.runs[low].row + n - p.runs[low].first;
  }
  const int64_t row = p.first_row + n;
  if (!p.page_table) return row;
  const int64_t at = *item * p.page_table_stride[0] + row / p.page_size * p.page_table_stride[1];
  const int64_t page = int32_t(load_u32(p.page_table + 4 * at));
  *item = page >= 0 && page < p.num_pages ? page : CQSA_MUTANT(2) ? 0 : -1;
  return row % p.page_size;
}

// One unit of a row; units of up to eight bytes may stand at any address.
CQSA_DEVICE void copy_unit(const char* from, char* to, int bytes) {
  if (bytes == 16) {
    *reinterpret_cast<word4x*>(to) = *reinterpret_cast<const word4x*>(from);
  } else if (bytes == 8) {
    store_u32(to, load_u32(from));
    if (!CQSA_MUTANT(3)) store_u32(to + 4, load_u32(from + 4));
  } else if (bytes == 4) {
    store_u32(to, load_u32(from));
  } else if (bytes == 2) {
    store_u16(to, load_u16(from));
  } else {
    *to = *from;
  }
}

CQSA_DEVICE void clear_unit(char* to, int bytes) {
  for (int i = 0; i < bytes; ++i) to[i] = 0;
}

CQSA_DEVICE void gather_rows(const gather_params& p) {
  const int64_t all = p.batch * p.heads * p.rows;
  const int width = 1 << p.width_shift, each = block_threads() >> p.width_shift;
  const int lane = thread_index() & (width - 1);
  for (int64_t n = block_index_x() * each + (thread_index() >> p.width_shift); n < all; n += grid_size_x() * each) {
    int64_t item = n / p.rows / p.heads;
    const int64_t h = n / p.rows % p.heads, row = gathered_row(p, n % p.rows, &item);
    const int64_t at = item * p.stride[0] + h * p.stride[1] + row * p.stride[2];
    for (int c = lane; c < p.units; c += width) {
      char* to = p.to + (n * p.units + c) * p.bytes;
      if (item < 0) clear_unit(to, p.bytes);
      else copy_unit(p.from + (at + c * p.stride[3]) * p.bytes, to, p.bytes);
    }
  }
}

}  // namespace cqsa::gpu
