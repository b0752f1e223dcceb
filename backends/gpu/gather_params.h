// SPDX-License-Identifier: Apache-2.0
// What gather_leaf.cpp tells the gather kernel.
#pragma once

#include <cstdint>

namespace cqsa::gpu {

// A run, and where its first row goes.
struct placed_run {
  int64_t row, first;
};

struct gather_params {
  const char* from;
  char* to;
  int64_t stride[4];  // in units of `bytes`
  int64_t batch, heads, rows;
  int64_t first_row;
  const placed_run* runs;  // device memory, or null
  int64_t num_runs;
  const char* page_table;
  int64_t page_table_stride[2];
  int64_t page_size, num_pages;
  int32_t units;        // of `bytes` in a row
  int32_t bytes;        // 1, 2, 4, 8, or 16 where rows are aligned runs
  int32_t width_shift;  // 2^width_shift neighbouring threads take a row
};

}  // namespace cqsa::gpu
