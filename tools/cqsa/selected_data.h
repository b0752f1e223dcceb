// SPDX-License-Identifier: Apache-2.0
// Operands of attention over selected cells as a sparse-attention model makes them, for `cqsa parity --op attention-selected`.
//
// Paged K and V, pages shuffled. f16: K ~ N(0, 1.5), V ~ N(0, 1). int8: codes uniform in -127..127, scales uniform in 0.005..0.03,
// one for each 64 channels. q ~ N(0, 2), f32. The queries are the last ones of the context; each sees the cells up to its own. While
// those are no more than `width` it selects all of them, then its last 512 and older ones, of which 3 % change from query to query.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cqsa.h"

namespace tool {

struct selected_spec {
  int64_t context = 0, queries = 0;
  cqsa_dtype kv = CQSA_DTYPE_F16;
  uint64_t seed = 1;
  int64_t heads = 24, kv_heads = 2, head_dim = 256, page_size = 64, group = 64, width = 2048 + 3;

  int64_t pages() const { return (context + page_size - 1) / page_size; }
  int64_t cells_of(int64_t query) const;  // that the query sees: those up to its own
};

// A tensor and its memory in the host.
struct selected_tensor {
  std::vector<int64_t> shape, strides;
  std::vector<std::byte> bytes;
  cqsa_dtype dtype = CQSA_DTYPE_NONE;

  cqsa_tensor view(void* data, int32_t device_type);  // of a copy of the bytes at `data`
  template <class T> T* as() { return reinterpret_cast<T*>(bytes.data()); }
  template <class T> const T* as() const { return reinterpret_cast<const T*>(bytes.data()); }
};

struct selected_data {
  selected_spec spec;
  selected_tensor q, k, v, k_scale, v_scale, page_table, cells, counts;

  explicit selected_data(const selected_spec& spec);
  // The row of a cell of one key head in f64.
  void key(int64_t cell, int64_t kv_head, double* to) const { decode(k, k_scale, cell, kv_head, to); }
  void value(int64_t cell, int64_t kv_head, double* to) const { decode(v, v_scale, cell, kv_head, to); }

 private:
  void decode(const selected_tensor& x, const selected_tensor& scale, int64_t cell, int64_t kv_head, double* to) const;
};

}  // namespace tool
