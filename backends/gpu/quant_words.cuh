// SPDX-License-Identifier: Apache-2.0
// What decoders of quantized formats share: 32 elements as small integers with scales, words from 2-byte aligned memory, and four bytes of a word at once.
#pragma once

#include "backends/cqsa_backend.h"
#include "element.cuh"

namespace cqsa::gpu {

// 32 consecutive elements: element i is code byte i, and its value scale[i / 16] * code - least[i / 16], each operation rounded. That is what the
// reference decoders compute, to the bit; a format without minimum has +0 there, which changes nothing.
struct quant_codes {
  uint32_t code[8];
  float scale[2], least[2];
};

// Nothing reads beyond the bytes it is about. The 16-bit word with byte `at` of a block whose address is even, and that byte.
CQSA_DEVICE uint32_t half_word(const char* from) { return *reinterpret_cast<const uint16_t*>(from); }
CQSA_DEVICE uint32_t byte_at(const char* block, int at) { return half_word(block + (at & ~1)) >> (at & 1) * 8 & 0xffu; }
CQSA_DEVICE uint32_t word_at(const char* from) { return half_word(from) | half_word(from + 2) << 16; }

// N words from an even address: N - 1 aligned loads of 32 bits and two of 16, whatever the address, so that lanes do not part ways.
template <int N> CQSA_DEVICE void load_words(const char* from, uint32_t (&to)[N]) {
  const bool aligned = (uintptr_t(from) & 2) == 0;
  const char* const inner = from + (aligned ? 0 : 2);
  const uint32_t edge = half_word(from + (aligned ? 4 * N - 4 : 0)), end = half_word(from + 4 * N - 2);
  const uint32_t selector = aligned ? 0x7654u : 0x5432u;
  uint32_t before = edge << 16;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const uint32_t next = i < N - 1 ? *reinterpret_cast<const uint32_t*>(inner + 4 * i) : aligned ? edge | end << 16 : end;
    to[i] = pick_bytes(before, next, selector);
    before = next;
  }
}

// ---- four bytes at once -------------------------------------------------------------------------------------------------------

constexpr uint32_t each_byte = 0x01010101u;

// The low four bits, a byte each.
CQSA_DEVICE uint32_t spread_bits(uint32_t four) { return (four & 15u) * 0x00204081u & each_byte; }
// The low eight bits as four pairs, a byte each.
CQSA_DEVICE uint32_t spread_pairs(uint32_t eight) {
  const uint32_t nibbles = (eight & 0xffu) * 0x1001u & 0x000f000fu;
  return nibbles * 0x41u & 3u * each_byte;
}
// Bytes of 0 to 127 less n.
CQSA_DEVICE uint32_t less_each(uint32_t x, uint32_t n) { return ((x | 0x80u * each_byte) - n * each_byte) ^ 0x80u * each_byte; }
// Minus the bytes whose sign bit, of four, is set. They are 1 to 127, so none carries into the next.
CQSA_DEVICE uint32_t with_signs(uint32_t values, uint32_t signs) {
  const uint32_t one = spread_bits(signs);
  return (values ^ one * 0xffu) + one;
}

// 16 bytes of a table in four words.
struct table_of_16 {
  uint32_t word[4];
};
CQSA_DEVICE constexpr uint32_t table_word(const int8_t* t, int n) {
  return uint32_t(uint8_t(t[4 * n])) | uint32_t(uint8_t(t[4 * n + 1])) << 8 | uint32_t(uint8_t(t[4 * n + 2])) << 16 | uint32_t(uint8_t(t[4 * n + 3])) << 24;
}
CQSA_DEVICE constexpr table_of_16 make_table(const int8_t* t) { return {{table_word(t, 0), table_word(t, 1), table_word(t, 2), table_word(t, 3)}}; }

// What the four nibbles of `indices` stand for: in the lower and in the upper half of the table, then by the topmost bit of each.
CQSA_DEVICE uint32_t look_up_four(const table_of_16& t, uint32_t indices, uint32_t choices) {
  return pick_bytes(pick_bytes(t.word[0], t.word[1], indices), pick_bytes(t.word[2], t.word[3], indices), choices);
}
// The eight nibbles of a word: those of the low halves of its bytes, and of the high ones.
CQSA_DEVICE void look_up(const table_of_16& t, uint32_t nibbles, uint32_t* low, uint32_t* high) {
  const uint32_t indices = nibbles & 0x77777777u, choices = (nibbles >> 1 & 0x44444444u) | 0x32103210u;
  const uint32_t a = look_up_four(t, indices, choices), b = look_up_four(t, indices >> 16, choices >> 16);
  *low = pick_bytes(a, b, 0x6420u), *high = pick_bytes(a, b, 0x7531u);
}

// 16 bytes of nibbles, the low ones first.
CQSA_DEVICE void unpack_nibbles(const uint32_t (&w)[4], uint32_t (&code)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) code[i] = w[i] & 15u * each_byte, code[4 + i] = w[i] >> 4 & 15u * each_byte;
}

// ---- scales -------------------------------------------------------------------------------------------------------------------

CQSA_DEVICE float half_of(uint32_t bits) { return f16_to_f32(uint16_t(bits)); }

CQSA_DEVICE void set_scale(quant_codes* out, float scale, float least = 0.0f) {
  out->scale[0] = out->scale[1] = scale;
  out->least[0] = out->least[1] = least;
}
CQSA_DEVICE void set_scales(quant_codes* out, float first, float second) {
  out->scale[0] = first, out->scale[1] = second;
  out->least[0] = out->least[1] = 0.0f;
}

// ---- what kernels ask ----------------------------------------------------------------------------------------------------------

CQSA_DEVICE float value_of(float scale, int code, float least) { return product_f32(scale, float(code)) - least; }
// Of one word, byte i.
CQSA_DEVICE int code_at(uint32_t word, int i) { return int8_t(uint8_t(word >> 8 * i)); }

template <class Format> struct format_constant {
  using type = Format;
};

}  // namespace cqsa::gpu
