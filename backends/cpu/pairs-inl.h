// SPDX-License-Identifier: Apache-2.0
// Products of bf16 with sums in f32, where the CPU has instructions for them: two at a time in each lane of AVX-512 BF16, or
// 32 at a time in each element of an AMX tile (CQSA_TILES).
//
// A dword holds a pair of bf16, the lower index in its lower half. Layouts (lanes are query rows, as everywhere):
//   q [depth / 2][rows]    k [key][depth / 2]    s [key][rows] f32
//   p [key / 2][rows]      v [key / 2][channel], with tiles turned around: [channel][key / 2]
#pragma once

#include "convert-inl.h"
#include "kernel-inl.h"

#include <immintrin.h>

#if defined(CQSA_TILES)
#include "tiles-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace cqsa::cpu {
namespace {
namespace HWY_NAMESPACE {

// e^x for weights, in ten instructions instead of fourteen: 2^floor(y) 2^(y - floor(y)), y = x log2(e), without a second part of
// the constant. So the relative error is |x| 2^-24 and 2 ulp, which p, |x| and all, is too small to show. e^0 is exactly 1.
struct weight_exp {
  HWY_INLINE vf operator()(vf x) const {
    const __m512 y = _mm512_mul_ps(x.raw, _mm512_set1_ps(1.44269504f));
    // Of -inf it is 0, and 2^-inf 0 as it should be; NaN stays.
    const vf r{_mm512_reduce_ps(y, 1)};
    vf g = fma(set(0.0002161291631637141f), r, set(0.0012467845808714628f));
    g = fma(g, r, set(0.009675451554358006f));
    g = fma(g, r, set(0.055485282093286514f));
    g = fma(g, r, set(0.2402293086051941f));
    g = fma(g, r, set(0.6931470632553101f));
    g = fma(g, r, set(1.0f));
    return vf{_mm512_scalef_ps(g.raw, y)};
  }
};

// p to bf16, to nearest. A tie goes up: one in 65536, and p is never negative. Pairs two keys.
HWY_INLINE void store_pair(vf even, vf odd, uint32_t* to) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even.raw), half), 16);
  const __m512i high = _mm512_add_epi32(_mm512_castps_si512(odd.raw), half);
  const __m512i upper = _mm512_set1_epi32(int32_t(0xffff0000u));
  _mm512_store_si512(to, _mm512_ternarylogic_epi32(upper, high, low, 0xca));  // upper ? high : low
}

// Rows of pairs past the last key, up to `pairs`, of column r.
template <int MR> HWY_INLINE void clear_pairs(uint32_t* col, int64_t from, int64_t pairs) {
  for (int64_t i = from; i < pairs; ++i) _mm512_store_si512(col + i * MR * lanes, _mm512_setzero_si512());
}

// softmax() of kernel-inl.h with the same sums, for logits that still lack a positive factor, which leaves p as pairs in the
// memory of s: pair i of a vector is written when the keys 2i and 2i + 1 of that vector have been read.
template <int MR>
HWY_NOINLINE void softmax_pairs(float* s, int64_t keys, int64_t pairs, float factor, float* HWY_RESTRICT m,
                                float* HWY_RESTRICT l, float* HWY_RESTRICT alpha) {
  const vf none = set(-__builtin_inff()), f = set(factor);
  constexpr int step = MR * lanes;
  for (int r = 0; r < MR; ++r) {
    float* col = s + r * lanes;
    uint32_t* out = (uint32_t*)col;
    const vf old = load(m + r * lanes);
    const vf top = vmax(old, mul(column_top<MR>(col, keys, none), f));
    const vf ref = select(eq(top, none), zero(), top);
    const vf scale = weight_exp()(sub(old, ref));
    vf sum0 = zero(), sum1 = zero();
    int64_t j = 0;
    for (; j + 2 <= keys; j += 2) {
      const vf a = weight_exp()(sub(mul(load(col + j * step), f), ref)), b = weight_exp()(sub(mul(load(col + (j + 1) * step), f), ref));
      sum0 = add(sum0, a);
      sum1 = add(sum1, b);
      store_pair(a, b, out + j / 2 * step);
    }
    if (j < keys) {
      const vf a = weight_exp()(sub(mul(load(col + j * step), f), ref));
      sum0 = add(sum0, a);
      store_pair(a, zero(), out + j / 2 * step);
    }
    clear_pairs<MR>(out, (keys + 1) / 2, pairs);
    store(top, m + r * lanes);
    store(fma(load(l + r * lanes), scale, add(sum0, sum1)), l + r * lanes);
    store(scale, alpha + r * lanes);
  }
}

