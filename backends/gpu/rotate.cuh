// SPDX-License-Identifier: Apache-2.0
// Walsh-Hadamard transforms of rows in shared memory. Each step of each pair is a sum and a difference that are rounded by
// themselves, so the bits are those of any other order of work: up to three steps are done in registers between two barriers.
#pragma once

#include "quad.cuh"

namespace cqsa::gpu {

// Where value i lies; see padded_floats().
CQSA_DEVICE int padded(int i) { return i + (i >> 5); }

// The steps step, 2 step, .. 2^(Count - 1) step of all pairs of 2^values_shift values.
template <int Count> CQSA_DEVICE void butterflies(float* values, int values_shift, int step_shift) {
  constexpr int size = 1 << Count;
  const int step = 1 << step_shift, items = 1 << (values_shift - Count);
  for (int item = thread_index(); item < items; item += block_threads()) {
    const int low = item & (step - 1), first = ((item - low) << Count) + low;
    float v[size];
#pragma unroll
    for (int i = 0; i < size; ++i) v[i] = values[padded(first + (i << step_shift))];
#pragma unroll
    for (int h = 1; h < size; h *= 2)
#pragma unroll
      for (int i = 0; i < size; ++i)
        if (!(i & h)) {
          const float a = v[i], b = v[i + h];
          v[i] = a + b;
          v[i + h] = CQSA_MUTANT(21) ? b - a : a - b;
        }
#pragma unroll
    for (int i = 0; i < size; ++i) values[padded(first + (i << step_shift))] = v[i];
  }
}

// All steps of rows of 2^n_shift values, without the factor. The values are there for all threads, before and behind.
CQSA_DEVICE void rotate_rows(float* values, int values_shift, int n_shift) {
  int done = 0;
  for (; done + 3 <= n_shift; done += 3) {
    butterflies<3>(values, values_shift, done);
    barrier();
  }
  if (done == n_shift) return;
  if (n_shift - done == 2) butterflies<2>(values, values_shift, done);
  else butterflies<1>(values, values_shift, done);
  barrier();
}

CQSA_DEVICE void put_four(float* values, int at, int n, const float4x& from) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (i < n) values[padded(at + i)] = from.x[i];
}

CQSA_DEVICE float4x take_four(const float* values, int at, int n, float factor) {
  float4x out = {{0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (i < n) out.x[i] = values[padded(at + i)] * factor;
  return out;
}

}  // namespace cqsa::gpu
