// SPDX-License-Identifier: Apache-2.0
// From the state of a row to its result.
#pragma once

#include "element.cuh"

namespace cqsa::gpu {

// out = acc * factor / divisor.
struct row_end {
  float factor, divisor, lse;
};

// sink: -inf where there is none. It takes part in the sum and has no value. A row that has seen nothing: out 0, lse -inf.
CQSA_DEVICE row_end end_row(float m, float l, float sink) {
  const double none = -double(infinity());
  const bool empty = l == 0.0f && m == -infinity();
  double top = m, sum = l, factor = empty ? 0.0 : 1.0;
  if (empty) {
    top = sink;
    sum = 1.0;
  } else if (sink != -infinity()) {
    top = double(sink) > top ? double(sink) : top;
    factor = exp_f64(double(m) - top);
    sum = sum * factor + exp_f64(double(sink) - top);
  }
  const bool nothing = top == none && !(sum != sum);
  return {float(factor), empty || nothing ? 1.0f : float(sum), nothing ? -infinity() : float(top + log_f64(sum))};
}

CQSA_DEVICE float sink_of(const gpu_view& sinks, int64_t h) {
  return sinks.data ? load_element(sinks.data, kind_f32, h * sinks.stride[1]) : -infinity();
}

}  // namespace cqsa::gpu
