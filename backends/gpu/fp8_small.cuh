// SPDX-License-Identifier: Apache-2.0
// The small operations of section 13 of cqsa.h: rings, scales, codes back to numbers, transposed bytes, workspaces.
#pragma once

#include "backends/cqsa_backend.h"
#include "fp8_tile.cuh"

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
  const uint32_t most = ring_most<Lanes>(r.state, r.hist_len);
  lanes_barrier<Lanes>();  // all have read what was there
  if (thread_index() % Lanes != 0) return;
  if (p.amaxes || amax != 0) ring_take(r.state, amax, most);
  s.staged = 0;
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

// n codes of a row, one at a time.
CQSA_DEVICE void dequantize_run(const fp8_dequantize_params& p, int64_t i, int64_t j, int64_t n, int64_t r) {
  const int64_t from = place_in(p.codes, p.batch, p.rows, i, j), to = place_in(p.out, p.batch, p.rows, i, j);
  int64_t column = -1;
  float scale = 1;
#pragma unroll 1
  for (int64_t k = 0; k < n; ++k) {
    const int64_t c = (j + k) / p.block[1];
    if (p.scale_inv.data && c != column) scale = load_scale(p.scale_inv, r, c, p.grid_columns), column = c;
    const uint32_t code = reinterpret_cast<const unsigned char*>(p.codes.data)[from + k * p.codes.stride[2]];
    store_element(p.out.data, p.out.kind, to + k * p.out.stride[2], plain_nan(product_f32(code_to_f32(code, p.codes.kind), scale)));
  }
}

// Whether one of four codes is not a finite number.
CQSA_DEVICE bool is_strange(uint32_t codes, bool wide) { return (((codes & 0x7f7f7f7fu) + (wide ? 0x04040404u : 0x01010101u)) & 0x80808080u) != 0; }
// Finite codes times a finite scale.
CQSA_DEVICE float decode_finite(uint32_t codes, int k, bool wide, float scale) {
  const uint32_t top = codes << (24 - 8 * k), mag = wide ? top >> 3 & 0x0fe00000u : top >> 4 & 0x07f00000u;
  return product_f32(float_of((top & 0x80000000u) | mag) * (wide ? 0x1p112f : 0x1p120f), scale);
}
// f32_to_bf16() of two, neither of them NaN.
CQSA_DEVICE uint32_t plain_bf16(float low, float high) {
  const uint32_t a = bits_of(low), b = bits_of(high);
  return pick_bytes(a + 0x7fffu + (a >> 16 & 1u), b + 0x7fffu + (b >> 16 & 1u), 0x7632u);
}
CQSA_DEVICE void decode_eight(const word2x& codes, bool wide, float scale, int kind, char* to) {
  float y[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) y[k] = decode_finite(codes.x[k / 4], k & 3, wide, scale);
  word4x out[2];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (kind == kind_f32) out[0].x[k] = bits_of(y[k]), out[1].x[k] = bits_of(y[k + 4]);
    else if (kind == kind_bf16) out[0].x[k] = plain_bf16(y[2 * k], y[2 * k + 1]);
    else out[0].x[k] = f32_to_f16(y[2 * k]) | uint32_t(f32_to_f16(y[2 * k + 1])) << 16;
  }
  *reinterpret_cast<word4x*>(to) = out[0];
  if (kind == kind_f32) *reinterpret_cast<word4x*>(to + 16) = out[1];
}

