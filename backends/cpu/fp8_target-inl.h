// SPDX-License-Identifier: Apache-2.0
// The lines of one instruction set, each by the fastest loop that is for it.
#pragma once

#include "fp8-inl.h"
#include "fp8_bf16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cqsa::cpu {
namespace {
namespace HWY_NAMESPACE {

static void encode_any(const void* x, cqsa_dtype type, int64_t n, int64_t group, const float* scales, const fp8_coding* how, uint8_t* to) {
  switch (how->format) {
    case CQSA_DTYPE_E4M3FN: return encode_to<e4m3fn_of>(x, type, n, group, scales, how->saturate, to);
    case CQSA_DTYPE_E5M2: return encode_to<e5m2_of>(x, type, n, group, scales, how->saturate, to);
    case CQSA_DTYPE_E4M3FNUZ: return encode_to<e4m3fnuz_of>(x, type, n, group, scales, how->saturate, to);
    default: return encode_to<e5m2fnuz_of>(x, type, n, group, scales, how->saturate, to);
  }
}

#if defined(CQSA_FP8_BF16)
// False: not a line for it.
template <class F> static bool encode_fast(const uint16_t* x, int64_t n, int64_t group, const float* scales, bool streams, uint8_t* to, uint32_t* most) {
  if (group < codes_of_step) return false;
  for (int64_t i = 0; i < n; i += group) *most = larger(*most, encode_bf16<F>(x + i, min64(group, n - i), scales[i / group], streams, to + i));
  return true;
}
#endif

static void encode(const void* x, cqsa_dtype type, int64_t n, int64_t group, const float* scales, const fp8_coding* how, uint8_t* to, uint32_t* most) {
  uint32_t seen = 0;
  bool done = false;
#if defined(CQSA_FP8_BF16)
  const bool fast = type == CQSA_DTYPE_BF16 && how->saturate;
  if (fast && how->format == CQSA_DTYPE_E4M3FN) done = encode_fast<e4m3fn_of>((const uint16_t*)x, n, group, scales, how->streams, to, &seen);
  else if (fast && how->format == CQSA_DTYPE_E5M2) done = encode_fast<e5m2_of>((const uint16_t*)x, n, group, scales, how->streams, to, &seen);
#endif
  if (!done) encode_any(x, type, n, group, scales, how, to);
  if (!most) return;
  if (done && !(how->finite && seen >= uint32_t(infinite_bits))) *most = larger(*most, seen);
  else largest(x, type, n, n, how->finite, most);
}

// Rounds as to_bf16() does; the one NaN needs no care.
static inline void put(float x, float* to) { *to = x; }
static inline void put(float x, uint16_t* to) {
  const uint32_t bits = uint32_t(bits_of(x));
  *to = uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

template <class F, class T> static void decode_run(const uint8_t* HWY_RESTRICT codes, int64_t n, float scale, T* HWY_RESTRICT to) {
  for (int64_t i = 0; i < n; ++i) {
    const float x = decode_one<F>(codes[i]) * scale;
    put(float_of((bits_of(x) & 0x7fffffff) > infinite_bits ? 0x7fc00000 : bits_of(x)), to + i);
  }
}

template <class T> static void decode_to(const uint8_t* codes, cqsa_dtype format, int64_t n, float scale, T* to) {
  switch (format) {
    case CQSA_DTYPE_E4M3FN: return decode_run<e4m3fn_of>(codes, n, scale, to);
    case CQSA_DTYPE_E5M2: return decode_run<e5m2_of>(codes, n, scale, to);
    case CQSA_DTYPE_E4M3FNUZ: return decode_run<e4m3fnuz_of>(codes, n, scale, to);
    default: return decode_run<e5m2fnuz_of>(codes, n, scale, to);
  }
}

static void decode(const uint8_t* codes, cqsa_dtype format, int64_t n, float scale, cqsa_dtype type, void* to) {
  if (type == CQSA_DTYPE_F32) decode_to(codes, format, n, scale, (float*)to);
  else decode_to(codes, format, n, scale, (uint16_t*)to);
}

static void finish() {
#if defined(CQSA_FP8_BF16)
  hwy::FlushStream();
#endif
}

constexpr fp8_target lines_of_target = {load_line, save_line, multiply_line, silu_line, largest, encode, sum_line, transpose, decode, finish};

}  // namespace HWY_NAMESPACE
}  // namespace
}  // namespace cqsa::cpu
HWY_AFTER_NAMESPACE();