// p in f32 to pairs, times a factor for each key where there are some. careful: p of hidden keys is marked as -0.
template <int MR, bool careful>
HWY_NOINLINE void pack_p(const float* p, int64_t keys, int64_t pairs, const float* factor, uint32_t* to) {
  const vf quiet = set(__builtin_nanf(""));  // store_pair would carry a NaN of all ones over into a number
  auto weight = [&](int64_t j, int r) HWY_ATTR {
    const vf x = load(p + (j * MR + r) * lanes);
    vf w = x;
    if (factor) {
      w = mul(x, set(factor[j]));
      w = select(eq(w, w), w, quiet);
    }
    return careful ? select(same_bits(x, INT32_MIN), zero(), w) : w;
  };
  for (int r = 0; r < MR; ++r) {
    uint32_t* col = to + r * lanes;
    int64_t j = 0;
    for (; j + 2 <= keys; j += 2) store_pair(weight(j, r), weight(j + 1, r), col + j / 2 * MR * lanes);
    if (j < keys) store_pair(weight(j, r), zero(), col + j / 2 * MR * lanes);
    clear_pairs<MR>(col, (keys + 1) / 2, pairs);
  }
}

// s[key] = first ? part[key] * factor[key] : s[key] + part[key] * factor[key]
template <int MR>
HWY_NOINLINE void add_scores(const float* part, int64_t keys, const float* factor, bool first, float* s) {
  for (int64_t j = 0; j < keys; ++j)
    for (int r = 0; r < MR; ++r) {
      const int64_t i = (j * MR + r) * lanes;
      const vf x = load(part + i), f = set(factor[j]);
      store(first ? mul(x, f) : fma(x, f, load(s + i)), s + i);
    }
}

// Two rows of bf16 to one of pairs. b may be NULL: zeros.
static void join_rows(const uint16_t* HWY_RESTRICT a, const uint16_t* HWY_RESTRICT b, int64_t n, uint32_t* HWY_RESTRICT to) {
  if (b)
    for (int64_t c = 0; c < n; ++c) to[c] = uint32_t(a[c]) | uint32_t(b[c]) << 16;
  else
    for (int64_t c = 0; c < n; ++c) to[c] = a[c];
}

#if defined(CQSA_TILES)

// Keys and depths are multiplied 32 at a time, channels 16.
constexpr int64_t pair_step = 16;

// C[NA * 16][NB * 16] = A B. A's groups of 16 rows are `a_group` bytes apart, B's of 16 lanes 64 bytes.
template <int NA, int NB>
HWY_INLINE void multiply_tiles(const char* a, int64_t a_step, int64_t a_group, const char* b, int64_t b_step, int64_t pairs) {
  tile_zero<0>();
  if constexpr (NB > 1) tile_zero<1>();
  if constexpr (NA > 1) tile_zero<2>();
  if constexpr (NA > 1 && NB > 1) tile_zero<3>();
  for (int64_t i = 0; i < pairs; i += pair_step) {
    tile_load<4>(a + i * 4, a_step);
    tile_load<6>(b + i * b_step, b_step);
    if constexpr (NB > 1) tile_load<7>(b + i * b_step + 64, b_step);
    tile_dp_bf16<0, 4, 6>();
    if constexpr (NB > 1) tile_dp_bf16<1, 4, 7>();
    if constexpr (NA > 1) {
      tile_load<5>(a + i * 4 + a_group, a_step);
      tile_dp_bf16<2, 5, 6>();
      if constexpr (NB > 1) tile_dp_bf16<3, 5, 7>();
    }
  }
}
template <int NA, int NB> HWY_INLINE void store_tiles(char* c, int64_t c_step) {
  tile_store<0>(c, c_step);
  if constexpr (NB > 1) tile_store<1>(c + 64, c_step);
  if constexpr (NA > 1) tile_store<2>(c + 16 * c_step, c_step);
  if constexpr (NA > 1 && NB > 1) tile_store<3>(c + 16 * c_step + 64, c_step);
}

// Logits of `keys` keys, rounded up to 16. ldk in dwords.
template <int MR>
HWY_NOINLINE void qk_pairs(const uint32_t* q, const uint32_t* k, int64_t ldk, int64_t depth2, int64_t keys, float* s) {
  constexpr int NB = MR > 1 ? 2 : 1;
  constexpr int64_t width = MR * 64;  // bytes
  for (int64_t j = 0; j < keys; j += 32)
    for (int r = 0; r < MR; r += NB) {
      const char *a = (const char*)(k + j * ldk), *b = (const char*)q + r * 64;
      char* c = (char*)s + j * width + r * 64;
      if (keys - j > 16) {
        multiply_tiles<2, NB>(a, ldk * 4, ldk * 64, b, width, depth2);
        store_tiles<2, NB>(c, width);
      } else {
        multiply_tiles<1, NB>(a, ldk * 4, 0, b, width, depth2);
        store_tiles<1, NB>(c, width);
      }
    }
}

