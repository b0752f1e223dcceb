// SPDX-License-Identifier: Apache-2.0
// What kv_leaf.cpp tells the kernels of key-value caches. Plain data, passed by value at launch.
#pragma once

#include "attention_params.h"

namespace cqsa::gpu {

struct kv_params {
  gpu_view x, pool, scale;  // x [-, key head, row, channel]; pool and scale [page, key head, row of the page, channel or group]
  const char *page_table, *cells;
  int64_t page_table_stride[2], cells_stride;
  int64_t rows, heads, head_dim;
  int64_t num_pages, page_size, pages;
  int32_t cells_bytes;
  int32_t group;       // int8: channels of a scale
  int32_t blocks;      // the pool is blocks of q4_0
  int32_t rows_shift;  // rotations: 2^rows_shift rows of 2^n_shift channels are in shared memory together
  int32_t n_shift;
  float factor;        // 1/sqrt(head_dim)
};

struct hadamard_params {
  gpu_view x, out;  // three leading axes, channel
  int64_t shape[3];
  int64_t rows;  // product of shape
  int32_t rows_shift, n_shift;
  float factor;
};

// Floats of shared memory for so many values: one in 32 is left out, so that values that are a power of two apart do not all
// lie in one bank.
constexpr int64_t padded_floats(int64_t values) { return values + values / 32; }

}  // namespace cqsa::gpu
