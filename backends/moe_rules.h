// SPDX-License-Identifier: Apache-2.0
// What every backend must do alike for a mixture of experts: where the matrix of an expert is, and which expert an id means. Plain functions, also for
// device code.
#pragma once

#include "backends/cqsa_backend.h"

#if defined(__CUDACC__) || defined(__HIP__)
#define CQSA_MOE_INLINE __host__ __device__ __forceinline__
#else
#define CQSA_MOE_INLINE inline
#endif

namespace cqsa::moe {

constexpr int64_t most_experts = 4096, most_topk = 64;
constexpr int64_t q8_group = 32;  // activations that share a scale

// F32, F16, BF16: no blocks, so activations are taken as they are.
CQSA_MOE_INLINE bool is_plain(cqsa_quant_format format) { return format <= CQSA_QUANT_BF16; }

// row_bytes of a descriptor that says 0.
CQSA_MOE_INLINE uint64_t row_bytes_of(const cqsa_moe_matrix& m, int64_t row_elements, int32_t block_elements, int32_t block_bytes) {
  return m.row_bytes != 0 ? m.row_bytes : static_cast<uint64_t>(row_elements / block_elements * block_bytes);
}

// The matrix of expert e from a list, or from one block of memory. List: host memory on the host, device memory in a kernel.
CQSA_MOE_INLINE cqsa_moe_matrix matrix_at(const cqsa_moe_matrix* list, const cqsa_moe_matrix& all, int64_t expert_bytes, int64_t e) {
  if (list) return list[e];
  cqsa_moe_matrix m = all;
  if (all.data) m.data = static_cast<const char*>(all.data) + e * expert_bytes;
  return m;
}

enum : int32_t { not_here = -1, out_of_range = -2 };

// The expert of the weights that an id means, not_here or out_of_range.
CQSA_MOE_INLINE int32_t expert_of(int64_t id, int64_t num_ids, const int32_t* map, int64_t map_stride, int64_t num_experts) {
  if (id == -1) return not_here;
  if (id < 0 || id >= num_ids) return out_of_range;
  int32_t e = static_cast<int32_t>(id);
  if (map) __builtin_memcpy(&e, map + id * map_stride, sizeof e);  // host memory may be at any address
  if (e == -1) return not_here;
  return e >= 0 && e < num_experts ? e : static_cast<int32_t>(out_of_range);
}

// The rows of gate and up that make element n of h, for a layout with both in one matrix of 2 * inter rows.
CQSA_MOE_INLINE int64_t gate_row(int32_t layout, int64_t n) { return layout == CQSA_MOE_INTERLEAVED ? 2 * n : n; }
CQSA_MOE_INLINE int64_t up_row(int32_t layout, int64_t n, int64_t inter) {
  return layout == CQSA_MOE_INTERLEAVED ? 2 * n + 1 : layout == CQSA_MOE_CONCAT ? inter + n : n;
}
CQSA_MOE_INLINE bool is_gated(int32_t activation) { return activation <= CQSA_MOE_GEGLU_TANH; }

}  // namespace cqsa::moe
