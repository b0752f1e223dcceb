// SPDX-License-Identifier: Apache-2.0
// Eight-bit codes to pairs of halves, all exact: eight bits of int8, four of e4m3fn and three of e5m2 fit the significands of f16
// and bf16, and so do their ranges.
#pragma once

#include "backends/cuda/sm80/mma.cuh"
#include "backends/gpu/element.cuh"

namespace cqsa::gpu::decode {

CQSA_DEVICE uint32_t half_bits(float x, int to) { return to == kind_f16 ? uint32_t(f32_to_f16(x)) : f32_to_bf16(x); }

// The same one by one, for words with a code that stands for NaN or Inf.
template <int Kind, int To> CQSA_DEVICE void decode_slowly(uint32_t word, uint32_t* low, uint32_t* high) {
  uint32_t x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = half_bits(decode_u8(word >> 8 * i & 0xffu, Kind), To);
  *low = x[0] | x[1] << 16;
  *high = x[2] | x[3] << 16;
}

// Two codes, each in the upper byte of its half.
template <int Kind, int To> CQSA_DEVICE uint32_t decode_two(uint32_t x) {
  constexpr uint32_t signs = 0x80008000u;
  if constexpr (Kind == kind_e5m2 && To == kind_f16) {
    return x;  // f16 without its last eight bits
  } else if constexpr (Kind == kind_e5m2) {
    return fma_bf16x2((x >> 3 & 0x0fe00fe0u) | (x & signs), 0x77807780u, signs);  // exponents are 2^112 too low
  } else if constexpr (To == kind_f16) {
    return fma_f16x2((x >> 1 & 0x3f803f80u) | (x & signs), 0x5c005c00u, signs);   // 2^8
  } else {
    return fma_bf16x2((x >> 4 & 0x07f007f0u) | (x & signs), 0x7b807b80u, signs);  // 2^120
  }
}

// Codes 0, 1 and codes 2, 3 of a word.
template <int Kind, int To> CQSA_DEVICE void decode_four(uint32_t word, uint32_t* low, uint32_t* high) {
  if constexpr (Kind == kind_i8 && To == kind_f16) {
    // 1024 + (code + 128), minus 1152.
    const uint32_t x = word ^ 0x80808080u;
    *low = fma_f16x2(permute_bytes(x, 0x64646464u, 0x4140), 0x3c003c00u, 0xe480e480u);
    *high = fma_f16x2(permute_bytes(x, 0x64646464u, 0x4342), 0x3c003c00u, 0xe480e480u);
  } else if constexpr (Kind == kind_i8) {
    // 128 + the lower seven bits, minus 128 or, where the sign bit is set, 256.
    const uint32_t x = permute_bytes(word, 0x43434343u, 0x4140), y = permute_bytes(word, 0x43434343u, 0x4342);
    *low = fma_bf16x2(x & 0xff7fff7fu, 0x3f803f80u, (x & 0xff80ff80u) | 0x80008000u);
    *high = fma_bf16x2(y & 0xff7fff7fu, 0x3f803f80u, (y & 0xff80ff80u) | 0x80008000u);
  } else {
    *low = decode_two<Kind, To>(permute_bytes(word, 0, 0x1404));
    *high = decode_two<Kind, To>(permute_bytes(word, 0, 0x3424));
    if constexpr (Kind == kind_e5m2 && To == kind_f16) return;
    const uint32_t beyond = Kind == kind_e4m3 ? 0x01010101u : 0x04040404u;
    if (((word & 0x7f7f7f7fu) + beyond) & 0x80808080u) decode_slowly<Kind, To>(word, low, high);
  }
}

template <int Kind> CQSA_DEVICE uint32_t pack(float low, float high) { return Kind == kind_f16 ? pack_f16(low, high) : pack_bf16(low, high); }

template <int Kind> CQSA_DEVICE float half_value(uint32_t bits) { return Kind == kind_f16 ? f16_to_f32(uint16_t(bits)) : bf16_to_f32(bits & 0xffffu); }

// A word of two halves with NaN and Inf made zero, and whether there were any.
template <int Kind> CQSA_DEVICE uint32_t without_nan(uint32_t x, bool* found) {
  constexpr uint32_t top = Kind == kind_f16 ? 0x7c00u : 0x7f80u;
  const bool low = (x & top) == top, high = (x >> 16 & top) == top;
  *found = *found || low || high;
  return x & (low ? 0xffff0000u : 0xffffffffu) & (high ? 0xffffu : 0xffffffffu);
}

}  // namespace cqsa::gpu::decode