// acc = acc * alpha + part * gain for some channels of NB vectors of a block of MR.
template <int MR, int NB>
HWY_INLINE void add_part(const float* part, int64_t channels, const float* alpha, float gain, float* acc) {
  const vf g = set(gain);
  for (int r = 0; r < NB; ++r) {
    const vf a = load(alpha + r * lanes);
#pragma GCC unroll 4
    for (int64_t c = 0; c < channels; ++c) {
      float* to = acc + (c * MR + r) * lanes;
      store(fma(load(to), a, mul(load(part + (c * NB + r) * lanes), g)), to);
    }
  }
}

// As pv() of kernel-inl.h. v: [channel][ldv dwords]; part: room for two times two by two tiles. The sums of a block are added
// while the next one is multiplied: reading a tile back at once would wait for its store.
template <int MR>
HWY_NOINLINE void pv_pairs(const uint32_t* p, const uint32_t* v, int64_t ldv, int64_t channels, int64_t pairs,
                           const float* alpha, float gain, float* part, float* acc) {
  constexpr int NB = MR > 1 ? 2 : 1;
  constexpr int64_t room = 4 * 256;
  int64_t done = 0, last_c = 0, last_r = 0;
  auto add_last = [&]() HWY_ATTR {
    add_part<MR, NB>(part + (done & 1) * room, min64(channels - last_c, 32), alpha + last_r * lanes, gain,
                     acc + (last_c * MR + last_r) * lanes);
  };
  for (int64_t c = 0; c < channels; c += 32)
    for (int r = 0; r < MR; r += NB) {
      const char *a = (const char*)(v + c * ldv), *b = (const char*)p + r * 64;
      char* to = (char*)(part + (~done & 1) * room);
      if (channels - c > 16) {
        multiply_tiles<2, NB>(a, ldv * 4, ldv * 64, b, MR * 64, pairs);
        store_tiles<2, NB>(to, NB * 64);
      } else {
        multiply_tiles<1, NB>(a, ldv * 4, 0, b, MR * 64, pairs);
        store_tiles<1, NB>(to, NB * 64);
      }
      if (done > 0) add_last();
      ++done, last_c = c, last_r = r;
    }
  add_last();
}

// to[c][i] = from[i][c] for 16 x 16 dwords.
static void turn_16(const uint32_t* from, int64_t from_step, uint32_t* to, int64_t to_step) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_load_si512(from + i * from_step);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  // Now a[4g + n]: of each block of four columns column n, rows 4g .. 4g + 3.
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 4
  for (int n = 0; n < 4; ++n) {
    const __m512i even01 = _mm512_shuffle_i32x4(a[n], a[n + 4], 0x88), odd01 = _mm512_shuffle_i32x4(a[n], a[n + 4], 0xdd);
    const __m512i even23 = _mm512_shuffle_i32x4(a[n + 8], a[n + 12], 0x88);
    const __m512i odd23 = _mm512_shuffle_i32x4(a[n + 8], a[n + 12], 0xdd);
    _mm512_store_si512(to + n * to_step, _mm512_shuffle_i32x4(even01, even23, 0x88));
    _mm512_store_si512(to + (n + 8) * to_step, _mm512_shuffle_i32x4(even01, even23, 0xdd));
    _mm512_store_si512(to + (n + 4) * to_step, _mm512_shuffle_i32x4(odd01, odd23, 0x88));
    _mm512_store_si512(to + (n + 12) * to_step, _mm512_shuffle_i32x4(odd01, odd23, 0xdd));
  }
}

static inline void open_products() { tile_config(); }
static inline void close_products() { tile_release(); }

#else

constexpr int64_t pair_step = 1;

struct pair_dot {
  typedef int32_t __attribute__((may_alias)) dword;
  static constexpr bool gained = true;
  static HWY_INLINE vf broadcast(const float* p) { return vf{_mm512_castsi512_ps(_mm512_set1_epi32(*(const dword*)p))}; }
  static HWY_INLINE vf dot(vf x, vf y, vf sum) { return vf{_mm512_dpbf16_ps(sum.raw, (__m512bh)x.raw, (__m512bh)y.raw)}; }
};

template <int MR>
HWY_INLINE void qk_pairs(const uint32_t* q, const uint32_t* k, int64_t ldk, int64_t depth2, int64_t keys, float* s) {
  qk<pair_dot, MR>((const float*)q, (const float*)k, ldk, depth2, keys, s);
}
template <int MR>
HWY_INLINE void pv_pairs(const uint32_t* p, const uint32_t* v, int64_t ldv, int64_t channels, int64_t pairs,
                         const float* alpha, float gain, float*, float* acc) {
  pv<pair_dot, MR>((const float*)p, (const float*)v, ldv, channels, pairs, alpha, gain, acc);
}
static inline void open_products() {}
static inline void close_products() {}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace
}  // namespace cqsa::cpu
HWY_AFTER_NAMESPACE();
