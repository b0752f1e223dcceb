// SPDX-License-Identifier: Apache-2.0
// Formats with one scale for a block or a part of it. Each is a struct with the elements and bytes of a block, the words of 32 elements
// (number `part` of the block), how they are loaded, and how they become codes and scales. docs/quant.md has the layouts.
#pragma once

#include "backends/quant_tables.h"
#include "quant_words.cuh"

namespace cqsa::gpu::blocks {

struct q1_0 {
  static constexpr int elements = 128, bytes = 18;
  struct words {
    uint32_t d, bits;
  };
  static CQSA_DEVICE words load(const char* b, int part) { return {half_word(b), word_at(b + 2 + 4 * part)}; }
  static CQSA_DEVICE void unpack(const words& w, int, quant_codes* out) {
#pragma unroll
    for (int i = 0; i < 8; ++i) out->code[i] = ~(spread_bits(w.bits >> 4 * i) * 0xfeu);  // 1 or -1
    set_scale(out, half_of(w.d));
  }
};

struct q2_0 {
  static constexpr int elements = 64, bytes = 18;
  struct words {
    uint32_t d, pairs[2];
  };
  static CQSA_DEVICE words load(const char* b, int part) {
    words w;
    w.d = half_word(b);
    load_words(b + 2 + 8 * part, w.pairs);
    return w;
  }
  static CQSA_DEVICE void unpack(const words& w, int, quant_codes* out) {
#pragma unroll
    for (int i = 0; i < 8; ++i) out->code[i] = less_each(spread_pairs(w.pairs[i / 4] >> 8 * (i % 4)), 1);
    set_scale(out, half_of(w.d));
  }
};

// Of the formats of 32 elements: d or d and m, bit 4 of the codes, nibbles.
struct words_of_32 {
  uint32_t d, fifth, nibbles[4];
};
template <bool HasMin, bool HasFifth> CQSA_DEVICE words_of_32 load_32(const char* b) {
  words_of_32 w;
  const int at = HasMin ? 4 : 2;
  w.d = HasMin ? word_at(b) : half_word(b);
  w.fifth = HasFifth ? word_at(b + at) : 0;
  load_words(b + at + (HasFifth ? 4 : 0), w.nibbles);
  return w;
}
template <bool HasMin, bool HasFifth> CQSA_DEVICE void unpack_32(const words_of_32& w, quant_codes* out) {
  unpack_nibbles(w.nibbles, out->code);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (HasFifth) out->code[i] |= spread_bits(w.fifth >> 4 * i) << 4;
    if (!HasMin) out->code[i] = less_each(out->code[i], HasFifth ? 16 : 8);
  }
  set_scale(out, half_of(w.d & 0xffffu), HasMin ? -half_of(w.d >> 16) : 0.0f);
}

template <bool HasMin, bool HasFifth, int Bytes> struct nibbles_of_32 {
  static constexpr int elements = 32, bytes = Bytes;
  using words = words_of_32;
  static CQSA_DEVICE words load(const char* b, int) { return load_32<HasMin, HasFifth>(b); }
  static CQSA_DEVICE void unpack(const words& w, int, quant_codes* out) { unpack_32<HasMin, HasFifth>(w, out); }
};
using q4_0 = nibbles_of_32<false, false, 18>;
using q4_1 = nibbles_of_32<true, false, 20>;
using q5_0 = nibbles_of_32<false, true, 22>;
using q5_1 = nibbles_of_32<true, true, 24>;

struct q8_0 {
  static constexpr int elements = 32, bytes = 34;
  struct words {
    uint32_t d, codes[8];
  };
  static CQSA_DEVICE words load(const char* b, int) {
    words w;
    w.d = half_word(b);
    load_words(b + 2, w.codes);
    return w;
  }
  static CQSA_DEVICE void unpack(const words& w, int, quant_codes* out) {
#pragma unroll
    for (int i = 0; i < 8; ++i) out->code[i] = w.codes[i];
    set_scale(out, half_of(w.d));
  }
};

struct iq4_nl {
  static constexpr int elements = 32, bytes = 18;
  using words = words_of_32;
  static CQSA_DEVICE words load(const char* b, int) { return load_32<false, false>(b); }
  static CQSA_DEVICE void unpack(const words& w, int, quant_codes* out) {
    constexpr table_of_16 table = make_table(quant::iq4_values);
#pragma unroll
    for (int i = 0; i < 4; ++i) look_up(table, w.nibbles[i], &out->code[i], &out->code[4 + i]);
    set_scale(out, half_of(w.d));
  }
};

// Digits of base 3: word i is 4 bytes times a power of 3, of which the digits come out at the top.
struct tq1_0 {
  static constexpr int elements = 256, bytes = 54;
  struct words {
    uint32_t d, digits[8];
  };
  static CQSA_DEVICE words load(const char* b, int part) {
    words w;
    w.d = half_word(b + 52);
#pragma unroll
    for (int i = 0; i < 8; ++i) w.digits[i] = word_at(b + (part < 5 ? 4 * i : part < 7 || i < 4 ? 32 + 4 * (i % 4) : 48));
    return w;
  }
  static CQSA_DEVICE uint32_t power(int n) { return n == 0 ? 1 : n == 1 ? 3 : n == 2 ? 9 : n == 3 ? 27 : 81; }
  static CQSA_DEVICE uint32_t digits_of(uint32_t bytes, uint32_t power) {
    constexpr uint32_t mask = 0x00ff00ffu;
    const uint32_t even = ((bytes & mask) * power & mask) * 3 >> 8 & mask, odd = ((bytes >> 8 & mask) * power & mask) * 3 & ~mask;
    return less_each(even | odd, 1);
  }
  static CQSA_DEVICE void unpack(const words& w, int part, quant_codes* out) {
    const uint32_t first = power(part < 5 ? part : 2 * (part - 5)), second = power(part < 5 ? part : 2 * (part - 5) + 1);
#pragma unroll
    for (int i = 0; i < 8; ++i) out->code[i] = digits_of(w.digits[i], i < 4 ? first : part < 7 ? second : power(i - 4));
    set_scale(out, half_of(w.d));
  }
};

