// SPDX-License-Identifier: Apache-2.0
// d = a b^T of FP8 codes by the f16 matrix unit: codes become halves, exactly, on their way to shared memory; sums of 128 of k are added up in f32
// with their scales. Any strides and sizes; rows with k contiguous are read 16 bytes at a time.
#pragma once

#include "fp8_gemm_run.cuh"
#include "fp8_gemm_shape.h"

namespace cqsa::gpu::sm80 {

// ------------------------------------------------------------------------------------------------------------ codes to halves

// Two codes, each in the upper byte of a half, to two halves. The fnuz formats have twice the bias and one NaN.
CQSA_DEVICE uint32_t halves_of_e4m3(uint32_t v, bool fnuz) {
  const uint32_t magnitude = v & 0x7f007f00u, half = (v & 0x80008000u) | magnitude >> 1;
  const uint32_t value = fma_f16x2(half, fnuz ? 0x58005800u : 0x5c005c00u, 0);  // 128 or 256, which makes subnormals right
  const uint32_t nan = fnuz ? 0 : (magnitude + 0x01000100u) & 0x80008000u;
  return value | (nan - (nan >> 15));
}
CQSA_DEVICE uint32_t half_of_e5m2fnuz(uint32_t half) {
  const uint32_t magnitude = half & 0x7fffu;
  return (half & 0x8000u) | (magnitude >= 0x800u ? magnitude - 0x400u : magnitude >> 1);
}
CQSA_DEVICE uint32_t halves_of(uint32_t v, int kind) {
  if (kind == gemm_e5m2) return v;
  if (kind == gemm_e4m3fn) return halves_of_e4m3(v, false);
  uint32_t out = kind == gemm_e4m3fnuz ? halves_of_e4m3(v, true) : half_of_e5m2fnuz(v & 0xffffu) | half_of_e5m2fnuz(v >> 16) << 16;
  if ((v & 0xffffu) == 0x8000u) out |= 0x7fffu;
  if (v >> 16 == 0x8000u) out |= 0x7fff0000u;
  return out;
}

// ---------------------------------------------------------------------------------------------------------------- loads

struct code_rows {
  uint32_t x[2][4];  // 16 codes of two rows
};

CQSA_DEVICE void load_row(const gemm_operand& o, int64_t at, int64_t left, uint32_t (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = 0;
  if (o.wide && left >= 16) {
    const word4x w = *reinterpret_cast<const word4x*>(o.data + at);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = w.x[i];
  } else if (left > 0) {
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (i < left) x[i / 4] |= uint32_t(o.data[at + i * o.stride[2]]) << 8 * (i % 4);
  }
}
// A thread has 16 codes of row thread / 4, and of the row 64 further.
CQSA_DEVICE void load_rows(const gemm_params& p, const gemm_operand& o, int64_t batch, int64_t first, int64_t rows, int64_t k, code_rows& codes) {
  const int part = thread_index() % 4 * 16;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t row = first + thread_index() / 4 + 64 * h;
    load_row(o, batch * o.stride[0] + row * o.stride[1] + (k + part) * o.stride[2], row < rows ? p.k - k - part : 0, codes.x[h]);
  }
}
CQSA_DEVICE void store_rows(unsigned char* panel, int kind, const code_rows& codes) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    unsigned char* const to = panel + (thread_index() / 4 + 64 * h) * gemm_tile::pitch + thread_index() % 4 * 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      word4x out;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const uint32_t word = codes.x[h][2 * i + n / 2], two = n % 2 ? word >> 16 : word & 0xffffu;
        out.x[n] = halves_of((two & 0xffu) << 8 | (two & 0xff00u) << 16, kind);
      }
      *reinterpret_cast<word4x*>(to + 16 * i) = out;
    }
  }
}

// -------------------------------------------------------------------------------------------------------------- products

// Of a warp: 64 x 32, as 4 x 4 fragments.
struct warp_sums {
  float x[4][4][4];
};
CQSA_DEVICE void clear(warp_sums& s) {
#pragma unroll
  for (int i = 0; i < 64; ++i) s.x[i / 16][i / 4 % 4][i % 4] = 0.0f;
}

// 16 of k. Lane 8 j + r of ldmatrix has row r of matrix j: of a rows 0-7, 8-15 and the same further in k; of b n 0-7, the same further in k, then n 8-15.
CQSA_DEVICE void multiply_16(const unsigned char* a, const unsigned char* b, int k, warp_sums& s) {
  const int lane = thread_index() % 32, j = lane / 8, r = lane % 8;
  uint32_t of_a[4][4], of_b[2][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) ldmatrix_x4(of_a[i], a + (16 * i + 8 * (j % 2) + r) * gemm_tile::pitch + 2 * k + 16 * (j / 2));
#pragma unroll
  for (int i = 0; i < 2; ++i) ldmatrix_x4(of_b[i], b + (16 * i + 8 * (j / 2) + r) * gemm_tile::pitch + 2 * k + 16 * (j % 2));
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const uint32_t two[2] = {of_b[n / 2][2 * (n % 2)], of_b[n / 2][2 * (n % 2) + 1]};
      mma_m16n8k16_f16(s.x[i][n], of_a[i], two);
    }
}

