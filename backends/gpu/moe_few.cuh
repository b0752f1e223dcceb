// SPDX-License-Identifier: Apache-2.0
// Few tokens of an expert at a time, up to four, on any chip: every row of weights is read once, by eight lanes, 32 elements each; two rows one after the
// other (gate and up, or two of down). The tokens are in shared memory. A sum goes by k alone.
#pragma once

#include "moe_decode.cuh"

namespace cqsa::gpu {

constexpr int few_lanes = 8;  // of a row

// Shared memory of a unit, for up to `most` tokens of `padded` elements: numbers, or codes and then their scales.
template <bool Q8> struct few_memory {
  unsigned char* base;
  int64_t padded;
  int32_t most;
  CQSA_DEVICE uint32_t* codes(int token) const { return reinterpret_cast<uint32_t*>(base + token * padded); }
  CQSA_DEVICE float* scales(int token) const { return reinterpret_cast<float*>(base + most * padded) + token * (padded / 32); }
  CQSA_DEVICE float* numbers(int token) const { return reinterpret_cast<float*>(base) + token * padded; }
};

struct few_sums {
  float x[2][moe_few_tokens];
};
// Two rows; data NULL: there is none.
struct few_rows {
  const char* data[2];
  int32_t format[2];
};

// ---- tokens -------------------------------------------------------------------------------------------------------------------

template <int Lanes, bool Q8> CQSA_DEVICE void stage_tokens(const moe_multiply_params& p, const few_memory<Q8>& mem, const moe_tile& tile) {
  const int64_t quads = mem.padded / 4, all = tile.count * quads;
  for (int64_t first = 0; first < all; first += block_threads()) {
    const int64_t unit = min_i64(first + thread_index(), all - 1), c = unit % quads * 4;
    const int token = int(unit / quads);
    const int64_t row = p.gate_up ? slot_at(p.tiles, tile.first + token) / p.topk : tile.first + token;
    const float4x x = four_of(p.rows_of_x, row, c, p.up.row_elements);
    if constexpr (Q8) {
      const q8_scale s = scale_of_eight<Lanes>(x);
      if (first + thread_index() >= all) continue;
      mem.codes(token)[c / 4] = word_of_q8(x, s);
      if (c % 32 == 0) mem.scales(token)[c / 32] = s.scale;
    } else {
      *reinterpret_cast<float4x*>(mem.numbers(token) + c) = x;
    }
  }
}

// ---- products -----------------------------------------------------------------------------------------------------------------

CQSA_DEVICE float dot_codes(const few_memory<true>& mem, int token, int64_t piece, const quant_codes& c) {
  const float of_x = mem.scales(token)[piece];
  float sum = 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const word4x w = *reinterpret_cast<const word4x*>(mem.codes(token) + 8 * piece + 4 * h);
    sum = fma_f32(float(dot_four_words(c.code + 4 * h, w.x)), c.scale[h] * of_x, sum);
    const uint32_t ones[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
    // For formats without a minimum the compiler knows that it is 0.
    if (bits_of(c.least[h]) != 0) sum = fma_f32(-c.least[h], of_x * float(dot_four_words(ones, w.x)), sum);
  }
  return sum;
}
CQSA_DEVICE void add_piece(const few_memory<true>& mem, int64_t piece, const quant_codes& c, int count, float (&sums)[moe_few_tokens]) {
#pragma unroll
  for (int m = 0; m < moe_few_tokens; ++m)
    if (m < count) sums[m] += dot_codes(mem, m, piece, c);
}
CQSA_DEVICE void add_four_numbers(const few_memory<false>& mem, int64_t at, const float4x& w, int count, float (&sums)[moe_few_tokens]) {
#pragma unroll
  for (int m = 0; m < moe_few_tokens; ++m) {
    if (m >= count) continue;
    const float4x x = *reinterpret_cast<const float4x*>(mem.numbers(m) + at);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[m] = fma_f32(w.x[i], x.x[i], sums[m]);
  }
}
CQSA_DEVICE void add_piece(const few_memory<false>& mem, int64_t piece, const quant_codes& c, int count, float (&sums)[moe_few_tokens]) {
#pragma unroll
  for (int w = 0; w < 8; ++w) add_four_numbers(mem, 32 * piece + 4 * w, value_of_word(c, w), count, sums);
}

// The pieces of a row that are this lane's. The switch over formats is inside, so that the code of each is there once.
template <bool Q8> CQSA_DEVICE void add_row(const few_memory<Q8>& mem, const char* row, int32_t format, int64_t n, int count, float (&sums)[moe_few_tokens]) {
#pragma unroll 1
  for (int64_t piece = thread_index() % few_lanes; 32 * piece < n; piece += few_lanes) {
    quant_codes c;
    decode_piece(row, format, piece, &c);
    add_piece(mem, piece, c, count, sums);
  }
}
CQSA_DEVICE void add_plain(const few_memory<false>& mem, const char* row, int32_t format, int64_t n, int count, float (&sums)[moe_few_tokens]) {
  for (int64_t c = thread_index() % few_lanes * 4; c < n; c += 4 * few_lanes) add_four_numbers(mem, c, plain_four(row, format, c, n), count, sums);
}
CQSA_DEVICE void add_plain(const few_memory<true>&, const char*, int32_t, int64_t, int, float (&)[moe_few_tokens]) {}  // never there

template <int Lanes, bool Q8>
CQSA_DEVICE void sum_rows(const few_memory<Q8>& mem, const few_rows& rows, int64_t n, int count, few_sums& sums) {
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    float of_row[moe_few_tokens] = {};
    const char* const row = i ? rows.data[1] : rows.data[0];
    const int32_t format = i ? rows.format[1] : rows.format[0];
    if (row && moe::is_plain(format)) add_plain(mem, row, format, n, count, of_row);
    else if (row) add_row(mem, row, format, n, count, of_row);
#pragma unroll
    for (int m = 0; m < moe_few_tokens; ++m) {
      if (m < count) {
#pragma unroll
        for (int mask = 1; mask < few_lanes; mask *= 2) of_row[m] += shuffle_xor<Lanes>(of_row[m], mask);
      }
      (i ? sums.x[1] : sums.x[0])[m] = of_row[m];
    }
  }
}

