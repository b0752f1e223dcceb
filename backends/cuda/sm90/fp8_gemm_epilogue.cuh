// SPDX-License-Identifier: Apache-2.0
// Sums of a tile of the Hopper FP8 product to d, each warp 16 rows of 32 columns at a time.
#pragma once

#include "backends/cuda/sm80/fp8_gemm_run.cuh"
#include "fp8_gemm_mainloop.cuh"

namespace cqsa::gpu::sm90 {

// Part number `wanted` of all waves and parts to shared memory. Registers have no index: one piece of code for each, which the compiler must not
// make one again.
template <class S, int I = 0> CQSA_DEVICE void stage_part(float* staging, const tile_sums<S>& total, int wanted) {
  constexpr int parts = S::columns / 32, first = 16 * (I % parts);
  if (wanted == I) {
    const auto& c = total.x[I / parts];
#pragma unroll
    for (int f = 0; f < 4; ++f) sm80::stage_fragment(staging, f, c[first + 4 * f], c[first + 4 * f + 1], c[first + 4 * f + 2], c[first + 4 * f + 3]);
    asm volatile("");
  }
  if constexpr (I + 1 < S::waves * parts) stage_part<S, I + 1>(staging, total, wanted);
}

template <class S, gemm_form Form>
CQSA_DEVICE uint32_t end_tile(const gemm_launch& p, const gemm_memory<S>& mem, const tile_place& at, int group, const tile_sums<S>& total) {
  constexpr bool scaled = Form == gemm_form::fast || Form == gemm_form::plain;
  const int lane = thread_index() % 32, warp = thread_index() / 32 % 4;
  float* const staging = mem.staging(4 * group + warp);
  const float d_scale = scale_of_codes(p.g.end);
  uint32_t largest = 0;
#pragma unroll 1
  for (int part = 0; part < S::columns / 32; ++part) {
    const int64_t column = at.column + 32 * part + 8 * (lane % 4);
    sm80::column_run run;
    sm80::load_run(p.g, scaled, at.batch, column, run);
#pragma unroll 1
    for (int w = 0; w < S::waves; ++w) {
      lanes_barrier<32>();
      stage_part<S>(staging, total, w * (S::columns / 32) + part);
      lanes_barrier<32>();
      const int64_t row = at.row + (group * S::waves + w) * 64 + 16 * warp;
      const uint32_t of_part = sm80::end_part(p.g, scaled, at.batch, staging, row, run, column, d_scale);
      if (of_part > largest) largest = of_part;
    }
  }
  return largest;
}

}  // namespace cqsa::gpu::sm90
