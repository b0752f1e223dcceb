// SPDX-License-Identifier: Apache-2.0
// What the host parts of selected-cell attention tell their kernels, portable and tuned. Plain data, passed by value at launch.
#pragma once

#include "attention_params.h"

namespace cqsa::gpu {

struct selected_params {
  gpu_view q, k, v, k_scale, v_scale, out, lse;  // as in cqsa_selected_leaf
  const char *page_table, *cells, *counts;
  int64_t page_table_stride[2], cells_stride[2], counts_stride;
  int64_t page_size, num_pages, pages, capacity;  // sizes that ids are divided by or compared with, cut to 2^31
  int64_t total_q, first_unit;
  int32_t num_heads, num_kv_heads;
  int32_t group_heads;  // query heads of a key head
  int32_t parts;        // blocks that share these, 16 for each
  int32_t head_dim, head_dim_v;
  int32_t q_pitch;      // elements of a row of q in shared memory
  int32_t kv_group;     // channels of a scale, 0: no scales
  float softmax_scale;
};

// The portable kernel's block: 256 threads, 16 rows (query heads), tiles of 64 cells.
template <int Dv> struct selected_shape {
  static constexpr int rows = 16, cells = 64, half = cells / 2;
  static constexpr int pitch = cells + 4;                     // of a row of logits
  static constexpr int chunk = 64;                            // channels of k in shared memory at a time
  static constexpr int across = Dv < 256 ? Dv / 4 : 64;       // threads side by side, four neighbouring channels of out each
  static constexpr int rows_each = rows * across / 256;       // rows of out of a thread
  static constexpr int quads = (Dv + 255) / 256;              // .. and groups of four channels
  static constexpr int v_cells = Dv <= 64 ? 64 : 4096 / Dv;   // cells of v in shared memory at a time
  // Bytes of the parts of shared memory, in this order: a panel of k or v, logits, places of the cells, numbers of the rows, q.
  static constexpr int panel_bytes = 4 * cells * (chunk + 4);
  static constexpr int logit_bytes = 4 * rows * pitch;
  static constexpr int place_bytes = 8 * 4 * cells;
  static constexpr int row_bytes = 4 * 2 * rows;
  static constexpr int fixed_bytes = panel_bytes + logit_bytes + place_bytes + row_bytes;
  static_assert(4 * v_cells * Dv <= panel_bytes && rows_each >= 1, "a thread has work, and v has room");
};
// .. and a row of q there.
constexpr int32_t selected_q_pitch(int32_t head_dim) { return (head_dim + 3) / 4 * 4; }
static_assert(selected_shape<512>::fixed_bytes + 4 * 16 * selected_q_pitch(576) <= 65536, "what every chip has");

}  // namespace cqsa::gpu