// How rows are summed up: by format, one after the other.
struct rows_of_any_format {
  template <int Lanes, bool Q8> static CQSA_DEVICE void sum(const few_memory<Q8>& mem, const few_rows& rows, int64_t n, int count, few_sums& sums) {
    sum_rows<Lanes>(mem, rows, n, count, sums);
  }
};

// ---- units --------------------------------------------------------------------------------------------------------------------

// Lane m of a row has the sums of token m.
CQSA_DEVICE float sum_of_token(const float (&x)[moe_few_tokens], int m) {
  float out = x[0];
#pragma unroll
  for (int i = 1; i < moe_few_tokens; ++i)
    if (m == i) out = x[i];
  return out;
}

// Of h or y: rows n, and of y also the one `step` further.
CQSA_DEVICE few_rows rows_of(const moe_multiply_params& p, int64_t expert, int64_t n, int64_t other) {
  const moe_weights& up = p.up.present ? p.up : p.gate;
  const moe_matrix b = matrix_of(up, expert);
  few_rows out{{nullptr, nullptr}, {b.format, b.format}};
  if (!p.gate_up) {
    if (n < p.outputs) out.data[0] = b.data + n * b.row_bytes;
    if (other < p.outputs) out.data[1] = b.data + other * b.row_bytes;
    return out;
  }
  if (n >= p.outputs) return out;
  out.data[1] = b.data + moe::up_row(p.layout, n, p.outputs) * b.row_bytes;
  if (!p.gate.present) return out;
  const moe_matrix a = matrix_of(p.gate, expert);
  out.data[0] = a.data + moe::gate_row(p.layout, n) * a.row_bytes, out.format[0] = a.format;
  return out;
}

CQSA_DEVICE void store_few(const moe_multiply_params& p, const moe_tile& tile, int m, int64_t n, int64_t other, float a, float b) {
  const moe_weights& up = p.up.present ? p.up : p.gate;
  const int64_t place = tile.first + m;
  if (p.gate_up) {
    if (n >= p.outputs) return;
    const float g = p.gate.present ? a + bias_of(p.gate, tile.expert, moe::gate_row(p.layout, n)) : 0.0f;
    const float u = b + bias_of(up, tile.expert, moe::up_row(p.layout, n, p.outputs));
    p.h.plain[place * p.h.padded + n] = activated(p.how, g, u);
    return;
  }
  const int64_t row = slot_at(p.tiles, place) * p.y.stride[0];
  if (n < p.outputs) store_element(p.y.data, kind_f32, row + n * p.y.stride[1], plain_nan(a + bias_of(up, tile.expert, n)));
  if (other < p.outputs) store_element(p.y.data, kind_f32, row + other * p.y.stride[1], plain_nan(b + bias_of(up, tile.expert, other)));
}

// The expert of a tile that is one slot: gate and up look for it, and tell it.
CQSA_DEVICE moe_tile few_tile_of(const moe_multiply_params& p, int64_t n, bool tell) {
  if (!p.find_experts) return tile_of(p.tiles, n);
  const int64_t t = n / p.topk, s = n % p.topk;
  int32_t e = expert_at(p.ids, t, s);
  const bool outside = e == moe::out_of_range, missing = e >= 0 && is_missing(p.lists, e);
  if (missing) e = moe::not_here;
  if (tell && thread_index() == 0) {
    p.tiles.experts[n] = e;
    if (outside || missing) count_skipped(p.ids, missing ? 1 : 0);
  }
  return {e, int32_t(n), 1, 0};
}

template <int Lanes, bool Q8, class Rows> CQSA_DEVICE void few_unit(const moe_multiply_params& p, const few_memory<Q8>& mem, const moe_tile& tile, int64_t first) {
  const int teams = block_threads() / few_lanes, team = thread_index() / few_lanes, lane = thread_index() % few_lanes, rows = p.gate_up ? teams : 2 * teams;
  barrier();
  stage_tokens<Lanes>(p, mem, tile);
  barrier();
#pragma unroll 1
  for (int64_t n = 0; n < p.rows_each; n += rows) {
    few_sums sums;
    Rows::template sum<Lanes>(mem, rows_of(p, tile.expert, first + n + team, first + n + teams + team), p.up.row_elements, tile.count, sums);
    if (lane < tile.count) store_few(p, tile, lane, first + n + team, first + n + teams + team, sum_of_token(sums.x[0], lane), sum_of_token(sums.x[1], lane));
  }
}

template <int Lanes, bool Q8, class Rows = rows_of_any_format> CQSA_DEVICE void few_block(const moe_multiply_params& p) {
  const few_memory<Q8> mem{shared_memory(), (p.up.row_elements + 31) / 32 * 32, p.tiles.most};
  const int64_t units = count_of_tiles(p.tiles) * p.row_blocks;
  for (int64_t unit = block_index_x(); unit < units; unit += grid_size_x()) {
    const moe_tile tile = few_tile_of(p, unit / p.row_blocks, unit % p.row_blocks == 0);
    if (tile.expert >= 0) few_unit<Lanes, Q8, Rows>(p, mem, tile, unit % p.row_blocks * p.rows_each);
  }
}

}  // namespace cqsa::gpu
