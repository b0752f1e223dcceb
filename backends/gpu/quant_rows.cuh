// SPDX-License-Identifier: Apache-2.0
// Rows of quantized matrices to f32, f16 and bf16. A lane takes 32 elements, so that it has few loads and one scale or two, and leaves them as codes
// in shared memory; then the team of lanes writes all of them in order, four neighbours a lane.
#pragma once

#include "quad.cuh"
#include "quant_params.h"
#include "quant_words.cuh"

namespace cqsa::gpu {

// Row of the matrix that becomes row n, or -1: nobody has looked at the numbers.
CQSA_DEVICE int64_t wanted_row(const quant_rows_params& p, int64_t n) {
  if (!p.row_ids) return p.first_row + n;
  const int64_t row = load_index(p.row_ids, p.row_ids_bytes, n * p.row_ids_stride);
  return row >= 0 && row < p.rows ? row : CQSA_MUTANT(62) ? 0 : -1;
}

// Row and piece of unit `first + lane`; the division of 64 bits is the same for all lanes.
template <int Lanes> CQSA_DEVICE void place_unit(int64_t first, int lane, int64_t pieces, int64_t* row, int64_t* piece) {
  *row = first / pieces, *piece = first - *row * pieces + lane;
  if (*piece < pieces) return;
  const int more = pieces >= Lanes ? 1 : int(*piece) / int(pieces);
  *row += more, *piece -= more * pieces;
}

template <int Lanes> struct quant_team {
  uint32_t* codes;  // [lane][word], the halves of every other four lanes the other way round: no two lanes meet in a bank
  float* numbers;   // [lane]: scales, minima
  int64_t* places;  // [lane]: first element in out, -1: none
  int lane;
};
template <int Lanes> CQSA_DEVICE quant_team<Lanes> make_team() {
  char* const mine = reinterpret_cast<char*>(shared_memory()) + thread_index() / Lanes * (Lanes * quant_lane_bytes);
  char* const numbers = mine + Lanes * quant_codes_bytes;
  char* const places = numbers + Lanes * quant_numbers_bytes;
  return {reinterpret_cast<uint32_t*>(mine), reinterpret_cast<float*>(numbers), reinterpret_cast<int64_t*>(places), thread_index() % Lanes};
}

template <int Lanes> CQSA_DEVICE void put_codes(const quant_team<Lanes>& t, const quant_codes& c) {
  const int turned = CQSA_MUTANT(61) ? 0 : t.lane & 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    word4x half;
#pragma unroll
    for (int i = 0; i < 4; ++i) half.x[i] = c.code[4 * h + i];
    *reinterpret_cast<word4x*>(t.codes + t.lane * 8 + ((4 * h) ^ turned)) = half;
  }
  *reinterpret_cast<float4x*>(t.numbers + t.lane * 4) = {{c.scale[0], c.scale[1], c.least[0], c.least[1]}};
}

CQSA_DEVICE bool is_finite(float x) { return (bits_of(x) & infinite_bits) != infinite_bits; }

template <int Lanes> CQSA_DEVICE float4x values_at(const quant_team<Lanes>& t, int from, int word) {
  const uint32_t codes = t.codes[from * 8 + (word ^ (from & 4))];
  const float scale = t.numbers[from * 4 + word / 4], least = t.numbers[from * 4 + 2 + word / 4];
  float4x out;
#pragma unroll
  for (int i = 0; i < 4; ++i) out.x[i] = value_of(scale, code_at(codes, i), least);
  return out;
}

// Pairs of values to words, by what makes one of two.
template <class Pack> CQSA_DEVICE word4x pack_halves(const float4x (&x)[2], const Pack& pack) {
  word4x out;
#pragma unroll
  for (int i = 0; i < 4; ++i) out.x[i] = pack(x[i / 2].x[i % 2 * 2], x[i / 2].x[i % 2 * 2 + 1]);
  return out;
}

// The 16 bytes of out that values become. Only a scale that is not finite makes a NaN, which has bits of its own.
CQSA_DEVICE word4x pack_values(int kind, bool finite, const float4x (&x)[2]) {
  if (!finite) return pack_halves(x, [&](float low, float high) { return encode_u16(kind, low) | encode_u16(kind, high) << 16; });
  if (kind == kind_f16) return pack_halves(x, [](float low, float high) { return pair_of_f16(low, high); });
  return pack_halves(x, [](float low, float high) { return pair_of_bf16(low, high); });
}
CQSA_DEVICE word4x pack_values(int, bool finite, const float4x (&x)[1]) {
  word4x out;
#pragma unroll
  for (int i = 0; i < 4; ++i) out.x[i] = bits_of(finite ? x[0].x[i] : plain_nan(x[0].x[i]));
  return out;
}