// The tile of the block and this warp's part of it.
struct gemm_warp {
  int64_t batch, row, column;  // of the tile
  int warp_row, warp_column;
};

CQSA_DEVICE void add_up(const gemm_params& p, const gemm_warp& at, bool by_k, int64_t k, const warp_sums& sums, warp_sums& total) {
  const int lane = thread_index() % 32, g = lane / 4, l = lane % 4;
  float of_b[4][2];
#pragma unroll
  for (int n = 0; n < 8; ++n)
    of_b[n / 2][n % 2] = by_k ? scale_at(p.scale_b, at.batch, min_i64(at.column + at.warp_column + 8 * (n / 2) + 2 * l + n % 2, p.n - 1), k) : 1.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float of_a = by_k ? scale_at(p.scale_a, at.batch, min_i64(at.row + at.warp_row + 16 * (i / 2) + g + 8 * (i % 2), p.m - 1), k) : 1.0f;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float& to = total.x[i / 2][n / 2][2 * (i % 2) + n % 2];
      to = fma_f32(sums.x[i / 2][n / 2][2 * (i % 2) + n % 2], of_a * of_b[n / 2][n % 2], to);
    }
  }
}

CQSA_DEVICE void run_tile(const gemm_params& p, const gemm_warp& at, bool by_k, warp_sums& total) {
  unsigned char *const a = shared_memory(), *const b = a + gemm_tile::rows * gemm_tile::pitch;
  warp_sums sums;
  code_rows next_a, next_b;
  clear(sums), clear(total);
  load_rows(p, p.a, at.batch, at.row, p.m, 0, next_a), load_rows(p, p.b, at.batch, at.column, p.n, 0, next_b);
#pragma unroll 1
  for (int64_t k = 0; k < p.k; k += gemm_tile::depth) {
    if (!CQSA_MUTANT(2)) barrier();
    store_rows(a, p.a.kind, next_a), store_rows(b, p.b.kind, next_b);
    barrier();
    const int64_t next = k + gemm_tile::depth;
    load_rows(p, p.a, at.batch, at.row, p.m, next, next_a), load_rows(p, p.b, at.batch, at.column, p.n, next, next_b);
#pragma unroll 1
    for (int i = 0; i < gemm_tile::depth; i += 16) multiply_16(a + at.warp_row * gemm_tile::pitch, b + at.warp_column * gemm_tile::pitch, i, sums);
    if (next % (CQSA_MUTANT(1) ? 2 * gemm_promote : gemm_promote) != 0 && next < p.k) continue;
    add_up(p, at, by_k, k, sums, total);
    clear(sums);
  }
}

// ------------------------------------------------------------------------------------------------------------------- end

// Registers have no index: one piece of code for each row of fragments.
template <int I = 0> CQSA_DEVICE void stage_row(float* staging, const warp_sums& total, int wanted) {
  if (wanted == I) {
#pragma unroll
    for (int f = 0; f < 4; ++f) stage_fragment(staging, f, total.x[I][f][0], total.x[I][f][1], total.x[I][f][2], total.x[I][f][3]);
  }
  if constexpr (I + 1 < 4) stage_row<I + 1>(staging, total, wanted);
}

CQSA_DEVICE uint32_t end_tile(const gemm_params& p, const gemm_warp& at, bool by_k, const warp_sums& total) {
  const int lane = thread_index() % 32;
  float* const staging = reinterpret_cast<float*>(shared_memory() + thread_index() / 32 * gemm_staging_bytes);
  const float d_scale = scale_of_codes(p.end);
  const int64_t column = at.column + at.warp_column + 8 * (lane % 4);
  column_run run;
  load_run(p, !by_k, at.batch, column, run);
  uint32_t largest = 0;
  barrier();  // the last products are done
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    lanes_barrier<32>();
    stage_row(staging, total, i);
    lanes_barrier<32>();
    const uint32_t of_part = end_part(p, !by_k, at.batch, staging, at.row + at.warp_row + 16 * i, run, column, d_scale);
    if (of_part > largest) largest = of_part;
  }
  return largest;
}

CQSA_DEVICE void gemm_block(const gemm_params& p) {
  const int warp = thread_index() / 32;
  const bool by_k = (p.scale_a.data && p.scale_a.stride[2] != 0) || (p.scale_b.data && p.scale_b.stride[2] != 0);
  const int64_t tiles = p.row_tiles * p.column_tiles;
  uint32_t largest = 0;
  for (int64_t unit = block_index_x(); unit < p.batch * tiles; unit += grid_size_x()) {
    const int64_t rest = unit % tiles;
    const gemm_warp at{unit / tiles, rest % p.row_tiles * gemm_tile::rows, rest / p.row_tiles * gemm_tile::columns, warp / 4 * 64, warp % 4 * 32};
    warp_sums total;
    run_tile(p, at, by_k, total);
    const uint32_t of_tile = end_tile(p, at, by_k, total);
    if (of_tile > largest) largest = of_tile;
  }
  if (p.end.d_amax) tell_warp(p.end, largest, uint32_t(grid_size_x()) * (gemm_tile::threads / 32));
}

}  // namespace cqsa::gpu::sm80