// Where codes and what they become are one row each and eight have one scale: four times eight codes a thread.
constexpr int decode_each = 4;
struct decode_walk {
  uint32_t wide, high, across;  // vectors of a row; rows and vectors of a scale
  bool one;
  float only;
};
CQSA_DEVICE decode_walk decode_walk_of(const fp8_dequantize_params& p) {
  const uint32_t wide = uint32_t(p.columns / 8), rows = uint32_t(p.batch * p.rows);
  const uint32_t high = p.block[0] < rows ? uint32_t(p.block[0]) : rows, across = uint32_t((p.block[1] < p.columns ? p.block[1] : p.columns) / 8);
  const bool one = !p.scale_inv.data || (high == rows && across == wide);
  return {wide, high, across, one, one && p.scale_inv.data ? load_scale(p.scale_inv, 0, 0, 1) : 1.0f};
}
CQSA_DEVICE void dequantize_plain(const fp8_dequantize_params& p) {
  const decode_walk w = decode_walk_of(p);
  const uint32_t threads = uint32_t(block_threads()) * uint32_t(grid_size_x()), vectors = uint32_t(p.batch * p.rows) * w.wide;
  const bool wide = p.codes.kind == kind_e5m2;
#pragma unroll 1
  for (uint32_t v = uint32_t(block_index_x()) * uint32_t(block_threads()) + uint32_t(thread_index()); v < vectors; v += decode_each * threads) {
    word2x codes[decode_each];
    float scale[decode_each];
    uint32_t again = 0;
#pragma unroll
    for (int u = 0; u < decode_each; ++u) {
      const uint32_t at = v + u * threads;
      codes[u] = *reinterpret_cast<const word2x*>(p.codes.data + int64_t(at < vectors ? at : vectors - 1) * 8);
    }
#pragma unroll
    for (int u = 0; u < decode_each; ++u) {
      const uint32_t at = v + u * threads < vectors ? v + u * threads : vectors - 1, row = w.one ? 0 : at / w.wide;
      scale[u] = w.one ? w.only : load_scale(p.scale_inv, row / w.high, (at - row * w.wide) / w.across, p.grid_columns);
    }
#pragma unroll
    for (int u = 0; u < decode_each; ++u) {
      const uint32_t at = v + u * threads;
      if (at >= vectors) continue;
      again |= uint32_t(is_strange(codes[u].x[0], wide) || is_strange(codes[u].x[1], wide) || (bits_of(scale[u]) & inf_bits) == inf_bits) << u;
      decode_eight(codes[u], wide, scale[u], p.out.kind, p.out.data + int64_t(at) * (p.out.kind == kind_f32 ? 32 : 16));
    }
#pragma unroll 1
    for (uint32_t u = 0; again; ++u, again >>= 1) {
      const uint32_t row = (v + u * threads) / w.wide;
      if (again & 1) dequantize_run(p, row, int64_t(v + u * threads - row * w.wide) * 8, 8, row / w.high);
    }
  }
}

CQSA_DEVICE void fp8_dequantize_block(const fp8_dequantize_params& p) {
  if (p.plain) return dequantize_plain(p);
  const int64_t all = p.batch * p.rows;
  const int64_t rows = p.groups ? group_begin(p.groups, p.groups_bytes, p.groups_stride, p.num_groups, all) : all;
#pragma unroll 1
  for (int64_t v = block_index_x() * block_threads() + thread_index(); v < rows * p.chunks; v += grid_size_x() * block_threads()) {
    const int64_t i = v / p.chunks, j = (v - i * p.chunks) * 8;
    const int64_t r = p.per_group ? group_of(p.groups, p.groups_bytes, p.groups_stride, p.num_groups, i, all) : i / p.block[0];
    dequantize_run(p, i, j, min_i64(p.columns - j, 8), r);
  }
}

// ---- bytes, transposed ------------------------------------------------------------------------------------------------------

constexpr int transpose_tile = 64, transpose_row = transpose_tile + 4;

// Where sixteen bytes are whole and aligned both ways: tiles of 128 x 128, eight by eight bytes a thread, turned as fp8_tile.cuh does it. The
// next tile is on its way meanwhile.
CQSA_DEVICE void load_bytes(const fp8_transpose_params& p, const tile_place& at, square_codes& c) {
  const char* const from = p.x + at.row() * p.x_stride[0] + at.column();
  const bool there = at.row() < p.rows && at.column() < p.columns;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    c.row[i] = {{0, 0}};
    if (there) c.row[i] = *reinterpret_cast<const word_pair*>(from + i * p.x_stride[0]);
  }
}
CQSA_DEVICE void transpose_plain(const fp8_transpose_params& p) {
  word_pair* const turned = reinterpret_cast<word_pair*>(shared_memory());
  const uint32_t wide = tiles_along(p.columns), tiles = wide * tiles_along(p.rows);
  tile_place at{}, before{};
#pragma unroll 1
  for (uint32_t unit = uint32_t(block_index_x()), begun = 0;; unit += uint32_t(grid_size_x()), begun = 1) {
    square_codes c;
    before = at;
    if (unit < tiles) at = {int32_t(unit / wide), int32_t(unit % wide)}, load_bytes(p, at, c);
    if (begun) {
      barrier();
      store_turned(p.out, p.out_stride[1], true, int64_t(before.tile_row) * fp8_tile_size, int64_t(before.tile_column) * fp8_tile_size, p.rows, p.columns, turned);
      barrier();
    }
    if (unit >= tiles) return;
    put_turned(c, turned);
  }
}

// Tiles of 64 x 64 bytes; a row of the tile in shared memory is 17 words, so that neither side meets itself in a bank.
CQSA_DEVICE void fp8_transpose_block(const fp8_transpose_params& p) {
  if (p.plain) return transpose_plain(p);
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
