// SPDX-License-Identifier: Apache-2.0
// Tiles of 64 rows of weights by up to 64 tokens of an expert, on any chip: one launch for all experts. Of gate and up a tile has 32 rows each, so that the
// activation, and the rounding of h to q8, are done where the sums are. A sum goes by k alone, whatever tile a token is in.
#pragma once

#include "moe_decode.cuh"

namespace cqsa::gpu {

constexpr int moe_depth = 64, moe_pitch = moe_tile_rows + 4, moe_h_pitch = 36;

// Shared memory. Numbers: [k][pitch] of weights, then of tokens. Codes: words of four k, [word][pitch], and scales: [pair of pieces][4 numbers][pitch] of
// weights, [piece][3][pitch] of tokens.
constexpr int moe_panel = moe_depth * moe_pitch, moe_code_panel = moe_depth / 4 * moe_pitch;
constexpr int moe_tile_bytes = 4 * 2 * moe_panel;

struct tile_memory {
  float* base;
  CQSA_DEVICE float* panel(int operand) const { return base + operand * moe_panel; }
  CQSA_DEVICE uint32_t* codes(int operand) const { return reinterpret_cast<uint32_t*>(base) + operand * moe_code_panel; }
  CQSA_DEVICE float* scales(int operand) const { return base + 2 * moe_code_panel + operand * 8 * moe_pitch; }  // [piece][number][pitch]
};

struct tile_place {
  moe_tile tile;
  int64_t first;  // row of h or y
  bool codes;     // q8
};

// The row of weights in line r of the tile; data NULL: none.
struct tile_row {
  const char* data;
  int32_t format;
};
CQSA_DEVICE const moe_weights& weights_of_line(const moe_multiply_params& p, int r) { return p.gate_up && r % 2 == 0 ? p.gate : p.up.present ? p.up : p.gate; }
CQSA_DEVICE int64_t row_of_line(const moe_multiply_params& p, int64_t first, int r) {
  if (!p.gate_up) return first + r;
  const int64_t n = first + r / 2;
  return r % 2 == 0 ? moe::gate_row(p.layout, n) : moe::up_row(p.layout, n, p.outputs);
}
CQSA_DEVICE bool line_exists(const moe_multiply_params& p, int64_t first, int r) {
  return p.gate_up ? first + r / 2 < p.outputs && (r % 2 == 1 || p.gate.present) : first + r < p.outputs;
}
CQSA_DEVICE tile_row row_of_weights(const moe_multiply_params& p, const tile_place& at, int r) {
  if (!line_exists(p, at.first, r)) return {nullptr, 0};
  const moe_matrix m = matrix_of(weights_of_line(p, r), at.tile.expert);
  return {m.data + row_of_line(p, at.first, r) * m.row_bytes, m.format};
}

// ---- panels -------------------------------------------------------------------------------------------------------------------

CQSA_DEVICE void put_numbers(float* panel, int line, int k, const float4x& x) {
#pragma unroll
  for (int i = 0; i < 4; ++i) panel[(k + i) * moe_pitch + line] = x.x[i];
}

// 32 elements of a row of weights by one thread.
CQSA_DEVICE void load_weights(const moe_multiply_params& p, const tile_memory& mem, const tile_place& at, const tile_row& row, int line, int part, int64_t k) {
  const int64_t n = p.up.row_elements, piece = k / 32 + part;
  const bool blocks = row.data && !moe::is_plain(row.format);
  quant_codes c;
  clear_codes(&c);
  if (blocks && 32 * piece < n) decode_piece(row.data, row.format, piece, &c);
  if (at.codes) {
#pragma unroll
    for (int i = 0; i < 8; ++i) mem.codes(0)[(8 * part + i) * moe_pitch + line] = c.code[i];
#pragma unroll
    for (int h = 0; h < 2; ++h) mem.scales(0)[(4 * part + h) * moe_pitch + line] = c.scale[h], mem.scales(0)[(4 * part + 2 + h) * moe_pitch + line] = c.least[h];
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const bool plain = row.data && !blocks;
    put_numbers(mem.panel(0), line, 32 * part + 4 * i, plain ? plain_four(row.data, row.format, k + 32 * part + 4 * i, n) : value_of_word(c, i));
  }
}

CQSA_DEVICE void load_codes_of_token(const moe_multiply_params& p, const tile_memory& mem, int64_t row, int line, int part, int64_t k) {
  const int64_t from = row * p.x.padded + k + 32 * part;
  int32_t sum[2] = {0, 0};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    word4x words{};
    if (row >= 0) words = *reinterpret_cast<const word4x*>(p.x.code + from + 16 * h);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mem.codes(1)[(8 * part + 4 * h + i) * moe_pitch + line] = words.x[i];
      sum[h] = dot4(words.x[i], 0x01010101u, sum[h]);
    }
  }
  const float scale = row >= 0 ? p.x.scale[from / 32] : 0.0f;
  mem.scales(1)[4 * part * moe_pitch + line] = scale;
