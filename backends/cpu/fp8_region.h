// SPDX-License-Identifier: Apache-2.0
// One passage over some rows of a quantization. It is cut into regions that hold whole blocks, so that a worker finds the amaxes of
// a region, their scales, and then the codes while the elements are still in its caches.
#pragma once

#include "fp8_element.h"
#include "fp8_lines.h"

#include <atomic>

namespace cqsa::cpu {

constexpr int64_t fp8_slots = 256;           // groups of rows that one passage handles
constexpr int64_t fp8_region_blocks = 4096;  // most blocks of a side in a region
constexpr int64_t fp8_tile_rows = 64, fp8_tile_columns = 256;  // what is transposed at once

// One of up to two outputs, or the amaxes of blocks.
struct fp8_side_pass {
  const cqsa_fp8_output* side = nullptr;  // NULL: only amaxes
  const cqsa_scale_grid* grid = nullptr;
  bool transposed = false;
  bool counted = false;    // its saturated elements are counted
  bool by_row = false;     // one scale for a row: that of the tensor, or of its group, in `slots`
  bool found = false;      // amaxes are found in the region
  bool per_group = false;
  float slots[fp8_slots];
};

struct fp8_pass {
  const fp8_target* target;
  const cqsa_fp8_job* job;
  fp8_groups groups;
  int64_t top, bottom;       // rows
  int64_t group0, group_count;  // groups of those rows; one without groups
  fp8_side_pass sides[2];
  int side_count;
  bool finds_amax;           // of all elements, where no side finds it
  bool backwards;            // what was read last is read first
  bool streams;
  int64_t region_rows, region_columns, tile_columns;
  int64_t workers;
};

// What workers share.
struct fp8_results {
  std::atomic<int64_t> next{0};
  std::atomic<uint32_t> amax{0};
  std::atomic<int64_t> counts[3];
};

void fp8_raise(std::atomic<uint32_t>& to, uint32_t bits);

// Sizes of regions and tiles; false: the two sides have to go one after the other.
bool fp8_plan_pass(fp8_pass* pass);
int64_t fp8_region_count(const fp8_pass& pass);
// A worker: regions until there are no more.
void fp8_work_on_regions(const fp8_pass& pass, fp8_results* results);

// Lines of a job as F32 or BF16.
struct fp8_line_scratch {
  alignas(64) float x[fp8_line];
  alignas(64) float up[fp8_line];
  alignas(64) char raw[4 * fp8_line];
};
struct fp8_line_view {
  const void* data;
  cqsa_dtype type;
};
// Elements j .. j + n of row i, n <= fp8_line.
fp8_line_view fp8_fetch(const fp8_target& target, const cqsa_fp8_job& job, int64_t i, int64_t j, int64_t n, fp8_line_scratch* mem);
// .. as f32 in mem->x.
const float* fp8_fetch_f32(const fp8_target& target, const cqsa_fp8_job& job, int64_t i, int64_t j, int64_t n, fp8_line_scratch* mem);

}  // namespace cqsa::cpu
