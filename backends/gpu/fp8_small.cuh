// SPDX-License-Identifier: Apache-2.0
// The small operations of section 13 of cqsa.h: rings, scales, codes back to numbers, transposed bytes, workspaces.
#pragma once

#include "backends/cqsa_backend.h"
#include "fp8_head.cuh"

namespace cqsa::gpu {

// ---- rings ------------------------------------------------------------------------------------------------------------------

template <int Lanes> CQSA_DEVICE void ring_begin(const fp8_ring_place& r, float amax) {
  fp8::ring_state& s = *reinterpret_cast<fp8::ring_state*>(r.state);
  float* const history = reinterpret_cast<float*>(r.state + sizeof(fp8::ring_state));
  const int lane = thread_index() % Lanes;
  for (int i = lane; i < r.hist_len; i += Lanes) history[i] = 0;
  if (lane != 0) return;
  const fp8::scale_pair pair = fp8::scale_of(amax, {r.format, r.margin, r.pow2, 0.0f, 0.0f});
  s = fp8::ring_state{fp8::ring_magic, fp8::ring_version, r.hist_len, r.format, r.margin, r.algorithm, r.pow2, 0, 0, 0.0f, pair.scale, pair.scale_inv, {}};
}

template <int Lanes> CQSA_DEVICE void ring_fold(const fp8_rings_params& p, const fp8_ring_place& r, int64_t n) {
  fp8::ring_state& s = *reinterpret_cast<fp8::ring_state*>(r.state);
  const float amax = p.amaxes ? float_of(load_u32(reinterpret_cast<const char*>(p.amaxes + n * p.amaxes_stride))) : s.staged;
  if (p.amaxes || amax != 0) ring_take<Lanes>(r.state, amax);
  lanes_barrier<Lanes>();  // all have read what was staged
  if (thread_index() % Lanes == 0) s.staged = 0;
}

// A ring for every team of lanes.
template <int Lanes> CQSA_DEVICE void fp8_rings_block(const fp8_rings_params& p) {
  const int64_t n = block_index_x() * (block_threads() / Lanes) + thread_index() / Lanes;
  if (n >= p.count) return;
  const fp8_ring_place& r = p.rings[n];
  if (p.what == CQSA_FP8_RINGS_INIT) return ring_begin<Lanes>(r, p.amax);
  const bool sound = ring_is_sound(r);
  if (p.what == CQSA_FP8_RINGS_FOLD) {
    if (sound) ring_fold<Lanes>(p, r, n);
    return;
  }
  const float staged = sound ? reinterpret_cast<const fp8::ring_state*>(r.state)->staged : 0.0f;
  if (thread_index() % Lanes == 0) store_u32(reinterpret_cast<char*>(p.amaxes + n * p.amaxes_stride), bits_of(staged));
}

// ---- scales -----------------------------------------------------------------------------------------------------------------

CQSA_DEVICE void fp8_scale_block(const fp8_scale_params& p) {
  const int64_t first = block_index_x() * block_threads() + thread_index(), step = grid_size_x() * block_threads();
  const fp8::scale_rule rule{p.format, p.margin, p.pow2, p.eps, p.amax_limit};
  for (int64_t i = first; i < p.rows * p.columns; i += step) {
    const int64_t r = i / p.columns, c = i - r * p.columns;
    fp8::scale_pair pair{1.0f, 0.0f, 0};
    if (p.amax.data) pair = fp8::scale_of(load_scale(p.amax, r, c, p.columns), rule);
    else pair.scale_inv = load_scale(p.scale_inv_in, r, c, p.columns);
    store_scale(p.scale, r, c, p.columns, pair.scale), store_scale(p.scale_inv, r, c, p.columns, pair.scale_inv);
  }
  clear_padding(p.scale_inv, p.rows, p.columns, first, step);
}

// ---- codes to numbers -------------------------------------------------------------------------------------------------------

CQSA_DEVICE uint32_t half_of(float x, int kind) { return kind == kind_f16 ? f32_to_f16(x) : f32_to_bf16(x); }

CQSA_DEVICE void dequantize_some(const fp8_dequantize_params& p, int64_t i, int64_t j, int64_t n, int64_t r) {
  const int64_t from = place_in(p.codes, p.batch, p.rows, i, j), to = place_in(p.out, p.batch, p.rows, i, j);
  float y[8];
  uint64_t bytes = 0;
  const bool wide = n == 8 && p.codes.aligned;
  if (wide) {
    const word2x w = *reinterpret_cast<const word2x*>(p.codes.data + from);
    bytes = uint64_t(w.x[1]) << 32 | w.x[0];
  }
  int64_t column = -1;
  float scale = 1;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    y[k] = 0;
    if (k >= n) continue;
    const int64_t c = (j + k) / p.block[1];
    if (p.scale_inv.data && c != column) scale = load_scale(p.scale_inv, r, c, p.grid_columns), column = c;
    const uint32_t code = wide ? uint32_t(bytes >> 8 * k) & 0xffu : reinterpret_cast<const unsigned char*>(p.codes.data)[from + k * p.codes.stride[2]];
    y[k] = plain_nan(product_f32(code_to_f32(code, p.codes.kind), scale));
  }
  if (n == 8 && p.out.aligned) {
    word4x out[2];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (p.out.kind == kind_f32) out[0].x[k] = bits_of(y[k]), out[1].x[k] = bits_of(y[k + 4]);
      else out[0].x[k] = half_of(y[2 * k], p.out.kind) | half_of(y[2 * k + 1], p.out.kind) << 16, out[1].x[k] = 0;
    }
    char* const at = p.out.data + to * (p.out.kind == kind_f32 ? 4 : 2);
    *reinterpret_cast<word4x*>(at) = out[0];
    if (p.out.kind == kind_f32) *reinterpret_cast<word4x*>(at + 16) = out[1];
    return;
  }
