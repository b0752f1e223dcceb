// SPDX-License-Identifier: Apache-2.0
// The K formats: scales of scales, in blocks of 256. As in quant_simple.cuh.
#pragma once

#include "quant_words.cuh"

namespace cqsa::gpu::blocks {

struct q2_k {
  static constexpr int elements = 256, bytes = 84;
  struct words {
    uint32_t d, scales, pairs[8];
  };
  static CQSA_DEVICE words load(const char* b, int part) {
    words w;
    w.d = word_at(b + 80), w.scales = half_word(b + 2 * part);
    load_words(b + 16 + part / 4 * 32, w.pairs);
    return w;
  }
  static CQSA_DEVICE void unpack(const words& w, int part, quant_codes* out) {
    const int shift = part % 4 * 2;
    const float d = half_of(w.d & 0xffffu), least = half_of(w.d >> 16);
#pragma unroll
    for (int i = 0; i < 8; ++i) out->code[i] = w.pairs[i] >> shift & 3u * each_byte;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t s = w.scales >> 8 * h & 0xffu;
      out->scale[h] = product_f32(d, float(s & 15u)), out->least[h] = product_f32(least, float(s >> 4));
    }
  }
};

struct q3_k {
  static constexpr int elements = 256, bytes = 110;
  struct words {
    uint32_t d, low, high;  // of two scales
    uint32_t pairs[8], bits[8];
  };
  static CQSA_DEVICE words load(const char* b, int part) {
    words w;
    w.d = half_word(b + 108), w.low = half_word(b + 96 + 2 * part % 8), w.high = half_word(b + 104 + 2 * part % 4);
    load_words(b + 32 + part / 4 * 32, w.pairs);
    load_words(b, w.bits);
    return w;
  }
  static CQSA_DEVICE void unpack(const words& w, int part, quant_codes* out) {
    const int shift = part % 4 * 2;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      out->code[i] = less_each((w.pairs[i] >> shift & 3u * each_byte) | (w.bits[i] >> part & each_byte) << 2, 4);
    const float d = half_of(w.d);
    const uint32_t scales = (w.low >> part / 4 * 4 & 0x0f0fu) | (w.high >> part / 2 * 2 & 0x0303u) << 4;
    set_scales(out, product_f32(d, float(int(scales & 0xffu) - 32)), product_f32(d, float(int(scales >> 8) - 32)));
  }
};

// Of Q4_K and Q5_K: d and least, and of eight scales and eight minima of 6 bits in 12 bytes the three bytes with those of a part.
struct words_of_k {
  uint32_t d, byte[3];
};
CQSA_DEVICE words_of_k load_k(const char* b, int part) {
  const int at = 4 + part % 4;
  return {word_at(b), {byte_at(b, at), byte_at(b, at + 4), byte_at(b, at + 8)}};
}
CQSA_DEVICE void unpack_k(const words_of_k& w, int part, quant_codes* out) {
  const bool early = part < 4;
  const uint32_t scale = early ? w.byte[0] & 63u : (w.byte[2] & 15u) | w.byte[0] >> 6 << 4;
  const uint32_t least = early ? w.byte[1] & 63u : w.byte[2] >> 4 | w.byte[1] >> 6 << 4;
  set_scale(out, product_f32(half_of(w.d & 0xffffu), float(scale)), product_f32(half_of(w.d >> 16), float(least)));
}

struct q4_k {
  static constexpr int elements = 256, bytes = 144;
  struct words {
    words_of_k scales;
    uint32_t nibbles[8];
  };
  static CQSA_DEVICE words load(const char* b, int part) {
    words w;
    w.scales = load_k(b, part);
    load_words(b + 16 + part / 2 * 32, w.nibbles);
    return w;
  }
  static CQSA_DEVICE void unpack(const words& w, int part, quant_codes* out) {
    const int shift = part % 2 * 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) out->code[i] = w.nibbles[i] >> shift & 15u * each_byte;
    unpack_k(w.scales, part, out);
  }
};

struct q5_k {
  static constexpr int elements = 256, bytes = 176;
  struct words {
    words_of_k scales;
    uint32_t nibbles[8], bits[8];
  };
  static CQSA_DEVICE words load(const char* b, int part) {
    words w;
    w.scales = load_k(b, part);
    load_words(b + 48 + part / 2 * 32, w.nibbles);
    load_words(b + 16, w.bits);
    return w;
  }
  static CQSA_DEVICE void unpack(const words& w, int part, quant_codes* out) {
    const int shift = part % 2 * 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) out->code[i] = (w.nibbles[i] >> shift & 15u * each_byte) | (w.bits[i] >> part & each_byte) << 4;
    unpack_k(w.scales, part, out);
  }
};

struct q6_k {
  static constexpr int elements = 256, bytes = 210;
  struct words {
    uint32_t d, scales, nibbles[8], pairs[8];
  };
  static CQSA_DEVICE words load(const char* b, int part) {
    words w;
    w.d = half_word(b + 208), w.scales = half_word(b + 192 + 2 * part);
    load_words(b + part / 4 * 64 + part % 2 * 32, w.nibbles);
    load_words(b + 128 + part / 4 * 32, w.pairs);
    return w;
  }
  static CQSA_DEVICE void unpack(const words& w, int part, quant_codes* out) {
    const int low = part % 4 / 2 * 4, high = part % 4 * 2;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      out->code[i] = less_each((w.nibbles[i] >> low & 15u * each_byte) | (w.pairs[i] >> high & 3u * each_byte) << 4, 32);
    const float d = half_of(w.d);
    set_scales(out, product_f32(d, float(int8_t(w.scales & 0xffu))), product_f32(d, float(int8_t(w.scales >> 8))));
  }
};

}  // namespace cqsa::gpu::blocks

namespace cqsa::gpu {

// f(format_constant<..>()) for the format of that number.
template <class F> CQSA_DEVICE void with_k_format(int32_t format, const F& f) {
  switch (format) {
    case CQSA_QUANT_Q2_K: return f(format_constant<blocks::q2_k>());
    case CQSA_QUANT_Q3_K: return f(format_constant<blocks::q3_k>());
    case CQSA_QUANT_Q4_K: return f(format_constant<blocks::q4_k>());
    case CQSA_QUANT_Q5_K: return f(format_constant<blocks::q5_k>());
    case CQSA_QUANT_Q6_K: return f(format_constant<blocks::q6_k>());
    default: return;
  }
}

}  // namespace cqsa::gpu
