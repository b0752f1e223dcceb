// SPDX-License-Identifier: Apache-2.0
// The usual end of a tile of the Hopper FP8 product: rows of f32, f16 or bf16, no c, no d_amax. The general end (fp8_gemm_epilogue.cuh) asks of
// every number what there is to do with it, and took a fifth of a tile with k 8192. Here factors have come before the products, and a warp
// writes 128 bytes of a row at a time.
#pragma once

#include "backends/cuda/sm80/fp8_gemm_run.cuh"
#include "fp8_gemm_mainloop.cuh"

namespace cqsa::gpu::sm90 {

CQSA_DEVICE bool ends_directly(const gemm_end& e) { return !e.c.data && !e.d_amax && e.d.wide && e.d.kind <= gemm_bf16; }

template <gemm_form Form> constexpr bool scaled_at_end = Form == gemm_form::fast || Form == gemm_form::plain;

// Scales of this thread's rows; scale and bias of those columns that it tells its warpgroup.
template <class S> struct tile_factors {
  static constexpr int each = (S::columns + 127) / 128;
  float row[S::waves][2], column[each], bias[each];
};
// The scale of a row where it does not go by k; a division only for those of blocks of rows.
CQSA_DEVICE float end_scale(const gemm_scales& s, int64_t batch, int64_t row) {
  if (!s.data) return 1.0f;
  return *(s.rows == 1 || s.stride[1] == 0 ? s.data + batch * s.stride[0] + row * s.stride[1] : scale_row(s, batch, row));
}
// Asked for before the products, used after them: nobody waits for memory then.
template <class S, gemm_form Form> CQSA_DEVICE void fetch_factors(const gemm_launch& p, const tile_place& at, int group, tile_factors<S>& f) {
  const int thread = thread_index() % 128, lane = thread % 32, warp = thread / 32;
#pragma unroll
  for (int j = 0; j < f.each; ++j) {
    const int64_t column = min_i64(at.column + thread + 128 * j, p.g.n - 1);
    f.column[j] = scaled_at_end<Form> ? end_scale(p.g.scale_b, at.batch, column) : 1.0f;
    f.bias[j] = p.g.end.bias ? load_element(p.g.end.bias, p.g.end.bias_kind, column * p.g.end.bias_stride) : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < 2 * S::waves; ++i) {
    const int64_t row = min_i64(at.row + (group * S::waves + i / 2) * 64 + 16 * warp + lane / 4 + 8 * (i % 2), p.g.m - 1);
    f.row[i / 2][i % 2] = scaled_at_end<Form> ? end_scale(p.g.scale_a, at.batch, row) : 1.0f;
  }
}

// Factors of columns to shared memory, for all of the warpgroup.
template <class S> CQSA_DEVICE void tell_factors(const gemm_launch& p, float* to, int group, const tile_factors<S>& f) {
  const int thread = thread_index() % 128;
  meet(3 + group, 128);  // all are through with those of the tile before
#pragma unroll
  for (int j = 0; j < f.each; ++j)
    if (thread + 128 * j < S::columns) *reinterpret_cast<float2x*>(to + 2 * (thread + 128 * j)) = {{p.g.end.alpha * f.column[j], f.bias[j]}};
  meet(3 + group, 128);
}

constexpr int direct_pitch = 36;  // words from row to row of a warp's 16 rows of 128 bytes
static_assert(16 * direct_pitch * 4 == gemm_large::staging_each, "");

// Two neighbours of a row to its staged part.
CQSA_DEVICE void stage_pair(uint32_t* row, int pair, int32_t kind, float x, float y) {
  if (kind == gemm_f32) *reinterpret_cast<float2x*>(row + 2 * pair) = {{x, y}};
  else row[pair] = kind == gemm_f16 ? pack_f16(x, y) : pack_bf16(x, y);
}

// Columns `Width` * part .. of one wave. c is as wgmma.cuh has it.
template <class S, gemm_form Form, int Width>
CQSA_DEVICE void stage_wave(uint32_t* staging, int32_t kind, const float* factors, const float (&rows)[2], int part, const float (&c)[S::columns / 2]) {
  const int lane = thread_index() % 32, g = lane / 4, l = lane % 4;
#pragma unroll
  for (int f = 0; f < Width / 8; ++f) {
    const float4x column = *reinterpret_cast<const float4x*>(factors + 2 * (Width * part + 8 * f + 2 * l));  // factor and bias of two
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float value[2];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        value[i] = fma_f32(c[4 * (Width / 8 * part + f) + 2 * h + i], scaled_at_end<Form> ? rows[h] * column.x[2 * i] : column.x[2 * i], column.x[2 * i + 1]);
      stage_pair(staging + (g + 8 * h) * direct_pitch, 4 * f + l, kind, value[0], value[1]);
    }
  }
}

