// SPDX-License-Identifier: Apache-2.0
// Operands of FP8 as kernels get them, for the host code of all of its operations.
#pragma once

#include "attention_fill.h"
#include "backends/cqsa_backend.h"
#include "fp8_params.h"
#include "port.h"

namespace cqsa::gpu {

inline int32_t fp8_kind_of(cqsa_dtype type) {
  switch (type) {
    case CQSA_DTYPE_F32: return kind_f32;
    case CQSA_DTYPE_F16: return kind_f16;
    case CQSA_DTYPE_BF16: return kind_bf16;
    case CQSA_DTYPE_E4M3FN: return kind_e4m3;
    case CQSA_DTYPE_E5M2: return kind_e5m2;
    case CQSA_DTYPE_E4M3FNUZ: return kind_e4m3fnuz;
    default: return kind_e5m2fnuz;
  }
}

inline fp8_matrix matrix_of(const cqsa_matrix& x) {
  fp8_matrix out{static_cast<char*>(x.data), {x.stride[0], x.stride[1], x.stride[2]}, x.data ? fp8_kind_of(x.dtype) : 0, 0};
  return out;
}

inline bool powers_only(const cqsa_scale_grid& g) { return g.data && (g.layout != CQSA_FP8_SCALES_STRIDED || g.dtype != CQSA_DTYPE_F32); }

inline fp8_grid grid_of(const cqsa_scale_grid& g) {
  return {static_cast<char*>(g.data), {g.stride[0], g.stride[1]}, g.layout, g.dtype != CQSA_DTYPE_F32};
}

inline fp8_ring_place ring_place_of(const cqsa_fp8_ring& r, bool stage) {
  return {static_cast<char*>(r.state), r.hist_len, r.format, r.margin, r.algorithm, (r.flags & CQSA_FP8_POW2) ? 1 : 0, stage};
}

inline bool aligned_to(const void* data, uint64_t bytes) { return reinterpret_cast<uintptr_t>(data) % bytes == 0; }

// Blocks of 256 threads for so many units, `each` of them for a block at a time, at most `per_unit` on a multiprocessor.
inline int64_t fp8_blocks(const device_facts& facts, int64_t units, int64_t each, int64_t per_unit) {
  return smaller(larger(divide_up(units, each), 1), larger(facts.compute_units, 1) * per_unit);
}

}  // namespace cqsa::gpu
