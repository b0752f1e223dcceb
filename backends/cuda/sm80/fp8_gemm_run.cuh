// SPDX-License-Identifier: Apache-2.0
// Sums of a tuned FP8 product to d: 16 rows of 32 columns of a warp at a time, from shared memory row by row, so that memory sees runs of 8
// neighbours, and the code that knows all types and strides is there once.
#pragma once

#include "backends/cuda/sm80/mma.cuh"
#include "backends/gpu/fp8_gemm_end.cuh"

namespace cqsa::gpu::sm80 {

constexpr int gemm_pitch = 36, gemm_staging_bytes = 16 * gemm_pitch * 4;  // f32, for each warp

// What is the same for all rows of a run of 8 columns. Scaled: sums have no scales yet, which do not go by k then.
struct column_run {
  float scale[8], bias[8];
};
CQSA_DEVICE void load_run(const gemm_params& p, bool scaled, int64_t batch, int64_t column, column_run& run) {
  const gemm_end& e = p.end;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int64_t c = min_i64(column + i, p.n - 1);
    run.scale[i] = scaled ? e.alpha * scale_at(p.scale_b, batch, c, 0) : e.alpha;
    run.bias[i] = e.bias ? load_element(e.bias, e.bias_kind, c * e.bias_stride) : 0.0f;
  }
}

CQSA_DEVICE void store_run(const gemm_end& e, int64_t to, const float (&value)[8], float d_scale) {
  if (e.d.kind == gemm_f32) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      *reinterpret_cast<float4x*>(e.d.data + 4 * to + 16 * h) = {{value[4 * h], value[4 * h + 1], value[4 * h + 2], value[4 * h + 3]}};
  } else if (e.d.kind <= gemm_bf16) {
    word4x words;
#pragma unroll
    for (int i = 0; i < 4; ++i) words.x[i] = e.d.kind == gemm_f16 ? pack_f16(value[2 * i], value[2 * i + 1]) : pack_bf16(value[2 * i], value[2 * i + 1]);
    *reinterpret_cast<word4x*>(e.d.data + 2 * to) = words;
  } else {
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      uint32_t word = 0;
#pragma unroll
      for (int n = 0; n < 4; ++n) word |= encode_fp8(product_f32(i ? value[4 + n] : value[n], d_scale), e.d.kind) << 8 * n;
      *reinterpret_cast<uint32_t*>(e.d.data + to + 4 * i) = word;
    }
  }
}

// One row of a run; the largest |d|.
CQSA_DEVICE uint32_t end_run(const gemm_params& p, int64_t batch, int64_t row, int64_t column, const column_run& run, float row_scale, const float (&sum)[8],
                             float d_scale) {
  const gemm_end& e = p.end;
  float value[8];
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    value[i] = sum[i] * (row_scale * run.scale[i]);
    if (e.c.data && column + i < p.n)
      value[i] = fma_f32(e.beta, load_element(e.c.data, e.c.kind, batch * e.c.stride[0] + row * e.c.stride[1] + (column + i) * e.c.stride[2]), value[i]);
    value[i] += run.bias[i];
    if (e.d_amax && column + i < p.n) largest = magnitude_bits(value[i]) > largest ? magnitude_bits(value[i]) : largest;
  }
  if (e.d.wide && column + 8 <= p.n) {
    store_run(e, batch * e.d.stride[0] + row * e.d.stride[1] + column, value, d_scale);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (column + i < p.n) store_end(e, batch, row, column + i, value[i], d_scale);
  }
  return largest;
}

// 16 rows from first_row on, of this lane's run of columns: those from 8 (lane % 4) on of the 32.
CQSA_DEVICE uint32_t end_part(const gemm_params& p, bool scaled, int64_t batch, const float* staging, int64_t first_row, const column_run& run, int64_t column,
                              float d_scale) {
  const int lane = thread_index() % 32;
  uint32_t largest = 0;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const int64_t row = first_row + lane / 4 + 8 * i;
    if (row >= p.m || column >= p.n) continue;
    float sum[8];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float4x four = *reinterpret_cast<const float4x*>(staging + (lane / 4 + 8 * i) * gemm_pitch + 8 * (lane % 4) + 4 * h);
#pragma unroll
      for (int n = 0; n < 4; ++n) sum[4 * h + n] = four.x[n];
    }
    const uint32_t of_row = end_run(p, batch, row, column, run, scaled ? scale_at(p.scale_a, batch, row, 0) : 1.0f, sum, d_scale);
    if (of_row > largest) largest = of_row;
  }
  return largest;
}

// Fragments of m16n8 of four neighbours in n to shared memory; c[4 f + i] is as mma.cuh has it.
CQSA_DEVICE void stage_fragment(float* staging, int f, float c0, float c1, float c2, float c3) {
  const int lane = thread_index() % 32, g = lane / 4, l = lane % 4;
  *reinterpret_cast<float2x*>(staging + g * gemm_pitch + 8 * f + 2 * l) = {{c0, c1}};
  *reinterpret_cast<float2x*>(staging + (g + 8) * gemm_pitch + 8 * f + 2 * l) = {{c2, c3}};
}

// The largest of all lanes goes to d_amax; each of `warps` warps of the launch tells it once.
CQSA_DEVICE void tell_warp(const gemm_end& e, uint32_t largest, uint32_t warps) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    const uint32_t other = shuffle_xor<32>(largest, mask);
    if (other > largest) largest = other;
  }
  if (thread_index() % 32 == 0) tell_amax(e, largest, warps);
}

}  // namespace cqsa::gpu::sm80