#pragma unroll
  for (int k = 0; k < 8; ++k)
    if (k < n) store_element(p.out.data, p.out.kind, to + k * p.out.stride[2], y[k]);
}

CQSA_DEVICE void fp8_dequantize_block(const fp8_dequantize_params& p) {
  const int64_t all = p.batch * p.rows;
  const int64_t rows = p.groups ? group_begin(p.groups, p.groups_bytes, p.groups_stride, p.num_groups, all) : all;
  for (int64_t v = block_index_x() * block_threads() + thread_index(); v < rows * p.chunks; v += grid_size_x() * block_threads()) {
    const int64_t i = v / p.chunks, j = (v - i * p.chunks) * 8;
    const int64_t r = p.per_group ? group_of(p.groups, p.groups_bytes, p.groups_stride, p.num_groups, i, all) : i / p.block[0];
    dequantize_some(p, i, j, min_i64(p.columns - j, 8), r);
  }
}

// ---- bytes, transposed ------------------------------------------------------------------------------------------------------

constexpr int transpose_tile = 64, transpose_row = transpose_tile + 4;

// Tiles of 64 x 64 bytes; a row of the tile in shared memory is 17 words, so that neither side meets itself in a bank.
CQSA_DEVICE void fp8_transpose_block(const fp8_transpose_params& p) {
  char* const tile = reinterpret_cast<char*>(shared_memory());
  const int64_t high = (p.rows + transpose_tile - 1) / transpose_tile, wide = (p.columns + transpose_tile - 1) / transpose_tile;
  for (int64_t unit = block_index_x(); unit < high * wide; unit += grid_size_x()) {
    const int64_t i0 = unit / wide * transpose_tile, j0 = unit % wide * transpose_tile;
    for (int n = thread_index(); n < transpose_tile * transpose_tile / 4; n += block_threads()) {
      const int row = n / 16, column = n % 16 * 4;
      const char* const from = p.x + (i0 + row) * p.x_stride[0] + (j0 + column) * p.x_stride[1];
      uint32_t* const to = reinterpret_cast<uint32_t*>(tile + row * transpose_row + column);
      if (i0 + row >= p.rows) continue;
      if (p.aligned_in && j0 + column + 4 <= p.columns) *to = *reinterpret_cast<const uint32_t*>(from);
      else
        for (int k = 0; k < 4 && j0 + column + k < p.columns; ++k) tile[row * transpose_row + column + k] = from[k * p.x_stride[1]];
    }
    barrier();
    for (int n = thread_index(); n < transpose_tile * transpose_tile / 4; n += block_threads()) {
      const int column = n / 16, row = n % 16 * 4;
      if (j0 + column >= p.columns) continue;
      char* const to = p.out + (i0 + row) * p.out_stride[0] + (j0 + column) * p.out_stride[1];
      uint32_t word = 0;
      for (int k = 0; k < 4; ++k) word |= uint32_t(static_cast<unsigned char>(tile[(row + k) * transpose_row + column])) << 8 * k;
      if (p.aligned_out && i0 + row + 4 <= p.rows) *reinterpret_cast<uint32_t*>(to) = word;
      else
        for (int k = 0; k < 4 && i0 + row + k < p.rows; ++k) to[k * p.out_stride[0]] = char(word >> 8 * k);
    }
    barrier();
  }
}

// ---- workspaces -------------------------------------------------------------------------------------------------------------

CQSA_DEVICE void fp8_init_block(const fp8_init_params& p) {
  fp8::workspace_header header{};
  header.magic = fp8::workspace_magic, header.version = 1, header.bytes = p.bytes;
  const uint64_t words = p.bytes / 4;
  uint32_t* const to = reinterpret_cast<uint32_t*>(p.workspace);
  for (uint64_t i = uint64_t(block_index_x()) * uint64_t(block_threads()) + uint64_t(thread_index()) + sizeof header / 4; i < words;
       i += uint64_t(grid_size_x()) * uint64_t(block_threads()))
    to[i] = 0;
  if (block_index_x() == 0 && thread_index() == 0) {
    *reinterpret_cast<fp8::workspace_header*>(p.workspace) = header;
    for (uint64_t i = words * 4; i < p.bytes; ++i) p.workspace[i] = 0;
  }
}

}  // namespace cqsa::gpu