// Words at a time: 1 for f32, otherwise 2, which have one scale.
template <int Words, int Lanes> CQSA_DEVICE void write_wide(const quant_rows_params& p, const quant_team<Lanes>& t) {
  constexpr int each = 8 / Words;
  const int word = int(unsigned(t.lane) % each) * Words;
#pragma unroll 2  // all of them, and clang loads what all need at first: spills
  for (int round = 0; round < each; ++round) {
    const int from = round * (Lanes / each) + int(unsigned(t.lane) / each);
    const int64_t place = t.places[from];
    if (place < 0) continue;
    const float* const numbers = t.numbers + from * 4 + word / 4;
    float4x values[Words];
#pragma unroll
    for (int w = 0; w < Words; ++w) values[w] = values_at(t, from, word + w);
    const word4x packed = pack_values(p.out.kind, is_finite(numbers[0]) && is_finite(numbers[2]), values);
    *reinterpret_cast<word4x*>(p.out.data + (place + 4 * word) * (Words == 1 ? 4 : 2)) = packed;
  }
}

template <int Lanes> CQSA_DEVICE void write_any(const quant_rows_params& p, const quant_team<Lanes>& t) {
  for (int n = t.lane; n < Lanes * 8; n += Lanes)
    if (const int64_t place = t.places[n / 8]; place >= 0) store_four(p.out, place, n % 8 * 4, 32, values_at(t, n / 8, n % 8));
}

template <int Lanes> CQSA_DEVICE void write_codes(const quant_rows_params& p, const quant_team<Lanes>& t) {
  if (!p.wide) write_any(p, t);
  else if (p.out.kind == kind_f32) write_wide<1>(p, t);
  else write_wide<2>(p, t);
}

// The codes of one unit, zeros where there is no such row.
template <class With> CQSA_DEVICE void decode_unit(const quant_rows_params& p, int64_t row, int64_t piece, const With& with_format, quant_codes* c) {
  const int64_t from = wanted_row(p, row);
#pragma unroll
  for (int i = 0; i < 8; ++i) c->code[i] = 0;
  set_scale(c, 0.0f);
  if (from < 0) return;
  const char* const data = p.data + from * p.row_bytes;
  with_format(p.format, [&](auto constant) {
    using format = typename decltype(constant)::type;
    constexpr int parts = format::elements / 32;
    const char* const block = data + piece / parts * format::bytes;
    const int part = int(piece % parts);
    format::unpack(format::load(block, part), part, c);
  });
}

template <int Lanes, class With> CQSA_DEVICE void quant_rows_block(const quant_rows_params& p, const With& with_format) {
  const quant_team<Lanes> t = make_team<Lanes>();
  const int64_t units = p.count * p.pieces, teams = block_threads() / Lanes;
  for (int64_t first = (block_index_x() * teams + thread_index() / Lanes) * Lanes; first < units; first += grid_size_x() * teams * Lanes) {
    t.places[t.lane] = -1;
    if (first + t.lane < units) {
      int64_t row, piece;
      place_unit<Lanes>(first, t.lane, p.pieces, &row, &piece);
      quant_codes c;
      decode_unit(p, row, piece, with_format, &c);
      put_codes(t, c);
      t.places[t.lane] = row * p.out.stride[2] + 32 * piece * p.out.stride[3];
    }
    lanes_barrier<Lanes>();
    write_codes(p, t);
    if (!CQSA_MUTANT(63)) lanes_barrier<Lanes>();
  }
}

// ---- plain numbers ------------------------------------------------------------------------------------------------------------

CQSA_DEVICE int32_t plain_kind(int32_t format) { return format == CQSA_QUANT_F32 ? kind_f32 : format == CQSA_QUANT_F16 ? kind_f16 : kind_bf16; }

// A team of lanes for each piece of a row. What keeps its type keeps its bits.
template <int Lanes> CQSA_DEVICE void quant_plain_block(const quant_rows_params& p) {
  const int64_t teams = block_threads() / Lanes;
  gpu_view from{};
  from.kind = plain_kind(p.format), from.stride[3] = 1;
  for (int64_t unit = block_index_x() * teams + thread_index() / Lanes; unit < p.count * p.pieces; unit += grid_size_x() * teams) {
    const int64_t n = unit / p.pieces, begin = (unit - n * p.pieces) * quant_plain_piece, end = min_i64(begin + quant_plain_piece, p.elements);
    const int64_t row = wanted_row(p, n), to = n * p.out.stride[2];
    from.data = const_cast<char*>(p.data) + max_i64(row, 0) * p.row_bytes;
    from.quads = (uintptr_t(from.data) & 15) == 0 && p.elements % 4 == 0;
    for (int64_t c = begin + thread_index() % Lanes * 4; c < end; c += 4 * Lanes) {
      if (row < 0) store_four(p.out, to, c, end, float4x{{0.0f, 0.0f, 0.0f, 0.0f}});
      else if (from.kind == p.out.kind) copy_four(from, 0, p.out, to, c, end);
      else store_four(p.out, to, c, end, load_four(from, 0, c, end));
    }
  }
}

}  // namespace cqsa::gpu
