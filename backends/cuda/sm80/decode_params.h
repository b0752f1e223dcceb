// SPDX-License-Identifier: Apache-2.0
// What decode_leaf.cpp tells the decode kernels, and the shape of their blocks.
#pragma once

#include "backends/gpu/attention_params.h"

namespace cqsa::gpu::decode {

constexpr int threads = 128;
constexpr int keys = 64;         // of a stage; a warp takes 16 at a time
constexpr int most_rows = 64;    // query rows: queries times query heads of a key head
constexpr int most_stages = 8;   // copies under way: most_stages - 1

struct decode_params {
  attention_params a;
  // States of the splits (combine_params.h); null: one split, the result itself is written.
  float *part_acc, *part_m, *part_l;
  int64_t part_rows, row_capacity;
  int32_t splits;
  int32_t stages;
  int32_t m_tiles;      // tiles of 16 rows: 1, 2 or 4
  int32_t k_groups, v_groups, group_shift;  // scales of a row of k and of v, and the binary logarithm of their channels
  int32_t slot_bytes;   // slot_size(groups)
  int32_t page_size;    // as in a, brought down to 31 bits
};

// Bytes of the parts of shared memory: a ring of stages (k, then v), q, a slot of tables for each stage and one more, facts.
template <int D, int Bytes> struct decode_shape {
  static constexpr int row_bytes = D * Bytes;
  static constexpr int panel_bytes = keys * row_bytes;
  static constexpr int stage_bytes = 2 * panel_bytes;
  static constexpr int merge_stride = D + 8;  // floats of a row of sums, so that the stores of a warp spread over the banks
  static constexpr int merge_bytes = 4 * (4 * 16 * merge_stride + 2 * 4 * 16 + 4 * most_rows + 2 * most_rows);
};
constexpr int facts_bytes = 256;
// Places of k and v rows, which keys are there, scales.
constexpr int slot_size(int groups) { return 2 * 8 * keys + 16 + 2 * 4 * keys * groups; }

}  // namespace cqsa::gpu::decode
