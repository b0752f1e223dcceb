// SPDX-License-Identifier: Apache-2.0
// The quantizers of section 15 of cqsa.h. Every step is an operation in f32 that is rounded by itself (compiled without contraction), as in ggml's
// reference, whose blocks these are wherever that defines one; IQ4_NL there searches longer.
#include "quant_job.h"

#include "backends/quant_codebooks.h"
#include "dtype.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace cqsa::cpu {
namespace {

constexpr uint16_t f16_nan = 0x7e00;

uint32_t magnitude(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffffu; }

// The element of largest magnitude, the first of equals; NaN when an element is not finite.
float largest(const float* x, int n) {
  float best = 0;
  for (int i = 0; i < n; ++i) {
    if (magnitude(x[i]) >= 0x7f800000u) return std::bit_cast<float>(0x7fc00000u);
    if (magnitude(x[i]) > magnitude(best)) best = x[i];
  }
  return best;
}
bool is_wild(float largest) { return largest != largest; }

float reciprocal(float d) {
  const float id = 1.0f / d;
  return magnitude(id) < 0x7f800000u ? id : 0.0f;
}

// What is finite stays so.
void put_scale(float d, bool wild, uint8_t* to) {
  const uint16_t bits = wild ? f16_nan : f32_to_f16(std::clamp(d, -65504.0f, 65504.0f));
  std::memcpy(to, &bits, 2);
}

void put_nibbles(const uint8_t (&code)[32], uint8_t* to) {
  for (int i = 0; i < 16; ++i) to[i] = static_cast<uint8_t>(code[i] | code[i + 16] << 4);
}

// Halves away from 0, as roundf(), whatever the rounding mode.
int round_away(float x) { return static_cast<int>(std::round(x)); }

void encode_q8_0(const float* x, uint8_t* to) {
  const float m = largest(x, 32), d = std::fabs(m) / 127.0f, id = reciprocal(d);
  put_scale(d, is_wild(m), to);
  for (int i = 0; i < 32; ++i) to[2 + i] = static_cast<uint8_t>(is_wild(m) ? 0 : round_away(x[i] * id));
}

void encode_q4_0(const float* x, uint8_t* to) {
  const float m = largest(x, 32), d = m / -8.0f, id = reciprocal(d);
  uint8_t code[32];
  for (int i = 0; i < 32; ++i) code[i] = static_cast<uint8_t>(is_wild(m) ? 8 : std::min(15, static_cast<int>(x[i] * id + 8.5f)));
  put_scale(d, is_wild(m), to);
  put_nibbles(code, to + 2);
}

void encode_q2_0(const float* x, uint8_t* to) {
  const float m = largest(x, 64), d = std::fabs(m), id = reciprocal(d);
  put_scale(d, is_wild(m), to);
  std::memset(to + 2, 0, 16);
  for (int i = 0; i < 64; ++i) {
    const int code = is_wild(m) ? 1 : std::clamp(round_away(x[i] * id) + 1, 0, 3);
    to[2 + i / 4] = static_cast<uint8_t>(to[2 + i / 4] | code << i % 4 * 2);
  }
}

// Of two that are equally near the lower one.
int nearest_iq4(float x) {
  int t = 0;
  while (t < 15 && x - float(quant::iq4_values[t]) > float(quant::iq4_values[t + 1]) - x) ++t;
  return t;
}

void encode_iq4_nl(const float* x, uint8_t* to) {
  const float m = largest(x, 32), id = reciprocal(m / -127.0f);
  uint8_t code[32];
  double product = 0, square = 0;
  for (int i = 0; i < 32; ++i) {
    code[i] = static_cast<uint8_t>(nearest_iq4(is_wild(m) ? 0.0f : x[i] * id));
    const double t = quant::iq4_values[code[i]];
    product += double(x[i]) * t, square += t * t;
  }
  put_scale(static_cast<float>(product / square), is_wild(m), to);
  put_nibbles(code, to + 2);
}

// Of the doubled values: d is half the scale.
int nearest_e2m1(float x, float d) {
  int best = 0;
  float least = std::fabs(d * float(quant::e2m1_values[0]) - x);
  for (int i = 1; i < 16; ++i) {
    const float error = std::fabs(d * float(quant::e2m1_values[i]) - x);
    if (error < least) least = error, best = i;
  }
  return best;
}

// Exponent of a finite number > 0: floor(log2(x)).
int exponent_of(float x) {
  int e = 0;
  std::frexp(x, &e);
  return e - 1;
}

// Nothing here comes back as NaN, but the largest code at the largest scale as infinity.
void encode_mxfp4(const float* x, uint8_t* to) {
  const float m = largest(x, 32);
  const int e = is_wild(m) ? 255 : m == 0 ? 0 : std::max(exponent_of(std::fabs(m)) - 2 + 127, 0);
  const float d = std::bit_cast<float>(e < 2 ? 0x00200000u << e : static_cast<uint32_t>(e - 1) << 23);
  uint8_t code[32];
  for (int i = 0; i < 32; ++i) code[i] = static_cast<uint8_t>(is_wild(m) ? 7 : nearest_e2m1(x[i], d));
  to[0] = static_cast<uint8_t>(e);
  put_nibbles(code, to + 1);
}

template <int elements, int bytes, class Encode> void each_block(const float* x, int64_t n, uint8_t* to, Encode encode) {
  for (int64_t i = 0; i < n; i += elements, to += bytes) encode(x + i, to);
}

}  // namespace

void encode_blocks(cqsa_quant_format format, const float* x, int64_t n, uint8_t* to) {
  switch (format) {
    case CQSA_QUANT_Q2_0: return each_block<64, 18>(x, n, to, encode_q2_0);
    case CQSA_QUANT_Q4_0: return each_block<32, 18>(x, n, to, encode_q4_0);
    case CQSA_QUANT_IQ4_NL: return each_block<32, 18>(x, n, to, encode_iq4_nl);
    case CQSA_QUANT_MXFP4: return each_block<32, 17>(x, n, to, encode_mxfp4);
    default: return each_block<32, 34>(x, n, to, encode_q8_0);
  }
}

}  // namespace cqsa::cpu
