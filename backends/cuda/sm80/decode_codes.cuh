// SPDX-License-Identifier: Apache-2.0
// Eight-bit codes to pairs of halves, all exact: eight bits of int8, four of e4m3fn and three of e5m2 fit the significands of f16
// and bf16, and so do their ranges.
#pragma once

#include "backends/cuda/sm80/mma.cuh"
#include "backends/gpu/element.cuh"

namespace cqsa::gpu::decode {

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

// What makes NaN of the code for it, or gives Inf and NaN their exponent, in the halves that have them.
template <int Kind> CQSA_DEVICE uint32_t topmost(uint32_t x) {
  const uint32_t found = ((x & 0x7f007f00u) + (Kind == kind_e4m3 ? 0x01000100u : 0x04000400u)) & 0x80008000u;
  return found - (found >> (Kind == kind_e4m3 ? 15 : 8));
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
    if (((word & 0x7f7f7f7fu) + beyond) & 0x80808080u) {
      *low |= topmost<Kind>(permute_bytes(word, 0, 0x1404));
      *high |= topmost<Kind>(permute_bytes(word, 0, 0x3424));
    }
  }
}

template <int Kind>
CQSA_DEVICE uint32_t pack(float low, float high) {
  return Kind == kind_f16 ? pack_f16(low, high) : pack_bf16(low, high);
}

// Which halves of a word are NaN, +Inf or -Inf: 1 there, 0 elsewhere. Without any of them the word as it is.
enum class special { nan, plus, minus };
template <int Type> struct half_word {
  static constexpr uint32_t top = Type == kind_f16 ? 0x7c00u : 0x7f80u, one = Type == kind_f16 ? 0x3c00u : 0x3f80u;
  CQSA_DEVICE static bool is_special(uint32_t half) { return (half & top) == top; }
  CQSA_DEVICE static bool any(uint32_t x) { return is_special(x) || is_special(x >> 16); }
  CQSA_DEVICE static uint32_t finite(uint32_t x) {
    return x & (is_special(x) ? 0xffff0000u : 0xffffffffu) & (is_special(x >> 16) ? 0xffffu : 0xffffffffu);
  }
  CQSA_DEVICE static bool is(special what, uint32_t half) {
    if (what == special::nan) return (half & 0x7fffu) > top;
    return (half & 0xffffu) == (what == special::plus ? top : top | 0x8000u);
  }
  CQSA_DEVICE static uint32_t ones(special what, uint32_t x) {
    return (is(what, x & 0xffffu) ? one : 0u) | (is(what, x >> 16) ? one << 16 : 0u);
  }
  // Of weights: those that are not hidden (-0) and have the sign.
  CQSA_DEVICE static uint32_t seen(uint32_t x, bool negative) {
    return seen_half(x & 0xffffu, negative) | seen_half(x >> 16, negative) << 16;
  }
  CQSA_DEVICE static uint32_t seen_half(uint32_t half, bool negative) {
    return half != 0x8000u && (half >> 15 != 0) == negative ? one : 0u;
  }
};

}  // namespace cqsa::gpu::decode
