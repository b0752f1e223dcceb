// SPDX-License-Identifier: Apache-2.0
// What combine_leaf.cpp tells the combine kernel: partial states of several splits of the keys -> the result.
#pragma once

#include "attention_params.h"

namespace cqsa::gpu {

// A state is that of cqsa_attention_leaf: acc not normalised, m in natural-log units, l. The states of a split lie side by side, row
// r = (batch * num_heads + head) * row_capacity + row, those of the next split behind them all:
//   acc f32 [splits][rows][head_dim_v], m and l f32 [splits][rows].
// A split without keys for a row says m = -inf, l = 0, and its acc is not read. Everything else must have been written, but for rows
// that are not there: of a varlen problem those past the end of their segment.
struct combine_params {
  const float *acc, *m, *l;
  int64_t rows, row_capacity;
  int64_t num_heads;
  gpu_view out, lse, sinks;
  int64_t q_row;  // row of out and lse of row 0 of every batch item
  const void* cu_seqlens_q;
  int64_t total_q;
  // Instead of out and lse: the merged state, row r of the same shape but for its own capacity and first row.
  float *state_acc, *state_m, *state_l;
  int64_t state_rows, state_row;
  int32_t index_bytes;
  int32_t splits, head_dim_v;
  int32_t quads;  // acc is read four channels at a time
};

}  // namespace cqsa::gpu
