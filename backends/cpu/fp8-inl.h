// SPDX-License-Identifier: Apache-2.0
// Lines of FP8 for one instruction set. Every step is an operation that is rounded by itself, or one on integers, so vectors of any
// width give the same bits; the files are compiled without contraction. The loops are plain and free of branches: the compiler
// vectorises them for the flags of the file that includes this.
#pragma once

#include "fp8_lines.h"
#include "convert-inl.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

HWY_BEFORE_NAMESPACE();
namespace cqsa::cpu {
namespace {
namespace HWY_NAMESPACE {

constexpr int32_t infinite_bits = 0x7f800000;

static inline int32_t bits_of(float x) { return __builtin_bit_cast(int32_t, x); }
static inline float float_of(int32_t bits) { return __builtin_bit_cast(float, bits); }

static inline int32_t min32(int32_t a, int32_t b) { return a < b ? a : b; }
static inline int32_t max32(int32_t a, int32_t b) { return a > b ? a : b; }

// ---- formats ----------------------------------------------------------------------------------------------------------------

// over, nan: codes of what is too large when nothing saturates, and of NaN, without the sign.
template <int Mantissa, int Bias, int Largest, int Over, int Nan, bool Fnuz> struct format_of {
  static constexpr int mantissa = Mantissa, shift = 23 - Mantissa, largest = Largest, over = Over, nan = Nan;
  static constexpr bool fnuz = Fnuz, keeps_payload = Nan == 0x7e;
  static constexpr int32_t least = (128 - Bias) << 23;  // bits of the smallest normal number
  static constexpr int32_t most = ((127 - Bias + (Largest >> Mantissa)) << 23) + ((Largest & ((1 << Mantissa) - 1)) << shift);
  static constexpr int32_t beyond = (128 - Bias + (Largest >> Mantissa)) << 23;  // a power of two above the largest
};
using e4m3fn_of = format_of<3, 7, 0x7e, 0x7f, 0x7f, false>;
using e5m2_of = format_of<2, 15, 0x7b, 0x7c, 0x7e, false>;
using e4m3fnuz_of = format_of<3, 8, 0x7f, 0x80, 0x80, true>;
using e5m2fnuz_of = format_of<2, 16, 0x7f, 0x80, 0x80, true>;

// A power of two as much larger than x as f32 is more precise than the format, or than its smallest normal number: added to x, it
// rounds x to nearest even at the code's last place, which then counts from the sum's last place.
template <class F, bool Saturate> static inline int32_t encode_one(float x) {
  const int32_t bits = bits_of(x), mag = bits & 0x7fffffff;
  const int32_t capped = min32(mag, Saturate ? F::most : F::beyond);
  const int32_t e = max32(capped & infinite_bits, F::least);
  const int32_t magic = e + (F::shift << 23);
  int32_t code = bits_of(float_of(capped) + float_of(magic)) - magic + ((e - F::least) >> F::shift);
  int32_t sign = int32_t(uint32_t(bits) >> 24) & 0x80;
  if (!Saturate) code = code > F::largest ? F::over : code;
  const int32_t nan = F::keeps_payload ? F::nan | ((mag >> 21) & 1) : F::nan;
  code = mag > infinite_bits ? nan : code;
  if (F::fnuz) sign = code == 0 ? 0 : sign;  // the code of NaN has that bit
  return code | sign;
}

template <class F> static inline float decode_one(uint8_t code) {
  const int32_t mag = code & 0x7f, sign = (code & 0x80) ? INT32_MIN : 0;
  constexpr float unit = __builtin_bit_cast(float, int32_t(F::least - (F::mantissa << 23)));  // the smallest subnormal number
  const int32_t normal = (mag << F::shift) + F::least - (1 << 23);
  int32_t bits = mag < (1 << F::mantissa) ? bits_of(float(mag) * unit) : normal;
  if (F::fnuz) bits = code == 0x80 ? 0x7fc00000 : bits | sign;
  else if (F::keeps_payload) bits = (mag > 0x7c ? 0x7fc00000 : mag == 0x7c ? infinite_bits : bits) | sign;
  else bits = (mag == 0x7f ? 0x7fc00000 : bits) | sign;
  return float_of(bits);
}

static inline float number(float x) { return x; }
static inline float number(uint16_t bf16) { return float_of(int32_t(uint32_t(bf16) << 16)); }

// ---- encode -----------------------------------------------------------------------------------------------------------------

template <class F, bool Saturate, class T>
static void encode_run(const T* HWY_RESTRICT x, int64_t n, float scale, uint8_t* HWY_RESTRICT to) {
  for (int64_t i = 0; i < n; ++i) to[i] = uint8_t(encode_one<F, Saturate>(number(x[i]) * scale));
}

template <class F, bool Saturate, class T>
static void encode_line(const T* HWY_RESTRICT x, int64_t n, int64_t group, const float* HWY_RESTRICT scales, uint8_t* HWY_RESTRICT to) {
  if (group == 1)
    for (int64_t i = 0; i < n; ++i) to[i] = uint8_t(encode_one<F, Saturate>(number(x[i]) * scales[i]));
  else
    for (int64_t i = 0; i < n; i += group) encode_run<F, Saturate>(x + i, min64(group, n - i), scales[i / group], to + i);
}

template <class F>
static void encode_to(const void* x, cqsa_dtype type, int64_t n, int64_t group, const float* scales, bool saturate, uint8_t* to) {
  const bool wide = type == CQSA_DTYPE_F32;
  if (saturate && wide) encode_line<F, true>((const float*)x, n, group, scales, to);
  else if (saturate) encode_line<F, true>((const uint16_t*)x, n, group, scales, to);
  else if (wide) encode_line<F, false>((const float*)x, n, group, scales, to);
  else encode_line<F, false>((const uint16_t*)x, n, group, scales, to);
}

// ---- amaxes -----------------------------------------------------------------------------------------------------------------

template <bool Finite> static inline int32_t magnitude(float x) {
  const int32_t mag = bits_of(x) & 0x7fffffff;
  return Finite && mag >= infinite_bits ? 0 : mag;
}
template <bool Finite> static inline uint16_t magnitude(uint16_t x) {
  const uint16_t mag = uint16_t(x & 0x7fff);
  return Finite && mag >= 0x7f80 ? uint16_t(0) : mag;
}
static inline uint32_t full_bits(int32_t mag) { return uint32_t(mag); }
static inline uint32_t full_bits(uint16_t mag) { return uint32_t(mag) << 16; }

template <bool Finite, class T> static uint32_t largest_run(const T* HWY_RESTRICT x, int64_t n) {
  decltype(magnitude<Finite>(*x)) most = 0;
  for (int64_t i = 0; i < n; ++i) {
    const auto mag = magnitude<Finite>(x[i]);
    most = mag > most ? mag : most;
  }
  return full_bits(most);
}

static inline uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

template <bool Finite, class T> static void largest_line(const T* HWY_RESTRICT x, int64_t n, int64_t group, uint32_t* HWY_RESTRICT most) {
  if (group == 1)
    for (int64_t i = 0; i < n; ++i) most[i] = uint32_t(max32(int32_t(full_bits(magnitude<Finite>(x[i]))), int32_t(most[i])));
  else
    for (int64_t i = 0; i < n; i += group) most[i / group] = larger(most[i / group], largest_run<Finite>(x + i, min64(group, n - i)));
}

static void largest(const void* x, cqsa_dtype type, int64_t n, int64_t group, bool finite, uint32_t* most) {
  const bool wide = type == CQSA_DTYPE_F32;
  if (wide && finite) largest_line<true>((const float*)x, n, group, most);
  else if (wide) largest_line<false>((const float*)x, n, group, most);
  else if (finite) largest_line<true>((const uint16_t*)x, n, group, most);
  else largest_line<false>((const uint16_t*)x, n, group, most);
}

// ---- numbers ----------------------------------------------------------------------------------------------------------------

template <class F> static void decode_line(const uint8_t* HWY_RESTRICT from, int64_t n, float* HWY_RESTRICT to) {
  for (int64_t i = 0; i < n; ++i) to[i] = decode_one<F>(from[i]);
}

static void load_codes(const char* from, cqsa_dtype type, int64_t stride, int64_t n, char* raw, float* to) {
  if (stride != 1) gather_elements(from, stride, 1, n, raw);
  const uint8_t* const codes = (const uint8_t*)(stride != 1 ? raw : from);
  switch (type) {
    case CQSA_DTYPE_E4M3FN: return decode_line<e4m3fn_of>(codes, n, to);
    case CQSA_DTYPE_E5M2: return decode_line<e5m2_of>(codes, n, to);
    case CQSA_DTYPE_E4M3FNUZ: return decode_line<e4m3fnuz_of>(codes, n, to);
    default: return decode_line<e5m2fnuz_of>(codes, n, to);
  }
}

static void load_line(const char* from, cqsa_dtype type, int64_t stride, int64_t n, char* raw, float* to) {
  if (element_bytes(type) == 1) load_codes(from, type, stride, n, raw, to);
  else load_row(from, type, stride, n, raw, to);
}

static void save_line(float* from, cqsa_dtype type, int64_t stride, int64_t n, const scalar_ops* ops, char* raw, char* to) {
  for (int64_t i = 0; i < n; ++i) from[i] = float_of((bits_of(from[i]) & 0x7fffffff) > infinite_bits ? 0x7fc00000 : bits_of(from[i]));
  store_row(from, type, stride, n, ops, raw, to);
}

static void multiply_line(float* x, float factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

// n up to fp8_line.
static void silu_line(float* HWY_RESTRICT x, const float* HWY_RESTRICT up, int64_t n) {
  alignas(64) float block[lanes];
  for (int64_t i = 0; i < n; i += lanes) {
    const int64_t count = min64(lanes, n - i);
    memset(block, 0, sizeof block);
    memcpy(block, x + i, size_t(count) * 4);
    const vf v = load(block);
    store(div(v, add(set(1.0f), exp(sub(zero(), v)))), block);
    for (int64_t k = 0; k < count; ++k) x[i + k] = block[k] * up[i + k];
  }
}

static void sum_line(const float* HWY_RESTRICT x, int64_t n, double* HWY_RESTRICT sums) {
  for (int64_t i = 0; i < n; ++i) sums[i] += double(x[i]);
}

// ---- transposition ----------------------------------------------------------------------------------------------------------

#if defined(__SSE2__)
// 16 x 16 bytes: in each of four rounds rows n and n + 8 are interleaved.
static inline void transpose_16(const uint8_t* x, int64_t stride, uint8_t* out, int64_t out_stride) {
  __m128i a[16], b[16];
  for (int n = 0; n < 16; ++n) a[n] = _mm_loadu_si128((const __m128i*)(x + n * stride));
  for (int round = 0; round < 4; ++round) {
    for (int n = 0; n < 8; ++n) {
      b[2 * n] = _mm_unpacklo_epi8(a[n], a[n + 8]);
      b[2 * n + 1] = _mm_unpackhi_epi8(a[n], a[n + 8]);
    }
    for (int n = 0; n < 16; ++n) a[n] = b[n];
  }
  for (int n = 0; n < 16; ++n) _mm_storeu_si128((__m128i*)(out + n * out_stride), a[n]);
}
#else
static inline void transpose_16(const uint8_t* x, int64_t stride, uint8_t* out, int64_t out_stride) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) out[j * out_stride + i] = x[i * stride + j];
}
#endif

static void transpose_rest(const uint8_t* x, int64_t stride, int64_t rows, int64_t columns, uint8_t* out, int64_t out_stride) {
  for (int64_t j = 0; j < columns; ++j)
    for (int64_t i = 0; i < rows; ++i) out[j * out_stride + i] = x[i * stride + j];
}

constexpr int64_t block = 64;  // a cache line of codes

static inline void store_line(const uint8_t* line, bool streams, uint8_t* to) {
#if defined(__SSE2__)
  if (streams)
    for (int n = 0; n < block; n += 16) _mm_stream_si128((__m128i*)(to + n), _mm_load_si128((const __m128i*)(line + n)));
  else memcpy(to, line, block);
#else
  (void)streams;
  memcpy(to, line, block);
#endif
}

// Strides that are powers of two bring all lines of a block into one set of the cache: every line is touched once.
static void transpose_block(const uint8_t* x, int64_t stride, uint8_t* out, int64_t out_stride, bool streams) {
  alignas(64) uint8_t from[block * block], to[block * block];
  for (int64_t i = 0; i < block; ++i) memcpy(from + i * block, x + i * stride, block);
  for (int64_t j = 0; j < block; j += 16)
    for (int64_t i = 0; i < block; i += 16) transpose_16(from + i * block + j, block, to + j * block + i, block);
  for (int64_t j = 0; j < block; ++j) store_line(to + j * block, streams, out + j * out_stride);
}

// By 16 x 16 bytes.
static void transpose_few(const uint8_t* x, int64_t stride, int64_t rows, int64_t columns, uint8_t* out, int64_t out_stride) {
  const int64_t whole_rows = rows / 16 * 16, whole_columns = columns / 16 * 16;
  for (int64_t j = 0; j < whole_columns; j += 16)
    for (int64_t i = 0; i < whole_rows; i += 16) transpose_16(x + i * stride + j, stride, out + j * out_stride + i, out_stride);
  transpose_rest(x + whole_columns, stride, whole_rows, columns - whole_columns, out + whole_columns * out_stride, out_stride);
  transpose_rest(x + whole_rows * stride, stride, rows - whole_rows, columns, out + whole_rows, out_stride);
}

static void transpose(const uint8_t* x, int64_t stride, int64_t rows, int64_t columns, bool streams, uint8_t* out, int64_t out_stride) {
  const int64_t whole_rows = rows / block * block, whole_columns = columns / block * block;
  streams = streams && (uintptr_t(out) | uintptr_t(out_stride)) % block == 0;
  for (int64_t i = 0; i < whole_rows; i += block)
    for (int64_t j = 0; j < whole_columns; j += block) transpose_block(x + i * stride + j, stride, out + j * out_stride + i, out_stride, streams);
  transpose_few(x + whole_columns, stride, whole_rows, columns - whole_columns, out + whole_columns * out_stride, out_stride);
  transpose_few(x + whole_rows * stride, stride, rows - whole_rows, columns, out + whole_rows, out_stride);
}

}  // namespace HWY_NAMESPACE
}  // namespace
}  // namespace cqsa::cpu
HWY_AFTER_NAMESPACE();
