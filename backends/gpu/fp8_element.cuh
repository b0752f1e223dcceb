// SPDX-License-Identifier: Apache-2.0
// FP8 one element at a time, and eight of a row together: numbers in, codes and scales out. The bits of src/dtype.h.
#pragma once

#include "element.cuh"
#include "fp8_params.h"

#include "backends/fp8_rules.h"  // needs the vendor's words of the files above

namespace cqsa::gpu {

constexpr uint32_t inf_bits = 0x7f800000u;

CQSA_DEVICE uint32_t larger_u32(uint32_t a, uint32_t b) { return a > b ? a : b; }

// ---- numbers in -------------------------------------------------------------------------------------------------------------

// A conversion in hardware would drop sign and payload of a NaN.
CQSA_DEVICE uint32_t f16_to_bits(uint32_t h) {
  const uint32_t mag = h & 0x7fffu;
  if (mag > 0x7c00u) return (h & 0x8000u) << 16 | 0x7fc00000u | (h & 0x3ffu) << 13;
  return bits_of(f16_to_f32(uint16_t(h)));
}
CQSA_DEVICE float code_to_f32(uint32_t code, int kind) {
  if (kind == kind_e4m3) return e4m3_to_f32(code);
  if (kind == kind_e5m2) return e5m2_to_f32(code);
  if (code == 0x80u) return float_of(0x7fc00000u);
  const float f = kind == kind_e4m3fnuz ? float_of((code & 0x7fu) << 20) * 0x1p119f : float_of((code & 0x7fu) << 21) * 0x1p111f;
  return float_of(bits_of(f) | (code & 0x80u) << 24);
}
CQSA_DEVICE uint32_t load_number(const char* data, int kind, int64_t i) {
  if (kind == kind_f32) return load_u32(data + 4 * i);
  if (kind == kind_bf16) return load_u16(data + 2 * i) << 16;
  if (kind == kind_f16) return f16_to_bits(load_u16(data + 2 * i));
  return bits_of(code_to_f32(reinterpret_cast<const unsigned char*>(data)[i], kind));
}

// Element (i, j), i counted over all rows of the batch.
CQSA_DEVICE int64_t place_in(const fp8_matrix& x, int64_t batch, int64_t rows, int64_t i, int64_t j) {
  if (batch == 1) return i * x.stride[1] + j * x.stride[2];
  const int64_t b = i / rows;
  return b * x.stride[0] + (i - b * rows) * x.stride[1] + j * x.stride[2];
}

// ---- codes out --------------------------------------------------------------------------------------------------------------

struct fp8_format {
  int32_t mantissa, bias;
  uint32_t last;
};
CQSA_DEVICE fp8_format format_of(int32_t format) {
  const int32_t wide = format == CQSA_DTYPE_E5M2 || format == CQSA_DTYPE_E5M2FNUZ;
  const int32_t fnuz = format == CQSA_DTYPE_E4M3FNUZ || format == CQSA_DTYPE_E5M2FNUZ;
  return {wide ? 2 : 3, (wide ? 15 : 7) + fnuz, fnuz ? 0x7fu : wide ? 0x7bu : 0x7eu};
}

// Magnitude of the code of a y that is not NaN, to nearest even; larger than the last code where y is too large. What is below the
// smallest normal number is added to one whose last place is that of the codes.
CQSA_DEVICE uint32_t nearest_magnitude(uint32_t bits, const fp8_format& f) {
  const uint32_t mag = bits & 0x7fffffffu, shift = 23 - f.mantissa;
  if (mag >= uint32_t(128 - f.bias) << 23)
    return ((mag + (1u << (shift - 1)) - 1 + (mag >> shift & 1u)) >> shift) - (uint32_t(127 - f.bias) << f.mantissa);
  const uint32_t magic = uint32_t(127 + 24 - f.bias - f.mantissa) << 23;
  return bits_of(float_of(mag) + float_of(magic)) - magic;
}

// The code that stands for a magnitude and a sign (bit 31 of bits).
CQSA_DEVICE uint32_t code_of(uint32_t magnitude, uint32_t bits, int32_t format, const fp8_format& f, bool saturate) {
  const bool fnuz = f.last == 0x7fu;
  const uint32_t sign = bits >> 24 & 0x80u;
  if (magnitude > f.last) {
    if (saturate) magnitude = f.last;
    else if (fnuz) return 0x80u;
    else magnitude = format == CQSA_DTYPE_E5M2 ? 0x7cu : 0x7fu;
  }
  return fnuz && magnitude == 0 ? 0 : sign | magnitude;
}
CQSA_DEVICE uint32_t code_of_nan(uint32_t bits, int32_t format) {
  const uint32_t sign = bits >> 24 & 0x80u;
  if (format == CQSA_DTYPE_E4M3FN) return sign | 0x7fu;
  return format == CQSA_DTYPE_E5M2 ? sign | 0x7eu | (bits >> 21 & 3u) : 0x80u;
}

// What a job says about its codes, and what turned up.
struct fp8_encoder {
  int32_t format, saturate, at_random;
  int64_t seed, offset;
};
struct fp8_counts {
  uint32_t nan, infinite, saturated;
};

// The code of the number with these bits, times scale; e numbers the element of x. The product of a NaN would lose its sign.
CQSA_DEVICE uint32_t encode_number(uint32_t x, float scale, const fp8_encoder& how, uint64_t e, fp8_counts* counts) {
  const fp8_format f = format_of(how.format);
  const uint32_t mag = x & 0x7fffffffu;
  if (mag > inf_bits) return ++counts->nan, code_of_nan(x, how.format);
  const float y = product_f32(float_of(x), scale);
  const uint32_t magnitude = how.at_random ? fp8::magnitude_at_random(y, how.format, fp8::random_word(how.seed, how.offset, e)) : nearest_magnitude(bits_of(y), f);
  if (mag == inf_bits) ++counts->infinite;
  else if (magnitude > f.last) ++counts->saturated;
  return code_of(magnitude, x, how.format, f, how.saturate != 0);
}

// ---- vectors ----------------------------------------------------------------------------------------------------------------

// A vector is 16 bytes of x: four numbers of f32, eight of 16 bits. All that is fast takes whole aligned vectors; loops over the elements take the rest.
template <int Kind> constexpr int per_vector = Kind == kind_f32 ? 4 : 8;
CQSA_DEVICE int numbers_of(int kind) { return kind == kind_f32 ? 4 : 8; }

// What fast conversions do with a format: they saturate, and make numbers of the largest finite magnitude of what is not a number.
struct fp8_fast {
  uint32_t wide, last, least, magic, shift, base;
};
CQSA_DEVICE fp8_fast fast_of(int32_t format) {
  if (format == CQSA_DTYPE_E5M2) return {1, 0x47600000u, 113u << 23, 21u << 23, 21, 113u << 2};
  return {0, 0x43e00000u, 121u << 23, 20u << 23, 20, 121u << 3};
}

// The code of a magnitude that is not NaN: added to a power of two whose last place is that of the code, it is rounded.
CQSA_DEVICE uint32_t fast_magnitude(float y, const fp8_fast& f) {
  const uint32_t bits = bits_of(y) & 0x7fffffffu, mag = bits < f.last ? bits : f.last, binade = larger_u32(mag & inf_bits, f.least), magic = binade + f.magic;
  return bits_of(float_of(mag) + float_of(magic)) - magic + (binade >> f.shift) - f.base;
}
CQSA_DEVICE uint32_t first_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) { return pick_bytes(pick_bytes(a, b, 0x0040u), pick_bytes(c, d, 0x0040u), 0x5410u); }
CQSA_DEVICE uint32_t last_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) { return pick_bytes(pick_bytes(a, b, 0x0073u), pick_bytes(c, d, 0x0073u), 0x5410u); }

