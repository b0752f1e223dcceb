// SPDX-License-Identifier: Apache-2.0
// 32 elements of a row of weights to halves in registers, times moe_weight_factor: 16 words, two for each step of 16 in k. What is rounded to halves: the
// scale (and the minimum), and their product with a code, which is exact.
#pragma once

#include "backends/cuda/sm80/words.cuh"
#include "backends/gpu/moe_decode.cuh"
#include "backends/gpu/moe_order.cuh"
#include "moe_shape.h"

namespace cqsa::gpu::sm80 {

CQSA_DEVICE uint32_t two_halves(float x) {
  const uint32_t h = f32_to_f16(x);
  return h | h << 16;
}

// 16 of the 32 elements, with one scale: eight words.
CQSA_DEVICE void halves_of_codes(const quant_codes& c, int h, uint32_t (&out)[8]) {
  const uint32_t scale = two_halves(c.scale[h] * moe_weight_factor), least = two_halves(-c.least[h] * moe_weight_factor);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t turned = c.code[4 * h + i] ^ sign_bits;
    out[2 * i] = fma_f16x2(codes_to_f16x2(turned, 0x4140), scale, least);
    out[2 * i + 1] = fma_f16x2(codes_to_f16x2(turned, 0x4342), scale, least);
  }
}

// Two bits at 2 i and 16 + 2 i of a word, below the bits of 1024: 1024 + 2^o q, and from it q - 1, exactly.
template <int O> CQSA_DEVICE uint32_t two_of_q2(uint32_t word) {
  constexpr uint32_t factor = O == 0 ? 0x3c003c00u : O == 2 ? 0x34003400u : O == 4 ? 0x2c002c00u : O == 6 ? 0x24002400u : 0x1c001c00u;
  constexpr uint32_t less = O == 0 ? 0xe401e401u : O == 2 ? 0xdc04dc04u : O == 4 ? 0xd410d410u : O == 6 ? 0xcc40cc40u : 0xc500c500u;
  return fma_f16x2((word & (0x00030003u << O)) | 0x64006400u, factor, less);
}
CQSA_DEVICE void halves_of_q2(uint32_t low, uint32_t scale, uint32_t (&out)[8]) {
  const uint32_t high = low >> 10;
  const uint32_t codes[8] = {two_of_q2<0>(low), two_of_q2<2>(low),  two_of_q2<4>(low),  two_of_q2<6>(low),
                             two_of_q2<8>(low), two_of_q2<0>(high), two_of_q2<2>(high), two_of_q2<4>(high)};
#pragma unroll
  for (int i = 0; i < 8; ++i) out[i] = fma_f16x2(codes[i], scale, 0);
}

// Rows of a thread, two for each 16 x 16 operand of the matrix unit: rows 2 m and 2 m + 1 are lines g and g + 8 of operand m. load() brings a piece of
// them, begin() takes it apart, halves() makes half of it, four steps.
template <class Format, int Operands> struct row_walk;

template <int Operands> struct row_walk<blocks::q2_0, Operands> {
  static constexpr bool takes_registers = false;  // to take a piece apart
  const char* row[2 * Operands];
  blocks::q2_0::words words[2 * Operands];
  CQSA_DEVICE void take(int i, const char* data, int32_t) { row[i] = data; }
  CQSA_DEVICE void load(int m, int64_t piece) {
    int part;
#pragma unroll
    for (int r = 0; r < 2; ++r) words[2 * m + r] = load_piece<blocks::q2_0>(row[2 * m + r], piece, &part);
  }
  CQSA_DEVICE void begin(int) {}
  CQSA_DEVICE void halves(int m, int h, uint32_t (&low)[8], uint32_t (&high)[8]) const {
    const blocks::q2_0::words &a = words[2 * m], &b = words[2 * m + 1];
    halves_of_q2(a.pairs[h], fma_f16x2(a.d | a.d << 16, 0x54005400u, 0), low);
    halves_of_q2(b.pairs[h], fma_f16x2(b.d | b.d << 16, 0x54005400u, 0), high);
  }
};

// A value that the compiler knows nothing of: it would otherwise carry the address of the next piece in every format from turn to turn.
CQSA_DEVICE int64_t unknown(int64_t x) {
#if !defined(CQSA_SIMT)
  asm volatile("" : "+l"(x));
#endif
  return x;
}

// .. of any format: the switch over formats is there once, and what is loaded is used at once.
struct any_format {};
template <int Operands> struct row_walk<any_format, Operands> {
  static constexpr bool takes_registers = true;
  const char* row[2 * Operands];
  int32_t format[2];  // of even rows and of odd ones
  int64_t piece[Operands];
  quant_codes codes[2];
  CQSA_DEVICE void take(int i, const char* data, int32_t f) { row[i] = data, format[i % 2] = f; }
  CQSA_DEVICE void load(int m, int64_t n) { piece[m] = n; }
  CQSA_DEVICE void begin(int m) {
#pragma unroll 1
    for (int r = 0; r < 2; ++r) {
      quant_codes c;
      decode_piece(r ? row[2 * m + 1] : row[2 * m], r ? format[1] : format[0], unknown(piece[m]), &c);
      if (r == 0) codes[0] = c;
      else codes[1] = c;
    }
  }
  CQSA_DEVICE void halves(int, int h, uint32_t (&low)[8], uint32_t (&high)[8]) const {
    halves_of_codes(codes[0], h, low);
    halves_of_codes(codes[1], h, high);
  }
};

}  // namespace cqsa::gpu::sm80
