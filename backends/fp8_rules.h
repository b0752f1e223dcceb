/* fp8_rules.h - the rules of cqsa.h section 13 that every backend follows to the bit: scales from amaxes, rings, random bits.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * For the host and for kernels alike. Conversions are not here: src/dtype.h has the oracle, and every backend its own fast ones.
 */
#pragma once

#include "cqsa.h"

#include <stdint.h>

#if defined(__CUDACC__) || defined(__HIP__)
#define CQSA_EVERYWHERE __host__ __device__ __forceinline__
#else
#define CQSA_EVERYWHERE inline
#endif

namespace cqsa::fp8 {

CQSA_EVERYWHERE uint32_t bits_of(float x) {
  union { float f; uint32_t u; } both;
  both.f = x;
  return both.u;
}
CQSA_EVERYWHERE float float_of(uint32_t bits) {
  union { uint32_t u; float f; } both;
  both.u = bits;
  return both.f;
}
// Whether an amax says anything: also false for NaN.
CQSA_EVERYWHERE bool is_finite(float x) { return (bits_of(x) & 0x7F800000u) != 0x7F800000u; }

CQSA_EVERYWHERE bool is_format(int32_t dtype) {
  return dtype == CQSA_DTYPE_E4M3FN || dtype == CQSA_DTYPE_E5M2 || dtype == CQSA_DTYPE_E4M3FNUZ || dtype == CQSA_DTYPE_E5M2FNUZ;
}
CQSA_EVERYWHERE float largest_of(int32_t format) {
  return format == CQSA_DTYPE_E4M3FN ? 448.0f : format == CQSA_DTYPE_E4M3FNUZ ? 240.0f : 57344.0f;
}
// 2^e as f32, e from -126 to 127.
CQSA_EVERYWHERE float power_of_two(int32_t e) { return float_of(static_cast<uint32_t>(e + 127) << 23); }
// 2^e, e from -127 on: the one that is subnormal too.
CQSA_EVERYWHERE float scale_inv_power(int32_t e) { return e < -126 ? float_of(0x00400000u) : power_of_two(e); }

// What a scale may be: 2^-126 to FLT_MAX, so that its reciprocal is neither 0 nor infinite. False for NaN.
CQSA_EVERYWHERE bool is_scale(float x) { return bits_of(x) >= 0x00800000u && bits_of(x) < 0x7F800000u; }
CQSA_EVERYWHERE bool is_power_of_two(float x) { return is_scale(x) && (bits_of(x) & 0x7FFFFFu) == 0; }
CQSA_EVERYWHERE float clamp_scale(float x) {
  const float least = power_of_two(-126), most = float_of(0x7F7FFFFFu);
  return x < least ? least : x > most ? most : x;
}

struct scale_rule {
  int32_t format;
  int32_t margin;
  int32_t pow2;
  float eps, limit;  // bounds of the amax; limit 0: none
};
struct scale_pair {
  float scale, scale_inv;
  int32_t exponent;  // pow2: scale_inv = 2^exponent; the E8M0 byte is exponent + 127
};

// The smallest e with largest * 2^e >= amax, amax finite and > 0.
CQSA_EVERYWHERE int32_t ceil_exponent(float amax, float largest) {
  const uint32_t a = bits_of(amax), l = bits_of(largest);
  int32_t exponent = static_cast<int32_t>(a >> 23);
  uint32_t mantissa = a & 0x7FFFFFu;
  if (exponent == 0) {  // subnormal: as if it were normal
    exponent = 1;
    while (!(mantissa & 0x800000u)) mantissa <<= 1, --exponent;
    mantissa &= 0x7FFFFFu;
  }
  return exponent - static_cast<int32_t>(l >> 23) + (mantissa > (l & 0x7FFFFFu) ? 1 : 0);
}

CQSA_EVERYWHERE scale_pair scale_of(float amax, const scale_rule& rule) {
  if (amax < rule.eps) amax = rule.eps;
  if (rule.limit > 0 && amax > rule.limit) amax = rule.limit;
  if (amax == 0 || !is_finite(amax)) return {1.0f, 1.0f, 0};
  const float largest = largest_of(rule.format);
  if (rule.pow2) {
    int32_t e = ceil_exponent(amax, largest) + rule.margin;
    e = e < -127 ? -127 : e > 126 ? 126 : e;
    return {power_of_two(-e), scale_inv_power(e), e};
  }
  // The numerator is exact, so that only the quotient rounds; it may be Inf or 0.
  const float scale = clamp_scale(largest * power_of_two(-rule.margin) / amax);
  return {scale, 1.0f / scale, 0};
}
// The scale of another format than that which `scale` was found for: ratio is the quotient of their largest numbers.
CQSA_EVERYWHERE scale_pair scale_times(float scale, float ratio) {
  scale = clamp_scale(scale * ratio);
  return {scale, 1.0f / scale, 0};
}

// What stands in a ring's memory, followed by hist_len floats.
inline constexpr uint32_t ring_magic = 0x38465143u, ring_version = 1;  // "CQF8"
struct ring_state {
  uint32_t magic, version;
  int32_t hist_len, format, margin, algorithm, pow2;
  int32_t index, refused;
  float staged;
  float scale, scale_inv;
  uint32_t reserved[4];
};
static_assert(sizeof(ring_state) == 64, "the history begins at a cache line");

CQSA_EVERYWHERE bool is_ring(const ring_state& state, const cqsa_fp8_ring& ring) {
  return state.magic == ring_magic && state.version == ring_version && state.hist_len == ring.hist_len && state.format == ring.format &&
         state.margin == ring.margin && state.algorithm == ring.algorithm && state.pow2 == ((ring.flags & CQSA_FP8_POW2) ? 1 : 0) &&
         state.index >= 0 && state.index < state.hist_len && is_scale(state.scale);
}
// What a ring takes in; an amax below 0 is none, whoever found it.
CQSA_EVERYWHERE bool is_amax(float x) { return is_finite(x) && !(x < 0); }
// An amax of a history as bits, which are in the order of amaxes; 0 for what does not count: a restored history may hold anything.
CQSA_EVERYWHERE uint32_t amax_bits(float x) { return is_amax(x) ? bits_of(x) & 0x7FFFFFFFu : 0; }

// The first bytes of a workspace. What follows is as cqsa_fp8_workspace_init() left it, zero, before and after every call.
inline constexpr uint32_t workspace_magic = 0x57465143u;  // "CQFW"
struct workspace_header {
  uint32_t magic, version;
  uint64_t bytes;
  uint32_t reserved[12];
};
static_assert(sizeof(workspace_header) == 64);

// Philox 4x32 with 10 rounds (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3, SC 2011).
struct random_words {
  uint32_t word[4];
};
CQSA_EVERYWHERE random_words philox(uint64_t seed, uint64_t counter) {
  uint32_t c[4] = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0};
  uint32_t k[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
#if defined(__CUDACC__) || defined(__HIP__)
#pragma unroll 1
#endif
  for (int round = 0; round < 10; ++round) {
    const uint64_t p = 0xD2511F53ull * c[0], q = 0xCD9E8D57ull * c[2];
    const uint32_t next[4] = {static_cast<uint32_t>(q >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(q),
                              static_cast<uint32_t>(p >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(p)};
    for (int i = 0; i < 4; ++i) c[i] = next[i];
    k[0] += 0x9E3779B9u, k[1] += 0xBB67AE85u;
  }
  return {{c[0], c[1], c[2], c[3]}};
}

// |x| = mantissa * 2^-shift units in the last place of the code, rounded at random: up with the probability of what is cut off, to 32 bits.
CQSA_EVERYWHERE uint32_t round_at_random(uint32_t mantissa, int32_t shift, uint32_t word) {
  if (shift > 32) {
    mantissa = shift > 63 ? 0 : mantissa >> (shift - 32);
    shift = 32;
  }
  return static_cast<uint32_t>((static_cast<uint64_t>(mantissa) + (word >> (32 - shift))) >> shift);
}

// The code of a finite or infinite x rounded at random, before saturation: its magnitude, larger than the largest finite code where x is too large.
// A NaN goes the way of src/dtype.h, as do the sign and what is too large.
CQSA_EVERYWHERE uint32_t magnitude_at_random(float x, int32_t format, uint32_t word) {
  const bool wide = format == CQSA_DTYPE_E5M2 || format == CQSA_DTYPE_E5M2FNUZ;
  const bool fnuz = format == CQSA_DTYPE_E4M3FNUZ || format == CQSA_DTYPE_E5M2FNUZ;
  const int32_t mantissa_bits = wide ? 2 : 3, bias = (wide ? 15 : 7) + (fnuz ? 1 : 0);
  const uint32_t mag = bits_of(x) & 0x7FFFFFFFu;
  int32_t exponent = static_cast<int32_t>(mag >> 23);
  uint32_t mantissa = mag & 0x7FFFFFu;
  if (exponent == 0) exponent = 1;
  else mantissa |= 0x800000u;
  int32_t target = exponent - 127 + bias, shift = 23 - mantissa_bits;
  if (target < 1) shift += 1 - target, target = 1;
  return round_at_random(mantissa, shift, word) + (static_cast<uint32_t>(target - 1) << mantissa_bits);
}

// Word of element e, the row-major number of an element of x, for the seed and offset of cqsa_fp8_quantize_args.rng.
CQSA_EVERYWHERE uint32_t random_word(int64_t seed, int64_t offset, uint64_t e) {
  return philox(static_cast<uint64_t>(seed), static_cast<uint64_t>(offset) + e / 4).word[e % 4];
}

}  // namespace cqsa::fp8