// Four numbers, none of them NaN, saturated to nearest even, as one word. Where hardware does it, Wide says which format, otherwise f.
template <bool Wide> CQSA_DEVICE uint32_t encode_four(float a, float b, float c, float d, const fp8_fast& f) {
  if constexpr (has_fp8) {
    const uint32_t low = Wide ? pack_e5m2(a, b) : pack_e4m3(a, b), high = Wide ? pack_e5m2(c, d) : pack_e4m3(c, d);
    return low | high << 16;
  } else {
    const uint32_t codes = first_bytes(fast_magnitude(a, f), fast_magnitude(b, f), fast_magnitude(c, f), fast_magnitude(d, f));
    return codes | (last_bytes(bits_of(a), bits_of(b), bits_of(c), bits_of(d)) & 0x80808080u);
  }
}

// Element i of some words; of a NaN not all bits.
template <int Kind> CQSA_DEVICE float number_of(const uint32_t* w, int i) {
  if constexpr (Kind == kind_f32) return float_of(w[i]);
  else if constexpr (Kind == kind_bf16) return float_of(i & 1 ? w[i / 2] & 0xffff0000u : w[i / 2] << 16);
  else return f16_to_f32(uint16_t(w[i / 2] >> 16 * (i & 1)));
}

// Largest magnitudes, in the order of which bits are: of f32, or two of 16 bits, which are taken together as long as possible.
CQSA_DEVICE uint32_t most_of_two(uint32_t a, uint32_t b, bool f32) { return f32 ? larger_u32(a, b) : max_u16x2(a, b); }
// .. as bits of f32.
CQSA_DEVICE uint32_t most_bits(uint32_t most, int kind) {
  if (kind == kind_f32) return most;
  const uint32_t half = larger_u32(most & 0xffffu, most >> 16);
  return kind == kind_bf16 ? half << 16 : f16_to_bits(half);
}
CQSA_DEVICE uint32_t most_of_words(const uint32_t* w, int n, bool f32) {
  uint32_t most = 0;
  if (f32) {
#pragma unroll
    for (int i = 0; i < n; ++i) most = larger_u32(most, w[i] & 0x7fffffffu);
  } else {
#pragma unroll
    for (int i = 0; i < n; ++i) most = max_u16x2(most, w[i] & 0x7fff7fffu);
  }
  return most;
}
// NaN and infinities as 0, so that they do not count.
CQSA_DEVICE void drop_strange(uint32_t* w, int n, int kind) {
  const uint32_t inf = kind == kind_bf16 ? 0x7f80u : 0x7c00u;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    if (kind == kind_f32) {
      if ((w[i] & 0x7fffffffu) >= inf_bits) w[i] = 0;
      continue;
    }
    if ((w[i] & 0x7fffu) >= inf) w[i] &= 0xffff0000u;
    if ((w[i] >> 16 & 0x7fffu) >= inf) w[i] &= 0xffffu;
  }
}

