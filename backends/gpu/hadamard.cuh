// SPDX-License-Identifier: Apache-2.0
// out = x times the orthonormal Walsh-Hadamard matrix, section 12 of cqsa.h. A block takes some rows at a time, reads all of them
// before it writes the first, so out may be x.
#pragma once

#include "kv_params.h"
#include "rotate.cuh"

namespace cqsa::gpu {

// Element number of the first channel of a row.
CQSA_DEVICE int64_t row_start(const gpu_view& x, const int64_t* shape, int64_t row) {
  const int64_t c = row % shape[2], b = row / shape[2] % shape[1], a = row / shape[2] / shape[1];
  return a * x.stride[0] + b * x.stride[1] + c * x.stride[2];
}

CQSA_DEVICE void hadamard_block(const hadamard_params& p) {
  float* const values = reinterpret_cast<float*>(shared_memory());
  const int n = 1 << p.n_shift, fours_shift = p.n_shift > 2 ? p.n_shift - 2 : 0, fours = 1 << (p.rows_shift + fours_shift);
  const int64_t rows_each = int64_t(1) << p.rows_shift;
  for (int64_t first = block_index_x() * rows_each; first < p.rows; first += grid_size_x() * rows_each) {
    for (int i = thread_index(); i < fours; i += block_threads()) {
      const int row = i >> fours_shift, c = (i & ((1 << fours_shift) - 1)) * 4;
      float4x four = {{0.0f, 0.0f, 0.0f, 0.0f}};
      if (first + row < p.rows) four = load_four(p.x, row_start(p.x, p.shape, first + row), c, n);
      put_four(values, (row << p.n_shift) + c, n - c, four);
    }
    barrier();
    rotate_rows(values, p.rows_shift + p.n_shift, p.n_shift);
    // No barrier behind this loop: a thread puts its next values where it has taken these.
    for (int i = thread_index(); i < fours; i += block_threads()) {
      const int row = i >> fours_shift, c = (i & ((1 << fours_shift) - 1)) * 4;
      if (first + row >= p.rows) continue;
      store_four(p.out, row_start(p.out, p.shape, first + row), c, n, take_four(values, (row << p.n_shift) + c, n - c, p.factor));
    }
  }
}

}  // namespace cqsa::gpu
