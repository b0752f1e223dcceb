// SPDX-License-Identifier: Apache-2.0
// Rows of a varlen problem past its last segment: out = 0, lse = -inf. A group of lanes per row and head.
#pragma once

#include "element.cuh"

namespace cqsa::gpu {

template <int Lanes> CQSA_DEVICE void clear_tail_rows(const tail_params& p) {
  const int64_t first = clamp_i64(load_index(p.cu_seqlens_q, p.index_bytes, p.batch), 0, p.total_q);
  const int lane = thread_index() % Lanes, each = block_threads() / Lanes;
  const int64_t count = (p.total_q - first) * p.num_heads;
  for (int64_t n = block_index_x() * each + thread_index() / Lanes; n < count; n += grid_size_x() * each) {
    const int64_t row = first + n / p.num_heads, h = n % p.num_heads;
    const int64_t at = offset_of(p.out, 0, h, row, 0);
    for (int c = lane; c < p.head_dim_v; c += Lanes) store_element(p.out.data, p.out.kind, at + c * p.out.stride[3], 0.0f);
    if (lane == 0 && p.lse.data) store_u32(p.lse.data + 4 * offset_of(p.lse, 0, h, row, 0), bits_of(-infinity()));
  }
}

}  // namespace cqsa::gpu