struct alignas(8) word_pair {
  uint32_t x[2];
};
// Eight numbers, or with one scale each.
template <int Kind, bool Wide> CQSA_DEVICE word_pair encode8(const uint32_t* w, const float (&scale)[8], const fp8_fast& f) {
  float y[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = product_f32(number_of<Kind>(w, i), scale[i]);
  return {{encode_four<Wide>(y[0], y[1], y[2], y[3], f), encode_four<Wide>(y[4], y[5], y[6], y[7], f)}};
}
template <int Kind, bool Wide> CQSA_DEVICE word_pair encode8(const uint32_t* w, float scale, const fp8_fast& f) {
  const float all[8] = {scale, scale, scale, scale, scale, scale, scale, scale};
  return encode8<Kind, Wide>(w, all, f);
}
// A vector of x as codes; what f32 has of them is in the first word.
template <int Kind, bool Wide> CQSA_DEVICE word_pair encode_vector(const loaded16& x, float scale, const fp8_fast& f) {
  if constexpr (Kind != kind_f32) return encode8<Kind, Wide>(x.x, scale, f);
  return {{encode_four<Wide>(product_f32(float_of(x.x[0]), scale), product_f32(float_of(x.x[1]), scale), product_f32(float_of(x.x[2]), scale),
                             product_f32(float_of(x.x[3]), scale), f), 0}};
}

// ---- scales -----------------------------------------------------------------------------------------------------------------

CQSA_DEVICE float plain_nan(float x) { return (bits_of(x) & 0x7fffffffu) > inf_bits ? float_of(0x7fc00000u) : x; }

// f32_to_e8m0fnu() of src/dtype.h: the next power of two.
CQSA_DEVICE uint32_t e8m0_of(float x) {
  const uint32_t bits = bits_of(x);
  if (bits << 1 == 0) return 0;
  if (bits >= inf_bits) return 0xffu;
  if (bits < 0x00800000u) return bits > 0x00400000u ? 1u : 0u;
  const uint32_t code = (bits >> 23) + ((bits & 0x7fffffu) ? 1u : 0u);
  return code > 0xfeu ? 0xfeu : code;
}
CQSA_DEVICE float e8m0_to_f32(uint32_t code) { return float_of(code == 0xffu ? 0x7fc00000u : code == 0 ? 0x00400000u : code << 23); }

CQSA_DEVICE char* scale_place(const fp8_grid& g, int64_t r, int64_t c, int64_t columns) {
  if (g.layout == CQSA_FP8_SCALES_PACKED) return g.data + 4 * (r * g.stride[0] + c / 4 * g.stride[1]) + c % 4;
  if (g.layout == CQSA_FP8_SCALES_TILED) {
    const int64_t tile = r / 128 * ((columns + 3) / 4) + c / 4, y = r % 128;
    return g.data + tile * 512 + y % 32 * 16 + y / 32 * 4 + c % 4;
  }
  return g.data + (g.bytes ? 1 : 4) * (r * g.stride[0] + c * g.stride[1]);
}
CQSA_DEVICE bool has_bytes(const fp8_grid& g) { return g.bytes || g.layout != CQSA_FP8_SCALES_STRIDED; }
CQSA_DEVICE float load_scale(const fp8_grid& g, int64_t r, int64_t c, int64_t columns) {
  const char* const from = scale_place(g, r, c, columns);
  return has_bytes(g) ? e8m0_to_f32(*reinterpret_cast<const unsigned char*>(from)) : float_of(load_u32(from));
}
CQSA_DEVICE void store_scale(const fp8_grid& g, int64_t r, int64_t c, int64_t columns, float x) {
  if (!g.data) return;
  char* const to = scale_place(g, r, c, columns);
  if (has_bytes(g)) *to = char(e8m0_of(x));
  else store_u32(to, bits_of(plain_nan(x)));
}

// Both numbers of a pair, by one piece of code.
template <class Side> CQSA_DEVICE void store_scales(const Side& side, int64_t r, int64_t c, float scale, float scale_inv) {
#pragma unroll 1
  for (int k = 0; k < 2; ++k) store_scale(k ? side.scale_inv : side.scale, r, c, side.columns, k ? scale_inv : scale);
}

// What a layout has besides scales is 0. Thread `first` of `step` of them.
CQSA_DEVICE void clear_padding(const fp8_grid& g, int64_t rows, int64_t columns, int64_t first, int64_t step) {
  if (!g.data || g.layout == CQSA_FP8_SCALES_STRIDED) return;
  const int64_t wide = (columns + 3) / 4 * 4, high = g.layout == CQSA_FP8_SCALES_TILED ? (rows + 127) / 128 * 128 : rows;
  for (int64_t i = first; i < high * wide; i += step) {
    const int64_t r = i / wide, c = i - r * wide;
    if (r >= rows || c >= columns) *scale_place(g, r, c, columns) = 0;
  }
}

// ---- groups of rows ---------------------------------------------------------------------------------------------------------

// Values are taken as they must be: never falling, from 0 to at most all rows.
CQSA_DEVICE int64_t group_begin(const void* groups, int bytes, int64_t stride, int64_t g, int64_t rows) {
  return clamp_i64(load_index(groups, bytes, g * stride), 0, rows);
}
// The group of a row before the end of the last: the last one that begins at or before it.
CQSA_DEVICE int64_t group_of(const void* groups, int bytes, int64_t stride, int64_t count, int64_t row, int64_t rows) {
  int64_t low = 0, high = count - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (group_begin(groups, bytes, stride, middle, rows) <= row) low = middle;
    else high = middle - 1;
  }
  return low;
}

}  // namespace cqsa::gpu
