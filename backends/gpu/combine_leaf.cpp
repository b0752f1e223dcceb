// SPDX-License-Identifier: Apache-2.0
#include "combine_leaf.h"

#include "attention_fill.h"
#include "combine_params.h"

namespace cqsa::gpu {

namespace {

// acc of all splits, m, l, each from a multiple of 64 bytes on.
struct split_sizes {
  uint64_t acc, each;
};
split_sizes sizes_of(const cqsa_attention_leaf& leaf, int64_t row_capacity, int64_t splits) {
  const uint64_t states = uint64_t(leaf.batch) * uint64_t(leaf.num_heads) * uint64_t(row_capacity) * uint64_t(splits);
  const auto rounded = [](uint64_t floats) { return (floats * 4 + 63) / 64 * 64; };
  return {rounded(states * uint64_t(leaf.head_dim_v)), rounded(states)};
}

combine_params params_of(const cqsa_attention_leaf& leaf, const split_states& states) {
  combine_params p{};
  p.acc = states.acc, p.m = states.m, p.l = states.l;
  p.rows = states.rows;
  p.row_capacity = states.row_capacity;
  p.num_heads = leaf.num_heads;
  p.splits = states.splits;
  p.head_dim_v = int32_t(leaf.head_dim_v);
  p.quads = leaf.head_dim_v % 4 == 0;
  const bool one_rect = leaf.rects && leaf.num_rects > 0;
  p.q_row = one_rect ? leaf.rects[0].q_row : 0;
  if (leaf.flags & CQSA_LEAF_STATE_OUT) {
    p.state_acc = leaf.state_acc, p.state_m = leaf.state_m, p.state_l = leaf.state_l;
    p.state_rows = leaf.state_rows;
    p.state_row = one_rect ? leaf.rects[0].state_row : 0;
  }
  p.out = plain_view(leaf.out);
  p.lse = plain_view(leaf.lse);
  p.sinks = plain_view(leaf.sinks);
  p.cu_seqlens_q = leaf.cu_seqlens_q;
  p.total_q = leaf.total_q;
  p.index_bytes = leaf.index_dtype == CQSA_DTYPE_I64 ? 8 : 4;
  return p;
}

}  // namespace

uint64_t split_bytes(const cqsa_attention_leaf& leaf, int64_t row_capacity, int64_t splits) {
  const split_sizes sizes = sizes_of(leaf, row_capacity, splits);
  return sizes.acc + 2 * sizes.each;
}

split_states split_memory(const cqsa_attention_leaf& leaf, int64_t row_capacity, int64_t splits, void* memory) {
  const split_sizes sizes = sizes_of(leaf, row_capacity, splits);
  char* const base = static_cast<char*>(memory);
  const auto part = [base](uint64_t offset) { return reinterpret_cast<float*>(base + offset); };
  return {part(0),      part(sizes.acc), part(sizes.acc + sizes.each), leaf.batch * leaf.num_heads * row_capacity,
          row_capacity, int32_t(splits)};
}

cqsa_status combine(void* device, const cqsa_attention_leaf& leaf, const split_states& states, void* stream) {
  static_assert(sizeof(combine_params) <= most_params_bytes);
  if (states.rows < 1 || states.splits < 1) return CQSA_OK;
  const combine_params p = params_of(leaf, states);
  const device_facts& facts = facts_of(device);
  const int64_t rows_each = 128 / facts.lanes, most = larger(facts.compute_units, 1) * 32;
  const uint32_t blocks = uint32_t(smaller(divide_up(p.rows, rows_each), most));  // they go round
  return launch(device, kernel_id::cqsa_attention_combine, {{blocks, 1, 1}, 128, 0}, &p, sizeof p, stream);
}

}  // namespace cqsa::gpu
