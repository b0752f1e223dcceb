// SPDX-License-Identifier: Apache-2.0
// The IQ formats: codebooks, in blocks of 256. As in quant_simple.cuh; what is looked up is in global memory and stays in the caches.
#pragma once

#include "backends/quant_codebooks.h"
#include "quant_words.cuh"

namespace cqsa::gpu::blocks {

// 7 bits of signs for 8 elements: the eighth makes their number even.
CQSA_DEVICE uint32_t eight_signs(uint32_t seven) {
  seven &= 127u;
  const uint32_t nibble = (seven ^ seven >> 4) & 15u;
  return seven | (0x6996u >> nibble & 1u) << 7;
}
CQSA_DEVICE void put_signed(uint64_t values, uint32_t signs, uint32_t* to) {
  to[0] = with_signs(uint32_t(values), signs), to[1] = with_signs(uint32_t(values >> 32), signs >> 4);
}
CQSA_DEVICE void put_signed(uint32_t first, uint32_t second, uint32_t signs, uint32_t* to) {
  to[0] = with_signs(first, signs), to[1] = with_signs(second, signs >> 4);
}
CQSA_DEVICE float scale_iq(uint32_t d, uint32_t s, float part) { return product_f32(product_f32(half_of(d), 0.5f + float(s)), part); }

struct iq2_xxs {
  static constexpr int elements = 256, bytes = 66;
  struct words {
    uint32_t d, q[2];
  };
  static CQSA_DEVICE words load(const char* b, int part) {
    words w;
    w.d = half_word(b);
    load_words(b + 2 + 8 * part, w.q);
    return w;
  }
  static CQSA_DEVICE void unpack(const words& w, int, quant_codes* out) {
#pragma unroll
    for (int i = 0; i < 4; ++i) put_signed(quant::iq2_xxs_grid[w.q[0] >> 8 * i & 0xffu], eight_signs(w.q[1] >> 7 * i), out->code + 2 * i);
    set_scale(out, scale_iq(w.d, w.q[1] >> 28, 0.25f));
  }
};

struct iq2_xs {
  static constexpr int elements = 256, bytes = 74;
  struct words {
    uint32_t d, scales, q[2];
  };
  static CQSA_DEVICE words load(const char* b, int part) {
    words w;
    w.d = half_word(b), w.scales = byte_at(b, 66 + part);
    load_words(b + 2 + 8 * part, w.q);
    return w;
  }
  static CQSA_DEVICE void unpack(const words& w, int, quant_codes* out) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t q = w.q[i / 2] >> 16 * (i % 2) & 0xffffu;
      put_signed(quant::iq2_xs_grid[q & 511u], eight_signs(q >> 9), out->code + 2 * i);
    }
    set_scales(out, scale_iq(w.d, w.scales & 15u, 0.25f), scale_iq(w.d, w.scales >> 4, 0.25f));
  }
};

struct iq2_s {
  static constexpr int elements = 256, bytes = 82;
  struct words {
    uint32_t d, scales, low, high, signs;
  };
  static CQSA_DEVICE words load(const char* b, int part) {
    return {half_word(b), byte_at(b, 74 + part), word_at(b + 2 + 4 * part), byte_at(b, 66 + part), word_at(b + 34 + 4 * part)};
  }
  static CQSA_DEVICE void unpack(const words& w, int, quant_codes* out) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      put_signed(quant::iq2_s_grid[(w.low >> 8 * i & 0xffu) | (w.high >> 2 * i & 3u) << 8], w.signs >> 8 * i, out->code + 2 * i);
    set_scales(out, scale_iq(w.d, w.scales & 15u, 0.25f), scale_iq(w.d, w.scales >> 4, 0.25f));
  }
};

struct iq3_xxs {
  static constexpr int elements = 256, bytes = 98;
  struct words {
    uint32_t d, q[2], rest;
  };
  static CQSA_DEVICE words load(const char* b, int part) {
    words w;
    w.d = half_word(b), w.rest = word_at(b + 66 + 4 * part);
    load_words(b + 2 + 8 * part, w.q);
    return w;
  }
  static CQSA_DEVICE void unpack(const words& w, int, quant_codes* out) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t q = w.q[i / 2] >> 16 * (i % 2);
      put_signed(quant::iq3_xxs_grid[q & 0xffu], quant::iq3_xxs_grid[q >> 8 & 0xffu], eight_signs(w.rest >> 7 * i), out->code + 2 * i);
    }
    set_scale(out, scale_iq(w.d, w.rest >> 28, 0.5f));
  }
};

struct iq3_s {
  static constexpr int elements = 256, bytes = 110;
  struct words {
    uint32_t d, scale, q[2], high, signs;
  };
  static CQSA_DEVICE words load(const char* b, int part) {
    words w;
    w.d = half_word(b), w.scale = byte_at(b, 106 + part / 2) >> part % 2 * 4 & 15u;
    w.high = byte_at(b, 66 + part), w.signs = word_at(b + 74 + 4 * part);
    load_words(b + 2 + 8 * part, w.q);
    return w;
  }
  static CQSA_DEVICE void unpack(const words& w, int, quant_codes* out) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t q = w.q[i / 2] >> 16 * (i % 2), high = w.high >> 2 * i;
      put_signed(quant::iq3_s_grid[(q & 0xffu) | (high & 1u) << 8], quant::iq3_s_grid[(q >> 8 & 0xffu) | (high & 2u) << 7], w.signs >> 8 * i, out->code + 2 * i);
    }
    set_scale(out, product_f32(half_of(w.d), float(1 + 2 * w.scale)));
  }
};