#pragma unroll
  for (int h = 0; h < 2; ++h) mem.scales(1)[(4 * part + 1 + h) * moe_pitch + line] = scale * float(sum[h]);
}
CQSA_DEVICE void load_token(const moe_multiply_params& p, const tile_memory& mem, const tile_place& at, int64_t row, int line, int part, int64_t k) {
  if (at.codes) return load_codes_of_token(p, mem, row, line, part, k);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float4x x{};
    if (row >= 0) x = *reinterpret_cast<const float4x*>(p.x.plain + row * p.x.padded + k + 32 * part + 4 * i);
    put_numbers(mem.panel(1), line, 32 * part + 4 * i, x);
  }
}

// ---- sums ---------------------------------------------------------------------------------------------------------------------

// Lines 4 r .. 4 r + 3, tokens 4 c .. 4 c + 3.
struct tile_sums {
  float x[4][4];
};

CQSA_DEVICE void add_numbers(const tile_memory& mem, int r, int c, tile_sums& sums) {
#pragma unroll 8
  for (int k = 0; k < moe_depth; ++k) {
    const float4x a = *reinterpret_cast<const float4x*>(mem.panel(0) + k * moe_pitch + 4 * r);
    const float4x b = *reinterpret_cast<const float4x*>(mem.panel(1) + k * moe_pitch + 4 * c);
#pragma unroll
    for (int i = 0; i < 16; ++i) sums.x[i / 4][i % 4] = fma_f32(a.x[i / 4], b.x[i % 4], sums.x[i / 4][i % 4]);
  }
}

// 16 of k: one scale of each line, one of each token.
CQSA_DEVICE void add_half(const tile_memory& mem, int r, int c, int part, int h, tile_sums& sums) {
  int32_t dot[4][4] = {};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const word4x a = *reinterpret_cast<const word4x*>(mem.codes(0) + (8 * part + 4 * h + w) * moe_pitch + 4 * r);
    const word4x b = *reinterpret_cast<const word4x*>(mem.codes(1) + (8 * part + 4 * h + w) * moe_pitch + 4 * c);
#pragma unroll
    for (int i = 0; i < 16; ++i) dot[i / 4][i % 4] = dot4(a.x[i / 4], b.x[i % 4], dot[i / 4][i % 4]);
  }
  const float4x scale = *reinterpret_cast<const float4x*>(mem.scales(0) + (4 * part + h) * moe_pitch + 4 * r);
  const float4x least = *reinterpret_cast<const float4x*>(mem.scales(0) + (4 * part + 2 + h) * moe_pitch + 4 * r);
  const float4x of_x = *reinterpret_cast<const float4x*>(mem.scales(1) + 4 * part * moe_pitch + 4 * c);
  const float4x sum_of_x = *reinterpret_cast<const float4x*>(mem.scales(1) + (4 * part + 1 + h) * moe_pitch + 4 * c);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float& to = sums.x[i / 4][i % 4];
    to = fma_f32(float(dot[i / 4][i % 4]), scale.x[i / 4] * of_x.x[i % 4], to);
    to = fma_f32(-least.x[i / 4], sum_of_x.x[i % 4], to);
  }
}
CQSA_DEVICE void add_codes(const tile_memory& mem, int r, int c, tile_sums& sums) {
#pragma unroll 1
  for (int part = 0; part < moe_depth / 32; ++part) {
    add_half(mem, r, c, part, 0, sums);
    add_half(mem, r, c, part, CQSA_MUTANT(71) ? 0 : 1, sums);
  }
}

// Half of the threads take rows of weights apart, the others bring tokens.
CQSA_DEVICE void multiply_tile(const moe_multiply_params& p, const tile_memory& mem, const tile_place& at, tile_sums& sums) {
  const int n = thread_index() % 128, line = n / 2, part = n % 2, r = thread_index() / 16, c = thread_index() % 16;
  const bool of_weights = thread_index() < 128;
  const tile_row row = of_weights ? row_of_weights(p, at, line) : tile_row{nullptr, 0};
  int64_t token = -1;
  if (!of_weights && line < at.tile.count) token = p.gate_up ? slot_at(p.tiles, at.tile.first + line) / p.topk : at.tile.first + line;
#pragma unroll
  for (int i = 0; i < 16; ++i) sums.x[i / 4][i % 4] = 0.0f;
#pragma unroll 1
  for (int64_t k = 0; k < p.up.row_elements; k += moe_depth) {
    if (!CQSA_MUTANT(72)) barrier();
    if (of_weights) load_weights(p, mem, at, row, line, part, k);
    else load_token(p, mem, at, token, line, part, k);
    barrier();
    if (at.codes) add_codes(mem, r, c, sums);
    else add_numbers(mem, r, c, sums);
  }
}