struct tq2_0 {
  static constexpr int elements = 256, bytes = 66;
  struct words {
    uint32_t d, pairs[8];
  };
  static CQSA_DEVICE words load(const char* b, int part) {
    words w;
    w.d = half_word(b + 64);
    load_words(b + part / 4 * 32, w.pairs);
    return w;
  }
  static CQSA_DEVICE void unpack(const words& w, int part, quant_codes* out) {
    const int shift = part % 4 * 2;
#pragma unroll
    for (int i = 0; i < 8; ++i) out->code[i] = less_each(w.pairs[i] >> shift & 3u * each_byte, 1);
    set_scale(out, half_of(w.d));
  }
};

// A block of 17 bytes, at any address: the 16 bytes that begin at an even one in words, and the one byte that is left.
struct mxfp4 {
  static constexpr int elements = 32, bytes = 17;
  struct words {
    uint32_t e, nibbles[4];
  };
  static CQSA_DEVICE words load(const char* b, int) {
    words w;
    const bool odd = (uintptr_t(b) & 1) != 0;
    uint32_t x[4];
    load_words(b + (odd ? 1 : 0), x);
    const uint32_t rest = *reinterpret_cast<const unsigned char*>(b + (odd ? 0 : 16)), selector = odd ? 0x3210u : 0x4321u;
    w.e = odd ? rest : x[0] & 0xffu;
#pragma unroll
    for (int i = 0; i < 4; ++i) w.nibbles[i] = pick_bytes(x[i], i < 3 ? x[i + 1] : rest, selector);
    return w;
  }
  static CQSA_DEVICE void unpack(const words& w, int, quant_codes* out) {
    constexpr table_of_16 table = make_table(quant::e2m1_values);
#pragma unroll
    for (int i = 0; i < 4; ++i) look_up(table, w.nibbles[i], &out->code[i], &out->code[4 + i]);
    set_scale(out, float_of(w.e < 2 ? 0x00200000u << w.e : (w.e - 1) << 23));  // 2^(e - 128), for doubled values
  }
};

struct nvfp4 {
  static constexpr int elements = 64, bytes = 36;
  struct words {
    uint32_t scales, nibbles[4];
  };
  static CQSA_DEVICE words load(const char* b, int part) {
    words w;
    w.scales = half_word(b + 2 * part);
    load_words(b + 4 + 16 * part, w.nibbles);
    return w;
  }
  // e4m3 without its sign, halved for doubled values; 0x7f is 0.
  static CQSA_DEVICE float scale_of(uint32_t s) { return s == 0x7fu ? 0.0f : float_of((s & 0x7fu) << 20) * 0x1p119f; }
  static CQSA_DEVICE void unpack(const words& w, int, quant_codes* out) {
    constexpr table_of_16 table = make_table(quant::e2m1_values);
#pragma unroll
    for (int i = 0; i < 4; ++i) look_up(table, w.nibbles[i], &out->code[i / 2 * 4 + i % 2], &out->code[i / 2 * 4 + i % 2 + 2]);
    set_scales(out, scale_of(w.scales & 0xffu), scale_of(w.scales >> 8));
  }
};

}  // namespace cqsa::gpu::blocks

namespace cqsa::gpu {

// f(format_constant<..>()) for the format of that number.
template <class F> CQSA_DEVICE void with_simple_format(int32_t format, const F& f) {
  switch (format) {
    case CQSA_QUANT_Q1_0: return f(format_constant<blocks::q1_0>());
    case CQSA_QUANT_Q2_0: return f(format_constant<blocks::q2_0>());
    case CQSA_QUANT_Q4_0: return f(format_constant<blocks::q4_0>());
    case CQSA_QUANT_Q4_1: return f(format_constant<blocks::q4_1>());
    case CQSA_QUANT_Q5_0: return f(format_constant<blocks::q5_0>());
    case CQSA_QUANT_Q5_1: return f(format_constant<blocks::q5_1>());
    case CQSA_QUANT_Q8_0: return f(format_constant<blocks::q8_0>());
    case CQSA_QUANT_IQ4_NL: return f(format_constant<blocks::iq4_nl>());
    case CQSA_QUANT_TQ1_0: return f(format_constant<blocks::tq1_0>());
    case CQSA_QUANT_TQ2_0: return f(format_constant<blocks::tq2_0>());
    case CQSA_QUANT_MXFP4: return f(format_constant<blocks::mxfp4>());
    case CQSA_QUANT_NVFP4: return f(format_constant<blocks::nvfp4>());
    default: return;
  }
}

}  // namespace cqsa::gpu