// 16 bytes of a row, or as many elements of them as d has.
template <int Size> CQSA_DEVICE void store_piece(char* to, const uint32_t* piece, int64_t left) {
  if (left >= 16 / Size) {
    *reinterpret_cast<word4x*>(to) = *reinterpret_cast<const word4x*>(piece);
    return;
  }
#pragma unroll 1
  for (int i = 0; i < int(left) * Size / 2; ++i) *reinterpret_cast<uint16_t*>(to + 2 * i) = reinterpret_cast<const uint16_t*>(piece)[i];
}

// Up to 16 staged rows of a warp to d, eight lanes for each. `to` and `left`: where this lane's first piece goes, and how many elements d has from
// there on.
template <int Size> CQSA_DEVICE void store_staged(const uint32_t* staging, char* to, int64_t four_rows, int32_t rows, int64_t left) {
  const int lane = thread_index() % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i, to += four_rows)
    if (lane / 8 + 4 * i < rows && left > 0) store_piece<Size>(to, staging + (lane / 8 + 4 * i) * direct_pitch + 4 * (lane % 8), left);
}

template <class S, gemm_form Form, int Size>
CQSA_DEVICE void store_tile(const gemm_launch& p, const gemm_memory<S>& mem, const tile_place& at, int group, const tile_sums<S>& total,
                            const tile_factors<S>& f) {
  constexpr int width = 128 / Size;
  const int lane = thread_index() % 32, warp = thread_index() / 32 % 4;
  const gemm_matrix& d = p.g.end.d;
  const int32_t kind = Size == 4 ? gemm_f32 : d.kind == gemm_f16 ? gemm_f16 : gemm_bf16;
  uint32_t* const staging = reinterpret_cast<uint32_t*>(mem.staging(4 * group + warp));
  const int64_t column = at.column + lane % 8 * (16 / Size), row_bytes = Size * d.stride[1];
#pragma unroll
  for (int w = 0; w < S::waves; ++w) {
    const int64_t row = at.row + (group * S::waves + w) * 64 + 16 * warp;
    char* const to = d.data + Size * (at.batch * d.stride[0] + column) + (row + lane / 8) * row_bytes;
#pragma unroll
    for (int part = 0; part < S::columns / width; ++part) {
      lanes_barrier<32>();  // the part before has been read
      stage_wave<S, Form, width>(staging, kind, mem.factors(group), f.row[w], part, total.x[w]);
      lanes_barrier<32>();
      store_staged<Size>(staging, to + 128 * part, 4 * row_bytes, int32_t(p.g.m - row), p.g.n - column - width * part);
    }
  }
}

template <class S, gemm_form Form>
CQSA_DEVICE void end_directly(const gemm_launch& p, const gemm_memory<S>& mem, const tile_place& at, int group, const tile_sums<S>& total,
                              const tile_factors<S>& f) {
  tell_factors<S>(p, mem.factors(group), group, f);
  if (p.g.end.d.kind == gemm_f32) store_tile<S, Form, 4>(p, mem, at, group, total, f);
  else store_tile<S, Form, 2>(p, mem, at, group, total, f);
}

}  // namespace cqsa::gpu::sm90
