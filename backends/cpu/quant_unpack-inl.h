// SPDX-License-Identifier: Apache-2.0
// Blocks of every quantized format as int8 codes, a scale for each group of them and, where a format has one, a minimum: value = scale * code - min, which
// are the operations of the reference decoders, so the bits are theirs. docs/quant.md has the layouts. The loops are plain: the compiler vectorises
// them for the flags of the file that includes this.
#pragma once

#include "backends/quant_codebooks.h"
#include "convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cqsa::cpu {
namespace {
namespace HWY_NAMESPACE {

// One block. Group g is codes g * group to (g + 1) * group - 1 and has scale[g], min[g]. Whoever wants the codes elsewhere has a struct with a pointer to there.
struct unpacked {
  alignas(64) int8_t code[256];
  alignas(64) float scale[16], min[16];
};

static inline uint16_t word_at(const uint8_t* b) {
  uint16_t x;
  memcpy(&x, b, 2);
  return x;
}
static inline uint32_t dword_at(const uint8_t* b) {
  uint32_t x;
  memcpy(&x, b, 4);
  return x;
}
static inline float half_of(uint16_t bits) {
  float x;
  widen(bits & 0x7fffu, uint32_t(bits & 0x8000u) << 16, 13, 0x1p112f, 0x7c00u, 0x7f800000u, &x);
  return x;
}
static inline float half_at(const uint8_t* b) { return half_of(word_at(b)); }

// 32 nibbles, the low ones of 16 bytes first.
static inline void nibbles_16(const uint8_t* HWY_RESTRICT b, int8_t* HWY_RESTRICT to) {
#if defined(CQSA_PLAIN_VECTORS)
  for (int i = 0; i < 16; ++i) to[i] = int8_t(b[i] & 15), to[16 + i] = int8_t(b[i] >> 4);
#else
  const hn::FixedTag<uint8_t, 16> d;
  const hn::FixedTag<uint16_t, 8> d16;
  const auto bytes = hn::LoadU(d, b), low = hn::Set(d, 15);
  hn::StoreU(hn::And(bytes, low), d, (uint8_t*)to);
  hn::StoreU(hn::And(hn::BitCast(d, hn::ShiftRight<4>(hn::BitCast(d16, bytes))), low), d, (uint8_t*)to + 16);
#endif
}
// 64 nibbles, the low ones of 32 bytes first.
static inline void nibbles_32(const uint8_t* HWY_RESTRICT b, int8_t* HWY_RESTRICT to) {
  for (int i = 0; i < 32; ++i) to[i] = int8_t(b[i] & 15), to[32 + i] = int8_t(b[i] >> 4);
}
// 128 pairs of bits, the lowest of 32 bytes first.
static inline void pairs_32(const uint8_t* HWY_RESTRICT b, int8_t* HWY_RESTRICT to) {
  for (int part = 0; part < 4; ++part)
    for (int i = 0; i < 32; ++i) to[32 * part + i] = int8_t(b[i] >> 2 * part & 3);
}

// Codes of 4 bits to their values.
static inline void look_up(const int8_t (&table)[16], int n, int8_t* codes) {
#if defined(CQSA_PLAIN_VECTORS)
  for (int i = 0; i < n; ++i) codes[i] = table[codes[i]];
#else
  const hn::FixedTag<int8_t, 16> d;
  const auto values = hn::LoadU(d, table);
  for (int i = 0; i < n; i += 16) hn::StoreU(hn::TableLookupBytes(values, hn::LoadU(d, codes + i)), d, codes + i);
#endif
}

constexpr uint64_t each_byte = 0x0101010101010101u;

// The signs, a bit each, on eight values of 1 to 127: no byte borrows from the next.
static inline uint64_t with_signs(uint64_t values, uint8_t signs) {
  const uint64_t one = (((signs * each_byte) & 0x8040201008040201u) + 0x7f * each_byte) >> 7 & each_byte, all = one * 0xff;
  return (values ^ all) + one;
}
static inline void put(uint64_t values, int8_t* to) { memcpy(to, &values, 8); }
// 16 bits as eight pairs, a byte each.
static inline uint64_t eight_pairs(uint64_t x) {
  x = (x | x << 24) & 0x000000ff000000ffu;
  x = (x | x << 12) & 0x000f000f000f000fu;
  return (x | x << 6) & 3 * each_byte;
}

// ---- one scale for a block ----------------------------------------------------------------------------------------------------

struct q1_0 {
  enum { elements = 128, bytes = 18, group = 128, has_min = 0 };
  template <class To> static void unpack(const uint8_t* b, To* u) {
    u->scale[0] = half_at(b);
    for (int i = 0; i < 16; ++i) put(with_signs(each_byte, uint8_t(~b[2 + i])), u->code + 8 * i);
  }
};

struct q2_0 {
  enum { elements = 64, bytes = 18, group = 64, has_min = 0 };
  template <class To> static void unpack(const uint8_t* b, To* u) {
    u->scale[0] = half_at(b);
    for (int i = 0; i < 8; ++i) put(eight_pairs(word_at(b + 2 + 2 * i)), u->code + 8 * i);
    for (int i = 0; i < 64; ++i) u->code[i] = int8_t(u->code[i] - 1);
  }
};

struct q4_0 {
  enum { elements = 32, bytes = 18, group = 32, has_min = 0 };
  template <class To> static void unpack(const uint8_t* b, To* u) {
    u->scale[0] = half_at(b);
    nibbles_16(b + 2, u->code);
    for (int i = 0; i < 32; ++i) u->code[i] = int8_t(u->code[i] - 8);
  }
};

struct q4_1 {
  enum { elements = 32, bytes = 20, group = 32, has_min = 1 };
  template <class To> static void unpack(const uint8_t* b, To* u) {
    u->scale[0] = half_at(b), u->min[0] = -half_at(b + 2);
    nibbles_16(b + 4, u->code);
  }
};

static inline void add_fifth_bits(uint32_t bits, int8_t* codes) {
  for (int i = 0; i < 32; ++i) codes[i] = int8_t(codes[i] | (bits >> i & 1) << 4);
}

struct q5_0 {
  enum { elements = 32, bytes = 22, group = 32, has_min = 0 };
  template <class To> static void unpack(const uint8_t* b, To* u) {
    u->scale[0] = half_at(b);
    nibbles_16(b + 6, u->code);
    add_fifth_bits(dword_at(b + 2), u->code);
    for (int i = 0; i < 32; ++i) u->code[i] = int8_t(u->code[i] - 16);
  }
};

struct q5_1 {
  enum { elements = 32, bytes = 24, group = 32, has_min = 1 };
  template <class To> static void unpack(const uint8_t* b, To* u) {
    u->scale[0] = half_at(b), u->min[0] = -half_at(b + 2);
    nibbles_16(b + 8, u->code);
    add_fifth_bits(dword_at(b + 4), u->code);
  }
};

struct q8_0 {
  enum { elements = 32, bytes = 34, group = 32, has_min = 0 };
  template <class To> static void unpack(const uint8_t* b, To* u) {
    u->scale[0] = half_at(b);
    memcpy(u->code, b + 2, 32);
  }
};

struct iq4_nl {
  enum { elements = 32, bytes = 18, group = 32, has_min = 0 };
  template <class To> static void unpack(const uint8_t* b, To* u) {
    u->scale[0] = half_at(b);
    nibbles_16(b + 2, u->code);
    look_up(quant::iq4_values, 32, u->code);
  }
};

// Digits of base 3, n of them in each of `count` bytes; the first digits of all come first.
static inline void trits(const uint8_t* b, int count, int n, int8_t* to) {
  uint8_t power = 1;
  for (int digit = 0; digit < n; ++digit, power = uint8_t(3 * power))
    for (int i = 0; i < count; ++i) *to++ = int8_t((uint8_t(b[i] * power) * 3 >> 8) - 1);
}

struct tq1_0 {
  enum { elements = 256, bytes = 54, group = 256, has_min = 0 };
  template <class To> static void unpack(const uint8_t* b, To* u) {
    u->scale[0] = half_at(b + 52);
    trits(b, 32, 5, u->code);
    trits(b + 32, 16, 5, u->code + 160);
    trits(b + 48, 4, 4, u->code + 240);
  }
};

struct tq2_0 {
  enum { elements = 256, bytes = 66, group = 256, has_min = 0 };
  template <class To> static void unpack(const uint8_t* b, To* u) {
    u->scale[0] = half_at(b + 64);
    for (int i = 0; i < 2; ++i) pairs_32(b + 32 * i, u->code + 128 * i);
    for (int i = 0; i < 256; ++i) u->code[i] = int8_t(u->code[i] - 1);
  }
};

struct mxfp4 {
  enum { elements = 32, bytes = 17, group = 32, has_min = 0 };
  template <class To> static void unpack(const uint8_t* b, To* u) {
    const uint32_t bits = b[0] < 2 ? 0x00200000u << b[0] : uint32_t(b[0] - 1) << 23;
    memcpy(u->scale, &bits, 4);
    nibbles_16(b + 1, u->code);
    look_up(quant::e2m1_values, 32, u->code);
  }
};

// e4m3 without its sign, halved; 0x7f is 0.
static inline float nvfp4_scale(uint8_t s) {
  const uint32_t mag = s & 0x7fu;
  float x;
  widen(mag, 0, 20, 0x1p120f, 0x80u, 0, &x);
  return s == 0x7f ? 0.0f : x * 0.5f;
}

struct nvfp4 {
  enum { elements = 64, bytes = 36, group = 16, has_min = 0 };
  template <class To> static void unpack(const uint8_t* b, To* u) {
    for (int g = 0; g < 4; ++g) {
      u->scale[g] = nvfp4_scale(b[g]);
      uint64_t bytes;
      memcpy(&bytes, b + 4 + 8 * g, 8);
      put(bytes & 15 * each_byte, u->code + 16 * g), put(bytes >> 4 & 15 * each_byte, u->code + 16 * g + 8);
    }
    look_up(quant::e2m1_values, 64, u->code);
  }
};

// ---- K: scales of scales --------------------------------------------------------------------------------------------------------

struct q2_k {
  enum { elements = 256, bytes = 84, group = 16, has_min = 1 };
  template <class To> static void unpack(const uint8_t* b, To* u) {
    const float d = half_at(b + 80), least = half_at(b + 82);
    for (int g = 0; g < 16; ++g) u->scale[g] = d * float(b[g] & 15), u->min[g] = least * float(b[g] >> 4);
    for (int i = 0; i < 2; ++i) pairs_32(b + 16 + 32 * i, u->code + 128 * i);
  }
};

struct q3_k {
  enum { elements = 256, bytes = 110, group = 16, has_min = 0 };
  template <class To> static void unpack(const uint8_t* b, To* u) {
    const uint8_t* const s = b + 96;
    const float d = half_at(b + 108);
    for (int g = 0; g < 16; ++g) {
      const int low = g < 8 ? s[g] & 15 : s[g - 8] >> 4, high = s[8 + g % 4] >> g / 4 * 2 & 3;
      u->scale[g] = d * float((low | high << 4) - 32);
    }
    for (int i = 0; i < 2; ++i) pairs_32(b + 32 + 32 * i, u->code + 128 * i);
    for (int part = 0; part < 8; ++part)
      for (int i = 0; i < 32; ++i) u->code[32 * part + i] = int8_t(u->code[32 * part + i] + (b[i] >> part & 1) * 4 - 4);
  }
};

// Of Q4_K and Q5_K: d, least, eight scales and eight minima of 6 bits each in 12 bytes.
template <class To> static inline void scales_k(const uint8_t* b, To* u) {
  const float d = half_at(b), least = half_at(b + 2);
  const uint8_t* const s = b + 4;
  for (int g = 0; g < 4; ++g) {
    u->scale[g] = d * float(s[g] & 63), u->min[g] = least * float(s[g + 4] & 63);
    u->scale[g + 4] = d * float((s[g + 8] & 15) | s[g] >> 6 << 4), u->min[g + 4] = least * float(s[g + 8] >> 4 | s[g + 4] >> 6 << 4);
  }
}

struct q4_k {
  enum { elements = 256, bytes = 144, group = 32, has_min = 1 };
  template <class To> static void unpack(const uint8_t* b, To* u) {
    scales_k(b, u);
    for (int i = 0; i < 4; ++i) nibbles_32(b + 16 + 32 * i, u->code + 64 * i);
  }
};

struct q5_k {
  enum { elements = 256, bytes = 176, group = 32, has_min = 1 };
  template <class To> static void unpack(const uint8_t* b, To* u) {
    scales_k(b, u);
    for (int i = 0; i < 4; ++i) nibbles_32(b + 48 + 32 * i, u->code + 64 * i);
    for (int part = 0; part < 8; ++part)
      for (int i = 0; i < 32; ++i) u->code[32 * part + i] = int8_t(u->code[32 * part + i] | (b[16 + i] >> part & 1) << 4);
  }
};

struct q6_k {
  enum { elements = 256, bytes = 210, group = 16, has_min = 0 };
  template <class To> static void unpack(const uint8_t* b, To* u) {
    const float d = half_at(b + 208);
    for (int g = 0; g < 16; ++g) u->scale[g] = d * float(int8_t(b[192 + g]));
    for (int h = 0; h < 2; ++h) {
      int8_t* const to = u->code + 128 * h;
      pairs_32(b + 128 + 32 * h, to);
      for (int i = 0; i < 64; ++i) {
        to[i] = int8_t((to[i] << 4 | (b[64 * h + i] & 15)) - 32);
        to[64 + i] = int8_t((to[64 + i] << 4 | b[64 * h + i] >> 4) - 32);
      }
    }
  }
};

struct iq4_xs {
  enum { elements = 256, bytes = 136, group = 32, has_min = 0 };
  template <class To> static void unpack(const uint8_t* b, To* u) {
    const float d = half_at(b);
    const unsigned high = word_at(b + 2);
    for (int g = 0; g < 8; ++g) {
      const int scale = (b[4 + g / 2] >> g % 2 * 4 & 15) | (high >> 2 * g & 3) << 4;
      u->scale[g] = d * float(scale - 32);
      nibbles_16(b + 8 + 16 * g, u->code + 32 * g);
    }
    look_up(quant::iq4_values, 256, u->code);
  }
};

// ---- IQ: codebooks ----------------------------------------------------------------------------------------------------------------

// The eighth bit makes the number of bits even.
static inline uint8_t eight_signs(uint32_t seven) {
  seven &= 127;
  uint32_t odd = seven ^ seven >> 4;
  odd ^= odd >> 2, odd ^= odd >> 1;
  return uint8_t(seven | (odd & 1) << 7);
}
static inline uint64_t two(uint32_t low, uint32_t high) { return low | uint64_t(high) << 32; }

struct iq2_xxs {
  enum { elements = 256, bytes = 66, group = 32, has_min = 0 };
  template <class To> static void unpack(const uint8_t* b, To* u) {
    const float d = half_at(b);
    for (int g = 0; g < 8; ++g) {
      const uint8_t* const part = b + 2 + 8 * g;
      const uint32_t rest = dword_at(part + 4);
      u->scale[g] = d * (0.5f + float(rest >> 28)) * 0.25f;
      for (int i = 0; i < 4; ++i) put(with_signs(quant::iq2_xxs_grid[part[i]], eight_signs(rest >> 7 * i)), u->code + 32 * g + 8 * i);
    }
  }
};

// Of IQ2_XS and IQ2_S: sixteen scales of 4 bits.
template <class To> static inline void scales_iq2(float d, const uint8_t* s, To* u) {
  for (int g = 0; g < 16; ++g) u->scale[g] = d * (0.5f + float(s[g / 2] >> g % 2 * 4 & 15)) * 0.25f;
}

struct iq2_xs {
  enum { elements = 256, bytes = 74, group = 16, has_min = 0 };
  template <class To> static void unpack(const uint8_t* b, To* u) {
    scales_iq2(half_at(b), b + 66, u);
    for (int i = 0; i < 32; ++i) {
      const uint32_t q = word_at(b + 2 + 2 * i);
      put(with_signs(quant::iq2_xs_grid[q & 511], eight_signs(q >> 9)), u->code + 8 * i);
    }
  }
};

struct iq2_s {
  enum { elements = 256, bytes = 82, group = 16, has_min = 0 };
  template <class To> static void unpack(const uint8_t* b, To* u) {
    scales_iq2(half_at(b), b + 74, u);
    for (int i = 0; i < 32; ++i) {
      const int q = b[2 + i] | (b[66 + i / 4] >> i % 4 * 2 & 3) << 8;
      put(with_signs(quant::iq2_s_grid[q], b[34 + i]), u->code + 8 * i);
    }
  }
};

struct iq3_xxs {
  enum { elements = 256, bytes = 98, group = 32, has_min = 0 };
  template <class To> static void unpack(const uint8_t* b, To* u) {
    const float d = half_at(b);
    for (int g = 0; g < 8; ++g) {
      const uint8_t* const q = b + 2 + 8 * g;
      const uint32_t rest = dword_at(b + 66 + 4 * g);
      u->scale[g] = d * (0.5f + float(rest >> 28)) * 0.5f;
      for (int i = 0; i < 4; ++i)
        put(with_signs(two(quant::iq3_xxs_grid[q[2 * i]], quant::iq3_xxs_grid[q[2 * i + 1]]), eight_signs(rest >> 7 * i)), u->code + 32 * g + 8 * i);
    }
  }
};

struct iq3_s {
  enum { elements = 256, bytes = 110, group = 32, has_min = 0 };
  template <class To> static void unpack(const uint8_t* b, To* u) {
    const float d = half_at(b);
    for (int g = 0; g < 8; ++g) u->scale[g] = d * float(1 + 2 * (b[106 + g / 2] >> g % 2 * 4 & 15));
    for (int i = 0; i < 32; ++i) {
      const int high = b[66 + i / 4] >> i % 4 * 2;
      const int q = b[2 + 2 * i] | (high & 1) << 8, r = b[3 + 2 * i] | (high & 2) << 7;
      put(with_signs(two(quant::iq3_s_grid[q], quant::iq3_s_grid[r]), b[74 + i]), u->code + 8 * i);
    }
  }
};

// -1, 0, 1 and an eighth more or less, times eight: exact, as is an eighth of the scale. Eight bytes at once, none of which carries into the next.
static inline void put_iq1(int index, bool less, int8_t* to) {
  constexpr uint64_t top = 0x80 * each_byte;
  const uint64_t eights = (quant::iq1_s_grid[index] & 0x1f * each_byte) << 3;
  put(less ? ((eights & ~top) + 0x7f * each_byte) ^ (~eights & top) : eights + each_byte, to);
}

struct iq1_s {
  enum { elements = 256, bytes = 50, group = 32, has_min = 0 };
  template <class To> static void unpack(const uint8_t* b, To* u) {
    const float d = half_at(b);
    for (int g = 0; g < 8; ++g) {
      const int high = word_at(b + 34 + 2 * g);
      u->scale[g] = d * float(2 * (high >> 12 & 7) + 1) * 0.125f;
      for (int i = 0; i < 4; ++i) put_iq1(b[2 + 4 * g + i] | (high >> 3 * i & 7) << 8, high & 0x8000, u->code + 32 * g + 8 * i);
    }
  }
};

struct iq1_m {
  enum { elements = 256, bytes = 56, group = 16, has_min = 0 };
  template <class To> static void unpack(const uint8_t* b, To* u) {
    const uint8_t* const s = b + 48;
    const float d = half_of(uint16_t(word_at(s) >> 12 | (word_at(s + 2) >> 8 & 0xf0) | (word_at(s + 4) >> 4 & 0xf00) | (word_at(s + 6) & 0xf000)));
    for (int g = 0; g < 16; ++g) {
      u->scale[g] = d * float(2 * (word_at(s + g / 4 * 2) >> g % 4 * 3 & 7) + 1) * 0.125f;
      for (int i = 0; i < 2; ++i) {
        const int high = b[32 + g] >> 4 * i;
        put_iq1(b[2 * g + i] | (high & 7) << 8, high & 8, u->code + 16 * g + 8 * i);
      }
    }
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace
}  // namespace cqsa::cpu
HWY_AFTER_NAMESPACE();
