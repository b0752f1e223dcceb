// SPDX-License-Identifier: Apache-2.0
// d = a b^T of FP8 codes on any chip, by f32 FMAs: any strides, formats, sizes. A block of 256 threads makes tiles of 64 x 64 sums, 4 x 4 by
// each thread, 32 of k in shared memory at a time. Sums of 128 of k get their scales and are added up in f32.
#pragma once

#include "fp8_gemm_end.cuh"

namespace cqsa::gpu {

constexpr int gemm_tile = 64, gemm_depth = 32, gemm_pitch = gemm_tile + 4;

// Shared memory: what the codes of a and of b mean, then the panels, k by k.
struct gemm_memory {
  float* base;
  CQSA_DEVICE float* table(int operand) const { return base + 256 * operand; }
  CQSA_DEVICE float* panel(int operand) const { return base + 512 + operand * gemm_depth * gemm_pitch; }
};
constexpr int gemm_shared_bytes = 4 * (512 + 2 * gemm_depth * gemm_pitch);

struct gemm_place {
  int64_t batch, row, column;  // the first of the tile
};
CQSA_DEVICE gemm_place place_of(const gemm_params& p, int64_t unit) {
  const int64_t tiles = p.row_tiles * p.column_tiles, rest = unit % tiles;
  return {unit / tiles, rest % p.row_tiles * gemm_tile, rest / p.row_tiles * gemm_tile};
}

CQSA_DEVICE void fill_tables(const gemm_params& p, const gemm_memory& mem) {
  for (int code = thread_index(); code < 256; code += block_threads()) {
    mem.table(0)[code] = decode_fp8(uint32_t(code), p.a.kind);
    mem.table(1)[code] = decode_fp8(uint32_t(code), p.b.kind);
  }
}

// Codes k .. k + 7 of a row as two words; zeros past the end.
struct code_run {
  uint32_t word[2];
};
CQSA_DEVICE code_run load_codes(const gemm_operand& x, int64_t at, int64_t left) {
  code_run out{{0, 0}};
  if (left >= 8 && x.stride[2] == 1) {
    const char* from = reinterpret_cast<const char*>(x.data) + at;
    return {{load_u32(from), load_u32(from + 4)}};
  }
  for (int i = 0; i < 8 && i < left; ++i) out.word[i / 4] |= uint32_t(x.data[at + i * x.stride[2]]) << 8 * (i % 4);
  return out;
}

// 64 rows of 32 codes each: a thread takes 8 neighbours of a row.
CQSA_DEVICE void load_panel(const gemm_params& p, const gemm_operand& x, const gemm_memory& mem, int operand, int64_t batch, int64_t first, int64_t rows,
                            int64_t k) {
  const int row = thread_index() / 4, part = thread_index() % 4 * 8;
  code_run codes{{0, 0}};
  if (first + row < rows) codes = load_codes(x, batch * x.stride[0] + (first + row) * x.stride[1] + (k + part) * x.stride[2], p.k - k - part);
  float* to = mem.panel(operand) + part * gemm_pitch + row;
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i * gemm_pitch] = mem.table(operand)[codes.word[i / 4] >> 8 * (i % 4) & 0xffu];
}

// Rows 4 r .. 4 r + 3 and columns 4 c .. 4 c + 3 of the tile.
struct gemm_sums {
  float x[4][4];
};

CQSA_DEVICE void add_panel(const gemm_memory& mem, int r, int c, gemm_sums& sums) {
#pragma unroll 8
  for (int k = 0; k < gemm_depth; ++k) {
    const float4x a = *reinterpret_cast<const float4x*>(mem.panel(0) + k * gemm_pitch + 4 * r);
    const float4x b = *reinterpret_cast<const float4x*>(mem.panel(1) + k * gemm_pitch + 4 * c);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) sums.x[i][j] = fma_f32(a.x[i], b.x[j], sums.x[i][j]);
  }
}

// Four scales of neighbouring rows; what is outside counts as the last one.
CQSA_DEVICE float4x four_scales(const gemm_scales& s, int64_t batch, int64_t row, int64_t rows, int64_t k) {
  float4x out;
#pragma unroll
  for (int i = 0; i < 4; ++i) out.x[i] = scale_at(s, batch, min_i64(row + i, rows - 1), k);
  return out;
}

// total += sums with the scales of k; sums begin anew.
CQSA_DEVICE void promote(const gemm_params& p, const gemm_place& at, int r, int c, int64_t k, gemm_sums& sums, gemm_sums& total) {
  const float4x a = four_scales(p.scale_a, at.batch, at.row + 4 * r, p.m, k), b = four_scales(p.scale_b, at.batch, at.column + 4 * c, p.n, k);
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      total.x[i][j] = fma_f32(sums.x[i][j], a.x[i] * b.x[j], total.x[i][j]);
      sums.x[i][j] = 0.0f;
    }
}

CQSA_DEVICE uint32_t end_tile(const gemm_params& p, const gemm_place& at, int r, int c, const gemm_sums& total) {
  const float d_scale = scale_of_codes(p.end);
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t row = at.row + 4 * r + i, column = at.column + 4 * c + j;
      if (row >= p.m || column >= p.n) continue;
      const float value = end_value(p.end, at.batch, row, column, total.x[i][j]);
      if (magnitude_bits(value) > largest) largest = magnitude_bits(value);
      store_end(p.end, at.batch, row, column, value, d_scale);
    }
  return largest;
}

CQSA_DEVICE uint32_t run_tile(const gemm_params& p, const gemm_memory& mem, const gemm_place& at) {
  const int r = thread_index() / 16, c = thread_index() % 16;
  gemm_sums sums, total;
#pragma unroll
  for (int i = 0; i < 16; ++i) sums.x[i / 4][i % 4] = total.x[i / 4][i % 4] = 0.0f;
  for (int64_t k = 0; k < p.k; k += gemm_depth) {
    barrier();
    load_panel(p, p.a, mem, 0, at.batch, at.row, p.m, k);
    load_panel(p, p.b, mem, 1, at.batch, at.column, p.n, k);
    barrier();
    add_panel(mem, r, c, sums);
    const int64_t next = k + gemm_depth;
    if (next % gemm_promote == 0 || next >= p.k) promote(p, at, r, c, k, sums, total);
  }
  return end_tile(p, at, r, c, total);
}

// The largest of all threads of the block goes to d_amax.
template <int Lanes> CQSA_DEVICE void tell_block(const gemm_params& p, uint32_t largest) {
#pragma unroll
  for (int mask = Lanes / 2; mask > 0; mask /= 2) {
    const uint32_t other = shuffle_xor<Lanes>(largest, mask);
    if (other > largest) largest = other;
  }
  if (thread_index() % Lanes == 0) tell_amax(p.end, largest, uint32_t(grid_size_x()) * uint32_t(block_threads() / Lanes));
}

template <int Lanes> CQSA_DEVICE void gemm_block(const gemm_params& p) {
  const gemm_memory mem{reinterpret_cast<float*>(shared_memory())};
  fill_tables(p, mem);
  uint32_t largest = 0;
  for (int64_t unit = block_index_x(); unit < p.batch * p.row_tiles * p.column_tiles; unit += grid_size_x()) {
    const uint32_t of_tile = run_tile(p, mem, place_of(p, unit));
    if (of_tile > largest) largest = of_tile;
  }
  if (p.end.d_amax) tell_block<Lanes>(p, largest);
}

}  // namespace cqsa::gpu
