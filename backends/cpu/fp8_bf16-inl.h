// SPDX-License-Identifier: Apache-2.0
// The line that is asked for most: bf16 by one scale to e4m3fn or e5m2, saturated, and its largest element with it. As encode_one() in
// fp8-inl.h, on the even and the odd elements of a vector of bf16; what is the same for both is done in 16 bits.
#pragma once

#include "fp8-inl.h"

#if defined(__AVX2__)
#define CQSA_FP8_BF16 1

#include <hwy/cache_control.h>

HWY_BEFORE_NAMESPACE();
namespace cqsa::cpu {
namespace {
namespace HWY_NAMESPACE {

using du16_t = hn::ScalableTag<uint16_t>;
using du32_t = hn::ScalableTag<uint32_t>;
using vu16 = hn::Vec<du16_t>;
using vu32 = hn::Vec<du32_t>;
constexpr du16_t du16{};
constexpr du32_t du32{};
constexpr int64_t codes_of_step = HWY_MAX_BYTES;  // two vectors of bf16, one of codes

// Two vectors of small numbers to one of bytes, in order.
HWY_INLINE hn::Vec<hn::ScalableTag<uint8_t>> pack_bytes(vu16 a, vu16 b) {
#if defined(__AVX512BW__)
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  return {_mm512_permutexvar_epi64(order, _mm512_packus_epi16(a.raw, b.raw))};
#else
  return {_mm256_permute4x64_epi64(_mm256_packus_epi16(a.raw, b.raw), 0xd8)};
#endif
}

// Magnitudes of 32-bit numbers to codes plus a constant, in the low half; the high half is of no use.
template <class F> HWY_INLINE vu32 encode_magnitudes(vu32 mag, vf scale) {
  const vu32 y = hn::BitCast(du32, mul(hn::BitCast(df, mag), scale));
  const vu32 capped = hn::Min(y, hn::Set(du32, uint32_t(F::most)));
  const vu32 e = hn::Max(hn::And(capped, hn::Set(du32, uint32_t(infinite_bits))), hn::Set(du32, uint32_t(F::least)));
  const vu32 magic = hn::Add(e, hn::Set(du32, uint32_t(F::shift) << 23));
  const vu32 sum = hn::BitCast(du32, add(hn::BitCast(df, capped), hn::BitCast(df, magic)));
  return hn::Add(hn::Sub(sum, e), hn::ShiftRight<F::shift>(e));
}

template <class F> HWY_INLINE vu16 encode_vector(vu16 x, vf scale, vu16& most) {
  constexpr uint16_t excess = uint16_t(uint32_t(F::least) >> F::shift);  // the constant
  const vu16 mag = hn::And(x, hn::Set(du16, uint16_t(0x7fff)));
  most = hn::Max(most, mag);
  const vu32 pairs = hn::BitCast(du32, mag);
  const vu32 even = encode_magnitudes<F>(hn::ShiftLeft<16>(pairs), scale);
  const vu32 odd = encode_magnitudes<F>(hn::And(pairs, hn::Set(du32, 0xffff0000u)), scale);
  const vu16 both = hn::OddEven(hn::BitCast(du16, hn::ShiftLeft<16>(odd)), hn::BitCast(du16, even));
  const vu16 sign = hn::And(hn::ShiftRight<8>(x), hn::Set(du16, uint16_t(0x80)));
  return hn::Or(hn::Sub(both, hn::Set(du16, excess)), sign);
}

// Whole steps of n elements; `most` is their largest magnitude, as bf16. Codes of NaN are wrong.
template <class F, bool Streams> static int64_t encode_steps(const uint16_t* HWY_RESTRICT x, int64_t n, float scale, uint8_t* HWY_RESTRICT to, uint16_t* most) {
  const hn::ScalableTag<uint8_t> du8;
  const vf factor = set(scale);
  vu16 a_most = hn::Zero(du16), b_most = hn::Zero(du16);
  int64_t i = 0;
  for (; i + codes_of_step <= n; i += codes_of_step) {
    const vu16 a = encode_vector<F>(hn::LoadU(du16, x + i), factor, a_most);
    const vu16 b = encode_vector<F>(hn::LoadU(du16, x + i + codes_of_step / 2), factor, b_most);
    if (Streams) hn::Stream(pack_bytes(a, b), du8, to + i);
    else hn::StoreU(pack_bytes(a, b), du8, to + i);
  }
  alignas(64) uint16_t each[codes_of_step / 2];
  hn::Store(hn::Max(a_most, b_most), du16, each);
  for (const uint16_t m : each) *most = m > *most ? m : *most;
  return i;
}

// What stands before the first whole vector of codes in memory, and after the last.
template <class F> static void encode_few(const uint16_t* x, int64_t n, float scale, uint8_t* to, uint16_t* most) {
  encode_run<F, true>(x, n, scale, to);
  const uint16_t largest = uint16_t(largest_run<false>(x, n) >> 16);
  *most = largest > *most ? largest : *most;
}

template <class F> static uint32_t encode_bf16(const uint16_t* x, int64_t n, float scale, bool streams, uint8_t* to) {
  uint16_t most = 0;
  const int64_t head = streams ? min64(n, int64_t(-uintptr_t(to) % uintptr_t(codes_of_step))) : 0;
  if (head > 0) encode_few<F>(x, head, scale, to, &most);
  const int64_t done = head + (streams ? encode_steps<F, true>(x + head, n - head, scale, to + head, &most)
                                       : encode_steps<F, false>(x + head, n - head, scale, to + head, &most));
  if (done < n) encode_few<F>(x + done, n - done, scale, to + done, &most);
  if (most > 0x7f80) encode_run<F, true>(x, n, scale, to);  // there is a NaN
  return uint32_t(most) << 16;
}

}  // namespace HWY_NAMESPACE
}  // namespace
}  // namespace cqsa::cpu
HWY_AFTER_NAMESPACE();
#endif