// ---- ends ---------------------------------------------------------------------------------------------------------------------

CQSA_DEVICE float biased(const moe_multiply_params& p, const tile_place& at, int line, float sum) {
  return line_exists(p, at.first, line) ? sum + bias_of(weights_of_line(p, line), at.tile.expert, row_of_line(p, at.first, line)) : 0.0f;
}

// Four lanes have the 32 elements of h of a token, eight each.
template <int Lanes> CQSA_DEVICE void store_h(const moe_multiply_params& p, const tile_place& at, const float* staging) {
  const int token = thread_index() / 4, part = thread_index() % 4;
  const bool codes = p.q8 && !moe::is_plain(format_of(p.down, at.tile.expert));
  float4x x[2];
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    x[i] = *reinterpret_cast<const float4x*>(staging + token * moe_h_pitch + 8 * part + 4 * i);
#pragma unroll
    for (int n = 0; n < 4; ++n) most = larger_bits(most, x[i].x[n]);
  }
#pragma unroll
  for (int mask = 1; mask < 4; mask *= 2) {
    const uint32_t other = shuffle_xor<Lanes>(most, mask);
    most = other > most ? other : most;
  }
  if (token >= at.tile.count) return;
  const int64_t to = (at.tile.first + token) * p.h.padded + at.first + 8 * part;
  const q8_scale s = scale_of_q8(most);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (codes) *reinterpret_cast<uint32_t*>(p.h.code + to + 4 * i) = word_of_q8(x[i], s);
    else *reinterpret_cast<float4x*>(p.h.plain + to + 4 * i) = x[i];
  }
  if (codes && part == 0) p.h.scale[to / 32] = s.scale;
}

template <int Lanes> CQSA_DEVICE void end_gate_up(const moe_multiply_params& p, const tile_memory& mem, const tile_place& at, const tile_sums& sums) {
  const int r = thread_index() / 16, c = thread_index() % 16;
  float* const staging = mem.base;
  barrier();
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float g = biased(p, at, 4 * r + 2 * i, sums.x[2 * i][j]), u = biased(p, at, 4 * r + 2 * i + 1, sums.x[2 * i + 1][j]);
      staging[(4 * c + j) * moe_h_pitch + 2 * r + i] = at.first + 2 * r + i < p.outputs ? activated(p.how, g, u) : 0.0f;
    }
  barrier();
  store_h<Lanes>(p, at, staging);
}

CQSA_DEVICE void end_down(const moe_multiply_params& p, const tile_place& at, const tile_sums& sums) {
  const int r = thread_index() / 16, c = thread_index() % 16;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (4 * c + j >= at.tile.count) continue;
    float4x y;
#pragma unroll
    for (int i = 0; i < 4; ++i) y.x[i] = biased(p, at, 4 * r + i, sums.x[i][j]);
    gpu_view v = view_of_row(p.y);
    if (at.first + 4 * r + 4 > p.outputs) v.quads = 0;
    store_four(v, slot_at(p.tiles, at.tile.first + 4 * c + j) * p.y.stride[0], at.first + 4 * r, p.outputs, y);
  }
}

template <int Lanes> CQSA_DEVICE void tile_block(const moe_multiply_params& p) {
  const tile_memory mem{reinterpret_cast<float*>(shared_memory())};
  const int64_t units = count_of_tiles(p.tiles) * p.row_blocks;
  for (int64_t unit = block_index_x(); unit < units; unit += grid_size_x()) {
    tile_place at{tile_of(p.tiles, unit / p.row_blocks), unit % p.row_blocks * (p.gate_up ? moe_tile_rows / 2 : moe_tile_rows), false};
    // Gate and up of one expert may have different formats, but are both plain, or both of blocks, or else multiplied as numbers.
    const bool plain = moe::is_plain(format_of(p.up.present ? p.up : p.gate, at.tile.expert)) ||
                       (p.gate_up && p.gate.present && moe::is_plain(format_of(p.gate, at.tile.expert)));
    at.codes = p.q8 && !plain;
    tile_sums sums;
    multiply_tile(p, mem, at, sums);
    if (p.gate_up) end_gate_up<Lanes>(p, mem, at, sums);
    else end_down(p, at, sums);
  }
}

}  // namespace cqsa::gpu
