// SPDX-License-Identifier: Apache-2.0
// What the attention kernels of more than one tier compute in the same way.
#pragma once

#include "backends/gpu/element.cuh"

namespace cqsa::gpu {

constexpr float log2_of_e = 1.4426950408889634f;

// Over the four lanes that have a row.
CQSA_DEVICE float quad_max(float x) {
  x = max_f32(x, shuffle_xor<32>(x, 1));
  return max_f32(x, shuffle_xor<32>(x, 2));
}
CQSA_DEVICE float quad_sum(float x) {
  x += shuffle_xor<32>(x, 1);
  return x + shuffle_xor<32>(x, 2);
}

// The reference of a row's exponents in powers of two. A row that has seen no key yet: any finite one does, since every p is
// 2^-inf = 0.
CQSA_DEVICE float reference_of(float m) { return product_f32(m == -infinity() ? 0.0f : m, log2_of_e); }

// tanh to 3e-7: near 0 by its series, elsewhere by 2^x.
CQSA_DEVICE float tanh_fast(float x) {
  const float square = x * x;
  const float series = x * fma_f32(square, fma_f32(square, fma_f32(square, -17.0f / 315.0f, 2.0f / 15.0f), -1.0f / 3.0f), 1.0f);
  const float other = 1.0f - 2.0f * reciprocal_f32(1.0f + exp2_f32(x * (2.0f * log2_of_e)));
  return square < 0.04f ? series : other;
}

template <int Kind> constexpr uint32_t exponent_mask = Kind == kind_f16 ? 0x7c007c00u : 0x7f807f80u;

// Whether one of two halves is NaN or Inf: adding one to an exponent of all ones carries into the sign.
template <int Kind> CQSA_DEVICE bool is_wild(uint32_t two) {
  constexpr uint32_t one = Kind == kind_f16 ? 0x04000400u : 0x00800080u;
  return (((two & exponent_mask<Kind>) + one) & 0x80008000u) != 0;
}

}  // namespace cqsa::gpu