// -1, 0, 1 and an eighth more or less, times eight, as an eighth of the scale is exact. With the topmost bits inverted no byte borrows from the next.
CQSA_DEVICE uint32_t eighths(uint32_t grid, bool less) {
  constexpr uint32_t top = 0x80u * each_byte;
  const uint32_t more = (grid & 0x1fu * each_byte) << 3 | each_byte;
  return ((more ^ top) - (less ? 2 * each_byte : 0)) ^ top;
}
CQSA_DEVICE void put_iq1(uint32_t index, bool less, uint32_t* to) {
  const uint64_t grid = quant::iq1_s_grid[index];
  to[0] = eighths(uint32_t(grid), less), to[1] = eighths(uint32_t(grid >> 32), less);
}

struct iq1_s {
  static constexpr int elements = 256, bytes = 50;
  struct words {
    uint32_t d, low, high;
  };
  static CQSA_DEVICE words load(const char* b, int part) { return {half_word(b), word_at(b + 2 + 4 * part), half_word(b + 34 + 2 * part)}; }
  static CQSA_DEVICE void unpack(const words& w, int, quant_codes* out) {
#pragma unroll
    for (int i = 0; i < 4; ++i) put_iq1((w.low >> 8 * i & 0xffu) | (w.high >> 3 * i & 7u) << 8, (w.high & 0x8000u) != 0, out->code + 2 * i);
    set_scale(out, product_f32(half_of(w.d), float(2 * (w.high >> 12 & 7u) + 1)) * 0.125f);
  }
};

struct iq1_m {
  static constexpr int elements = 256, bytes = 56;
  struct words {
    uint32_t low, high, scales[2];
  };
  static CQSA_DEVICE words load(const char* b, int part) {
    words w;
    w.low = word_at(b + 4 * part), w.high = half_word(b + 32 + 2 * part);
    load_words(b + 48, w.scales);
    return w;
  }
  static CQSA_DEVICE void unpack(const words& w, int part, quant_codes* out) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t high = w.high >> 4 * i;
      put_iq1((w.low >> 8 * i & 0xffu) | (high & 7u) << 8, (high & 8u) != 0, out->code + 2 * i);
    }
    const uint32_t a = w.scales[0], b = w.scales[1];
    const float d = half_of((a >> 12 & 15u) | (a >> 24 & 0xf0u) | (b >> 4 & 0xf00u) | (b >> 16 & 0xf000u));
    const uint32_t three = (part < 4 ? a : b) >> (part / 2 % 2 * 16 + part % 2 * 6);
    set_scales(out, product_f32(d, float(2 * (three & 7u) + 1)) * 0.125f, product_f32(d, float(2 * (three >> 3 & 7u) + 1)) * 0.125f);
  }
};

struct iq4_xs {
  static constexpr int elements = 256, bytes = 136;
  struct words {
    uint32_t d, scale, nibbles[4];
  };
  static CQSA_DEVICE words load(const char* b, int part) {
    words w;
    w.d = half_word(b);
    w.scale = (byte_at(b, 4 + part / 2) >> part % 2 * 4 & 15u) | (half_word(b + 2) >> 2 * part & 3u) << 4;
    load_words(b + 8 + 16 * part, w.nibbles);
    return w;
  }
  static CQSA_DEVICE void unpack(const words& w, int, quant_codes* out) {
    constexpr table_of_16 table = make_table(quant::iq4_values);
#pragma unroll
    for (int i = 0; i < 4; ++i) look_up(table, w.nibbles[i], &out->code[i], &out->code[4 + i]);
    set_scale(out, product_f32(half_of(w.d), float(int(w.scale) - 32)));
  }
};

}  // namespace cqsa::gpu::blocks

namespace cqsa::gpu {

// f(format_constant<..>()) for the format of that number.
template <class F> CQSA_DEVICE void with_iq_format(int32_t format, const F& f) {
  switch (format) {
    case CQSA_QUANT_IQ1_S: return f(format_constant<blocks::iq1_s>());
    case CQSA_QUANT_IQ1_M: return f(format_constant<blocks::iq1_m>());
    case CQSA_QUANT_IQ2_XXS: return f(format_constant<blocks::iq2_xxs>());
    case CQSA_QUANT_IQ2_XS: return f(format_constant<blocks::iq2_xs>());
    case CQSA_QUANT_IQ2_S: return f(format_constant<blocks::iq2_s>());
    case CQSA_QUANT_IQ3_XXS: return f(format_constant<blocks::iq3_xxs>());
    case CQSA_QUANT_IQ3_S: return f(format_constant<blocks::iq3_s>());
    case CQSA_QUANT_IQ4_XS: return f(format_constant<blocks::iq4_xs>());
    default: return;
  }
}

}  // namespace cqsa::gpu
