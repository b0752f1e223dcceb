// SPDX-License-Identifier: Apache-2.0
// For leaves that split the keys of a row over several blocks: where the blocks leave their states, and the launch that makes the
// result of them. combine_params.h has the layout.
#pragma once

#include "attention_params.h"
#include "port.h"

namespace cqsa::gpu {

// States of `splits` splits of the leaf's rows, `row_capacity` for every batch item and head.
struct split_states {
  float *acc, *m, *l;
  int64_t rows;      // of one split: batch * num_heads * row_capacity
  int64_t row_capacity;
  int32_t splits;
};

// Bytes of the states, from sizes only.
uint64_t split_bytes(const cqsa_attention_leaf& leaf, int64_t row_capacity, int64_t splits);
// Cuts memory of that many bytes, aligned to 64.
split_states split_memory(const cqsa_attention_leaf& leaf, int64_t row_capacity, int64_t splits, void* memory);

// Merges the states in the order of their splits and finishes the rows: sinks, out and lse, or the leaf's state with
// CQSA_LEAF_STATE_OUT. Whole problems and one rectangle.
cqsa_status combine(void* device, const cqsa_attention_leaf& leaf, const split_states& states, void* stream);

}  // namespace cqsa::gpu
