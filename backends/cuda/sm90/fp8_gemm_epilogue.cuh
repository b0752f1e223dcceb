// SPDX-License-Identifier: Apache-2.0
// Sums of a tile of the Hopper FP8 product to d. Each warp puts 16 rows of 32 columns at a time into shared memory and takes them back row by
// row, so that memory sees runs of 8 neighbours, and the code that knows all types and strides is there once.
#pragma once

#include "fp8_gemm_mainloop.cuh"

namespace cqsa::gpu::sm90 {

// What is the same for all rows of a run of 8 columns.
struct column_run {
  float scale[8], bias[8];
};
template <gemm_form Form> CQSA_DEVICE void load_run(const gemm_launch& p, const tile_place& at, int64_t column, column_run& run) {
  const gemm_end& e = p.g.end;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int64_t c = min_i64(column + i, p.g.n - 1);
    run.scale[i] = Form == gemm_form::fast || Form == gemm_form::plain ? e.alpha * scale_at(p.g.scale_b, at.batch, c, 0) : e.alpha;
    run.bias[i] = e.bias ? load_element(e.bias, e.bias_kind, c * e.bias_stride) : 0.0f;
  }
}

CQSA_DEVICE void store_run(const gemm_end& e, int64_t to, const float (&value)[8], float d_scale) {
  word4x words{};
  if (e.d.kind == gemm_f32) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      *reinterpret_cast<float4x*>(e.d.data + 4 * to + 16 * h) = {{value[4 * h], value[4 * h + 1], value[4 * h + 2], value[4 * h + 3]}};
  } else if (e.d.kind <= gemm_bf16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words.x[i] = e.d.kind == gemm_f16 ? pack_f16(value[2 * i], value[2 * i + 1]) : pack_bf16(value[2 * i], value[2 * i + 1]);
    *reinterpret_cast<word4x*>(e.d.data + 2 * to) = words;
  } else {
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      uint32_t word = 0;
#pragma unroll
      for (int n = 0; n < 4; ++n) word |= encode_fp8((i ? value[4 + n] : value[n]) * d_scale, e.d.kind) << 8 * n;
      *reinterpret_cast<uint32_t*>(e.d.data + to + 4 * i) = word;
    }
  }
}

// One row of a run; the largest |d|.
CQSA_DEVICE uint32_t end_run(const gemm_launch& p, const tile_place& at, int64_t row, int64_t column, const column_run& run, float row_scale,
                             const float (&sum)[8], float d_scale) {
  const gemm_end& e = p.g.end;
  float value[8];
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    value[i] = sum[i] * (row_scale * run.scale[i]);
    if (e.c.data && column + i < p.g.n)
      value[i] = fma_f32(e.beta, load_element(e.c.data, e.c.kind, at.batch * e.c.stride[0] + row * e.c.stride[1] + (column + i) * e.c.stride[2]), value[i]);
    value[i] += run.bias[i];
    if (e.d_amax && column + i < p.g.n) largest = magnitude_bits(value[i]) > largest ? magnitude_bits(value[i]) : largest;
  }
  if (e.d.wide && column + 8 <= p.g.n) {
    store_run(e, at.batch * e.d.stride[0] + row * e.d.stride[1] + column, value, d_scale);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (column + i < p.g.n) store_end(e, at.batch, row, column + i, value[i], d_scale);
  }
  return largest;
}

// Fragments of 32 columns of a wave to shared memory.
template <class S> CQSA_DEVICE void stage_sums(float* staging, const float (&sums)[S::columns / 2], int part) {
  const int lane = thread_index() % 32, g = lane / 4, l = lane % 4;
#pragma unroll
  for (int f = 0; f < 4; ++f)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      *reinterpret_cast<float2x*>(staging + (g + 8 * i) * S::pitch + 8 * f + 2 * l) = {{sums[4 * (4 * part + f) + 2 * i], sums[4 * (4 * part + f) + 2 * i + 1]}};
}

// .. number `wanted` of all waves and parts. Registers have no index: one piece of code for each, which the compiler must not make one again.
template <class S, int I = 0> CQSA_DEVICE void stage_part(float* staging, const tile_sums<S>& total, int wanted) {
  constexpr int parts = S::columns / 32;
  if (wanted == I) {
    stage_sums<S>(staging, total.x[I / parts], I % parts);
    asm volatile("");
  }
  if constexpr (I + 1 < S::waves * parts) stage_part<S, I + 1>(staging, total, wanted);
}

template <class S, gemm_form Form>
CQSA_DEVICE uint32_t end_part(const gemm_launch& p, const tile_place& at, const float* staging, int64_t first_row, const column_run& run, int64_t column,
                              float d_scale) {
  const int lane = thread_index() % 32;
  uint32_t largest = 0;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const int64_t row = first_row + lane / 4 + 8 * i;
    if (row >= p.g.m || column >= p.g.n) continue;
    float sum[8];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float4x four = *reinterpret_cast<const float4x*>(staging + (lane / 4 + 8 * i) * S::pitch + 8 * (lane % 4) + 4 * h);
#pragma unroll
      for (int n = 0; n < 4; ++n) sum[4 * h + n] = four.x[n];
    }
    const float scale = Form == gemm_form::fast || Form == gemm_form::plain ? scale_at(p.g.scale_a, at.batch, row, 0) : 1.0f;
    const uint32_t of_row = end_run(p, at, row, column, run, scale, sum, d_scale);
    if (of_row > largest) largest = of_row;
  }
  return largest;
}

template <class S, gemm_form Form>
CQSA_DEVICE uint32_t end_tile(const gemm_launch& p, const gemm_memory<S>& mem, const tile_place& at, int group, const tile_sums<S>& total) {
  const int lane = thread_index() % 32, warp = thread_index() / 32 % 4;
  float* const staging = mem.staging(4 * group + warp);
  const float d_scale = scale_of_codes(p.g.end);
  uint32_t largest = 0;
#pragma unroll 1
  for (int part = 0; part < S::columns / 32; ++part) {
    const int64_t column = at.column + 32 * part + 8 * (lane % 4);
    column_run run;
    load_run<Form>(p, at, column, run);
#pragma unroll 1
    for (int w = 0; w < S::waves; ++w) {
      lanes_barrier<32>();
      stage_part<S>(staging, total, w * (S::columns / 32) + part);
      lanes_barrier<32>();
      const uint32_t of_part = end_part<S, Form>(p, at, staging, at.row + (group * S::waves + w) * 64 + 16 * warp, run, column, d_scale);
      if (of_part > largest) largest = of_part;
    }
  }
  return largest;
}

}  // namespace cqsa::gpu::sm90
