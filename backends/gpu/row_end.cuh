// SPDX-License-Identifier: Apache-2.0
// From the state of a row to its result.
#pragma once

#include "element.cuh"

namespace cqsa::gpu {

// out = acc * factor / divisor.
struct row_end {
  float factor, divisor, lse;
};

// The logarithm of a sum to 4e-8, or a unit in the last place where that is more: the exponent's share in f64, that of the rest, at
// most 0.35, in f32. Logarithms in f64 are some hundred instructions that the end of a block would wait for.
CQSA_DEVICE double log_of_sum(float x) {
  if (!(x >= 0x1p-126f && x < infinity())) return log_f32(x);
  const int exponent = int(bits_of(x) - 0x3f3504f3u) >> 23;  // so that the rest is from sqrt(1/2) to sqrt(2)
  return double(exponent) * 0.6931471805599453 + double(log_f32(float_of(bits_of(x) - (uint32_t(exponent) << 23))));
}

// sink: -inf where there is none. It takes part in the sum and has no value. A row that has seen nothing: out 0, lse -inf.
CQSA_DEVICE row_end end_row(float m, float l, float sink) {
  const bool empty = l == 0.0f && m == -infinity();
  float top = empty ? sink : m, sum = empty ? 1.0f : l, factor = empty ? 0.0f : 1.0f;
  if (!empty && sink != -infinity()) {
    top = sink > m ? sink : m;
    const double part = exp_f64(double(m) - double(top));
    factor = float(part), sum = float(double(l) * part + exp_f64(double(sink) - double(top)));
  }
  const bool nothing = top == -infinity() && !(sum != sum);
  return {factor, empty || nothing ? 1.0f : sum, nothing ? -infinity() : float(double(top) + log_of_sum(sum))};
}

CQSA_DEVICE float sink_of(const gpu_view& sinks, int64_t h) {
  return sinks.data ? load_element(sinks.data, kind_f32, h * sinks.stride[1]) : -infinity();
}

}  // namespace cqsa::gpu
