// SPDX-License-Identifier: Apache-2.0
// The innermost loop of the product: some rows of a times two vectors of columns of b, sums in registers.
#pragma once

#include "fp8_lines.h"
#include "simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cqsa::cpu {
namespace {
namespace HWY_NAMESPACE {

// As many sums as there are registers, less those for b and for an element of a.
#if defined(__AVX512F__)
constexpr int gemm_rows = 12;
#else
constexpr int gemm_rows = 6;
#endif
constexpr int gemm_columns = 2 * lanes;

// acc[r][c] += sum over k of a[r][k] * b[k][c]: rows of a lie lda apart, of b compact.
static void multiply_block(const float* HWY_RESTRICT a, int64_t lda, const float* HWY_RESTRICT b, int64_t depth, float* HWY_RESTRICT acc, int64_t ld) {
  vf low[gemm_rows], high[gemm_rows];
  for (int r = 0; r < gemm_rows; ++r) low[r] = high[r] = zero();
  for (int64_t k = 0; k < depth; ++k) {
    const vf b0 = load(b + k * gemm_columns), b1 = load(b + k * gemm_columns + lanes);
#if defined(__clang__)
#pragma clang loop unroll(full)
#else
#pragma GCC unroll 12
#endif
    for (int r = 0; r < gemm_rows; ++r) {
      const vf x = set(a[r * lda + k]);
      low[r] = fma(x, b0, low[r]);
      high[r] = fma(x, b1, high[r]);
    }
  }
  for (int r = 0; r < gemm_rows; ++r) {
    float* const to = acc + r * ld;
    store(add(load(to), low[r]), to);
    store(add(load(to + lanes), high[r]), to + lanes);
  }
}

constexpr fp8_gemm_kernel gemm_of_target = {gemm_rows, gemm_columns, multiply_block};

}  // namespace HWY_NAMESPACE
}  // namespace
}  // namespace cqsa::cpu
HWY_AFTER_NAMESPACE();
