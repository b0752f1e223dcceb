// SPDX-License-Identifier: Apache-2.0
#include "quant_reference.h"

#include "backends/quant_codebooks.h"
#include "dtype.h"

#include <bit>
#include <cstring>

namespace cqsa::cpu {
namespace {

uint16_t word(const uint8_t* b) { return uint16_t(b[0] | b[1] << 8); }
uint32_t dword(const uint8_t* b) { return word(b) | uint32_t(word(b + 2)) << 16; }
float half(const uint8_t* b) { return f16_to_f32(word(b)); }
// Number n of those of `bits` bits in a sequence of bytes; bits 1, 2, 4.
int field(const uint8_t* b, int n, int bits) { return b[n * bits / 8] >> n * bits % 8 & ((1 << bits) - 1); }
// 32 nibbles: the low ones come first.
int nibble(const uint8_t* b, int i) { return i < 16 ? b[i] & 15 : b[i - 16] >> 4; }
// 32 bytes of pairs of bits for 128 elements, the lowest pairs first.
int pair(const uint8_t* b, int i) { return b[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3; }

// ---- plain numbers ----------------------------------------------------------------------------------------------------------

float f32(const uint8_t* b, int) { return std::bit_cast<float>(dword(b)); }
float f16(const uint8_t* b, int) { return half(b); }
float bf16(const uint8_t* b, int) { return bf16_to_f32(word(b)); }

// ---- one scale for a block --------------------------------------------------------------------------------------------------

float q1_0(const uint8_t* b, int i) { return half(b) * float(field(b + 2, i, 1) ? 1 : -1); }
float q2_0(const uint8_t* b, int i) { return half(b) * float(field(b + 2, i, 2) - 1); }
float q4_0(const uint8_t* b, int i) { return half(b) * float(nibble(b + 2, i) - 8); }
float q4_1(const uint8_t* b, int i) { return half(b) * float(nibble(b + 4, i)) + half(b + 2); }
float q5_0(const uint8_t* b, int i) { return half(b) * float((nibble(b + 6, i) | field(b + 2, i, 1) << 4) - 16); }
float q5_1(const uint8_t* b, int i) { return half(b) * float(nibble(b + 8, i) | field(b + 4, i, 1) << 4) + half(b + 2); }
float q8_0(const uint8_t* b, int i) { return half(b) * float(int8_t(b[2 + i])); }
float iq4_nl(const uint8_t* b, int i) { return half(b) * float(quant::iq4_values[nibble(b + 2, i)]); }

// Base 3: the digit comes out at the top of a byte that is a fraction of 256.
float tq1_0(const uint8_t* b, int i) {
  static const uint8_t power[] = {1, 3, 9, 27, 81};
  const int at = i < 160 ? i % 32 : i < 240 ? 32 + (i - 160) % 16 : 48 + (i - 240) % 4;
  const int digit = i < 160 ? i / 32 : i < 240 ? (i - 160) / 16 : (i - 240) / 4;
  const uint8_t rest = uint8_t(b[at] * power[digit]);
  return half(b + 52) * float((rest * 3 >> 8) - 1);
}
float tq2_0(const uint8_t* b, int i) { return half(b + 64) * float(pair(b, i) - 1); }

// 2^(e - 128): half a scale, for doubled values. Code 255 is no NaN in ggml.
float mxfp4(const uint8_t* b, int i) {
  const float d = std::bit_cast<float>(b[0] < 2 ? 0x00200000u << b[0] : uint32_t(b[0] - 1) << 23);
  return d * float(quant::e2m1_values[nibble(b + 1, i)]);
}

// The scale is e4m3 without its sign, halved for doubled values; 0x7f is 0.
float nvfp4(const uint8_t* b, int i) {
  const uint8_t s = b[i / 16], code = b[4 + i / 16 * 8 + i % 8];
  const int e = s >> 3 & 15, m = s & 7;
  const float raw = e == 0 ? float(m) * 0x1p-9f : std::bit_cast<float>(uint32_t(e - 7 + 127) << 23) * (1.0f + float(m) / 8.0f);
  return (s == 0x7f ? 0.0f : raw * 0.5f) * float(quant::e2m1_values[i % 16 < 8 ? code & 15 : code >> 4]);
}

// ---- K: scales of scales ----------------------------------------------------------------------------------------------------

float q2_k(const uint8_t* b, int i) {
  const uint8_t s = b[i / 16];
  return half(b + 80) * float(s & 15) * float(pair(b + 16, i)) - half(b + 82) * float(s >> 4);
}

float q3_k(const uint8_t* b, int i) {
  const uint8_t* const scales = b + 96;
  const int n = i / 16, low = n < 8 ? scales[n] & 15 : scales[n - 8] >> 4, high = scales[8 + n % 4] >> n / 4 * 2 & 3;
  const int code = pair(b + 32, i) - (b[i % 32] >> i / 32 & 1 ? 0 : 4);
  return half(b + 108) * float((low | high << 4) - 32) * float(code);
}

// Of Q4_K and Q5_K: eight scales and eight minima of 6 bits each in 12 bytes.
int scale_k(const uint8_t* s, int n) { return n < 4 ? s[n] & 63 : (s[n + 4] & 15) | s[n - 4] >> 6 << 4; }
int min_k(const uint8_t* s, int n) { return n < 4 ? s[n + 4] & 63 : s[n + 4] >> 4 | s[n] >> 6 << 4; }
int nibble_k(const uint8_t* b, int i) { return b[i / 64 * 32 + i % 32] >> i / 32 % 2 * 4 & 15; }

float q4_k(const uint8_t* b, int i) {
  return half(b) * float(scale_k(b + 4, i / 32)) * float(nibble_k(b + 16, i)) - half(b + 2) * float(min_k(b + 4, i / 32));
}

float q5_k(const uint8_t* b, int i) {
  const int code = nibble_k(b + 48, i) | (b[16 + i % 32] >> i / 32 & 1) << 4;
  return half(b) * float(scale_k(b + 4, i / 32)) * float(code) - half(b + 2) * float(min_k(b + 4, i / 32));
}

float q6_k(const uint8_t* b, int i) {
  const int low = b[i / 128 * 64 + i % 64] >> i % 128 / 64 * 4 & 15, high = pair(b + 128, i);
  return half(b + 208) * float(int8_t(b[192 + i / 16])) * float((low | high << 4) - 32);
}

// ---- IQ: codebooks ----------------------------------------------------------------------------------------------------------

// 7 bits of signs for 8 elements: the eighth makes their number even.
int sign7(uint32_t signs, int j) {
  signs &= 127;
  return (j < 7 ? signs >> j & 1 : std::popcount(signs) & 1) ? -1 : 1;
}
int sign8(uint8_t signs, int j) { return signs >> j & 1 ? -1 : 1; }
int value(uint64_t entry, int j) { return int8_t(entry >> 8 * j); }

float iq2_xxs(const uint8_t* b, int i) {
  const uint8_t* const part = b + 2 + i / 32 * 8;
  const uint32_t rest = dword(part + 4);
  const float d = half(b) * (0.5f + float(rest >> 28)) * 0.25f;
  return d * float(value(quant::iq2_xxs_grid[part[i % 32 / 8]], i % 8) * sign7(rest >> i % 32 / 8 * 7, i % 8));
}

float iq2_xs(const uint8_t* b, int i) {
  const uint16_t q = word(b + 2 + i / 8 * 2);
  const float d = half(b) * (0.5f + float(field(b + 66, i / 16, 4))) * 0.25f;
  return d * float(value(quant::iq2_xs_grid[q & 511], i % 8) * sign7(q >> 9, i % 8));
}

float iq2_s(const uint8_t* b, int i) {
  const int q = b[2 + i / 8] | field(b + 66, i / 8, 2) << 8;
  const float d = half(b) * (0.5f + float(field(b + 74, i / 16, 4))) * 0.25f;
  return d * float(value(quant::iq2_s_grid[q], i % 8) * sign8(b[34 + i / 8], i % 8));
}

float iq3_xxs(const uint8_t* b, int i) {
  const uint32_t rest = dword(b + 66 + i / 32 * 4);
  const float d = half(b) * (0.5f + float(rest >> 28)) * 0.5f;
  return d * float(value(quant::iq3_xxs_grid[b[2 + i / 4]], i % 4) * sign7(rest >> i % 32 / 8 * 7, i % 8));
}

float iq3_s(const uint8_t* b, int i) {
  const int q = b[2 + i / 4] | field(b + 66, i / 4, 1) << 8;
  const float d = half(b) * float(1 + 2 * field(b + 106, i / 32, 4));
  return d * float(value(quant::iq3_s_grid[q], i % 4) * sign8(b[74 + i / 8], i % 8));
}

float iq1_s(const uint8_t* b, int i) {
  const uint16_t high = word(b + 34 + i / 32 * 2);
  const int q = b[2 + i / 8] | (high >> i % 32 / 8 * 3 & 7) << 8;
  const float d = half(b) * float(2 * (high >> 12 & 7) + 1);
  return d * (float(value(quant::iq1_s_grid[q], i % 8)) + (high & 0x8000 ? -0.125f : 0.125f));
}

float iq1_m(const uint8_t* b, int i) {
  const uint8_t* const scales = b + 48;
  const int d_bits = word(scales) >> 12 | (word(scales + 2) >> 8 & 0x00f0) | (word(scales + 4) >> 4 & 0x0f00) | (word(scales + 6) & 0xf000);
  const int high = field(b + 32, i / 8, 4), q = b[i / 8] | (high & 7) << 8;
  const float d = f16_to_f32(uint16_t(d_bits)) * float(2 * (word(scales + i / 64 * 2) >> i / 16 % 4 * 3 & 7) + 1);
  return d * (float(value(quant::iq1_s_grid[q], i % 8)) + (high & 8 ? -0.125f : 0.125f));
}

float iq4_xs(const uint8_t* b, int i) {
  const int n = i / 32, scale = field(b + 4, n, 4) | (word(b + 2) >> 2 * n & 3) << 4;
  return half(b) * float(scale - 32) * float(quant::iq4_values[nibble(b + 8 + 16 * n, i % 32)]);
}

}  // namespace

quant_element_fn quant_element(cqsa_quant_format format) {
  switch (format) {
    case CQSA_QUANT_F32: return f32;
    case CQSA_QUANT_F16: return f16;
    case CQSA_QUANT_BF16: return bf16;
    case CQSA_QUANT_Q1_0: return q1_0;
    case CQSA_QUANT_Q2_0: return q2_0;
    case CQSA_QUANT_Q4_0: return q4_0;
    case CQSA_QUANT_Q4_1: return q4_1;
    case CQSA_QUANT_Q5_0: return q5_0;
    case CQSA_QUANT_Q5_1: return q5_1;
    case CQSA_QUANT_Q8_0: return q8_0;
    case CQSA_QUANT_Q2_K: return q2_k;
    case CQSA_QUANT_Q3_K: return q3_k;
    case CQSA_QUANT_Q4_K: return q4_k;
    case CQSA_QUANT_Q5_K: return q5_k;
    case CQSA_QUANT_Q6_K: return q6_k;
    case CQSA_QUANT_IQ1_S: return iq1_s;
    case CQSA_QUANT_IQ1_M: return iq1_m;
    case CQSA_QUANT_IQ2_XXS: return iq2_xxs;
    case CQSA_QUANT_IQ2_XS: return iq2_xs;
    case CQSA_QUANT_IQ2_S: return iq2_s;
    case CQSA_QUANT_IQ3_XXS: return iq3_xxs;
    case CQSA_QUANT_IQ3_S: return iq3_s;
    case CQSA_QUANT_IQ4_NL: return iq4_nl;
    case CQSA_QUANT_IQ4_XS: return iq4_xs;
    case CQSA_QUANT_TQ1_0: return tq1_0;
    case CQSA_QUANT_TQ2_0: return tq2_0;
    case CQSA_QUANT_MXFP4: return mxfp4;
    case CQSA_QUANT_NVFP4: return nvfp4;
    default: return nullptr;
  }
}

}  // namespace cqsa::cpu
