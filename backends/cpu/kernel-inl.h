// SPDX-License-Identifier: Apache-2.0
// The two products and the softmax of one block of rows with one tile of keys.
//
// A block is MR vectors of query rows: a lane is a row, so that nothing is ever summed across lanes, the softmax is
// vertical, and a row's bits cannot depend on its neighbours. Keys and values are read one scalar at a time and broadcast.
// Every sum runs over its index in order, whatever the register blocking is.
#pragma once

#include "simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cqsa::cpu {
namespace {
namespace HWY_NAMESPACE {

// Registers: 24 accumulators of 32 where there are 32, 12 of 16 otherwise.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int block_vectors = 4;
constexpr int accumulators = 24;
#else
constexpr int block_vectors = 2;
constexpr int accumulators = 12;
#endif
constexpr int block_rows = block_vectors * lanes;

// What one lane multiplies: here an f32 by an f32. The sums of pairs of bf16 (pairs-inl.h) have the same shape with dwords for
// floats, two depths or two keys at a time, and only another `dot`.
struct f32_dot {
  static constexpr bool gained = false;  // sums of values need no factor: load_tile has applied it
  static HWY_INLINE vf broadcast(const float* p) { return set(*p); }
  static HWY_INLINE vf dot(vf x, vf y, vf sum) { return fma(x, y, sum); }
};

// s[key][MR vectors] = sum over depth of k[key][.] * qt[.][MR vectors], NK keys.
template <class D, int MR, int NK>
HWY_INLINE void qk_keys(const float* HWY_RESTRICT qt, const float* HWY_RESTRICT k, int64_t ldk, int64_t depth,
                        float* HWY_RESTRICT s) {
  vf sum[NK][MR];
#pragma GCC unroll 16
  for (int n = 0; n < NK; ++n)
#pragma GCC unroll 4
    for (int r = 0; r < MR; ++r) sum[n][r] = zero();
  const float* key[NK];
#pragma GCC unroll 16
  for (int n = 0; n < NK; ++n) key[n] = k + n * ldk;
  for (int64_t d = 0; d < depth; ++d) {
    vf q[MR];
#pragma GCC unroll 4
    for (int r = 0; r < MR; ++r) q[r] = load(qt + (d * MR + r) * lanes);
#pragma GCC unroll 16
    for (int n = 0; n < NK; ++n) {
      const vf x = D::broadcast(key[n] + d);
#pragma GCC unroll 4
      for (int r = 0; r < MR; ++r) sum[n][r] = D::dot(q[r], x, sum[n][r]);
    }
  }
#pragma GCC unroll 16
  for (int n = 0; n < NK; ++n)
#pragma GCC unroll 4
    for (int r = 0; r < MR; ++r) store(sum[n][r], s + (n * MR + r) * lanes);
}

template <class D, int MR, int NK>
HWY_INLINE void qk_tail(int64_t keys, const float* qt, const float* k, int64_t ldk, int64_t depth, float* s) {
  if constexpr (NK > 0) {
    if (keys == NK) qk_keys<D, MR, NK>(qt, k, ldk, depth, s);
    else qk_tail<D, MR, NK - 1>(keys, qt, k, ldk, depth, s);
  }
}

template <class D, int MR>
HWY_NOINLINE void qk(const float* qt, const float* k, int64_t ldk, int64_t depth, int64_t keys, float* s) {
  constexpr int NK = accumulators / MR > 8 ? 8 : accumulators / MR;
  int64_t j = 0;
  for (; j + NK <= keys; j += NK) qk_keys<D, MR, NK>(qt, k + j * ldk, ldk, depth, s + j * MR * lanes);
  // One key at a time would be bound by latency for many: halve the tail first.
  constexpr int H = NK / 2;
  if (keys - j >= H) {
    qk_keys<D, MR, H>(qt, k + j * ldk, ldk, depth, s + j * MR * lanes);
    j += H;
  }
  qk_tail<D, MR, (H > 1 ? H - 1 : 1)>(keys - j, qt, k + j * ldk, ldk, depth, s + j * MR * lanes);
}

// acc[channel][MR vectors] = acc * alpha + sum over keys of v[key][channel] * p[key][MR vectors], NC channels. The tile is
// summed by itself first: the error then grows with the number of tiles, not of keys. gain: factor of the tile's sums.
template <class D, int MR, int NC>
HWY_INLINE void pv_channels(const float* HWY_RESTRICT p, const float* HWY_RESTRICT v, int64_t ldv, int64_t keys,
                            const float* HWY_RESTRICT alpha, float gain, float* HWY_RESTRICT acc) {
  vf sum[NC][MR];
#pragma GCC unroll 16
  for (int n = 0; n < NC; ++n)
#pragma GCC unroll 4
    for (int r = 0; r < MR; ++r) sum[n][r] = zero();
  for (int64_t j = 0; j < keys; ++j) {
    vf x[MR];
#pragma GCC unroll 4
    for (int r = 0; r < MR; ++r) x[r] = load(p + (j * MR + r) * lanes);
#pragma GCC unroll 16
    for (int n = 0; n < NC; ++n) {
      const vf y = D::broadcast(v + j * ldv + n);
#pragma GCC unroll 4
      for (int r = 0; r < MR; ++r) sum[n][r] = D::dot(x[r], y, sum[n][r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < MR; ++r) {
    const vf a = load(alpha + r * lanes);
#pragma GCC unroll 16
    for (int n = 0; n < NC; ++n) {
      float* to = acc + (n * MR + r) * lanes;
      const vf part = D::gained ? mul(sum[n][r], set(gain)) : sum[n][r];
      store(fma(load(to), a, part), to);
    }
  }
}

template <class D, int MR, int NC>
HWY_INLINE void pv_tail(int64_t channels, const float* p, const float* v, int64_t ldv, int64_t keys, const float* alpha,
                        float gain, float* acc) {
  if constexpr (NC > 0) {
    if (channels == NC) pv_channels<D, MR, NC>(p, v, ldv, keys, alpha, gain, acc);
    else pv_tail<D, MR, NC - 1>(channels, p, v, ldv, keys, alpha, gain, acc);
  }
}

template <class D, int MR>
HWY_NOINLINE void pv(const float* p, const float* v, int64_t ldv, int64_t channels, int64_t keys, const float* alpha,
                     float gain, float* acc) {
  constexpr int NC = accumulators / MR > 8 ? 8 : accumulators / MR;
  int64_t c = 0;
  while (channels - c >= NC) {
    // A short rest has too few sums to hide the latency of one: share the last two blocks evenly.
    const int64_t rest = channels - c - NC;
    if (rest > 0 && rest < (NC + 1) / 2) {
      constexpr int L = NC - (NC + 1) / 2 + 1;
      pv_channels<D, MR, L>(p, v + c, ldv, keys, alpha, gain, acc + c * MR * lanes);
      c += L;
      break;
    }
    pv_channels<D, MR, NC>(p, v + c, ldv, keys, alpha, gain, acc + c * MR * lanes);
    c += NC;
  }
  pv_tail<D, MR, NC - 1>(channels - c, p, v + c, ldv, keys, alpha, gain, acc + c * MR * lanes);
}

// The same sums in the same order where v may hold NaN or Inf under hidden keys, whose p is marked as -0.
template <int MR>
HWY_NOINLINE void pv_careful(const float* p, const float* v, int64_t ldv, int64_t channels, int64_t keys,
                             const float* alpha, float* acc) {
  for (int64_t c = 0; c < channels; ++c)
    for (int r = 0; r < MR; ++r) {
      vf sum = zero();
      for (int64_t j = 0; j < keys; ++j) {
        const vf x = load(p + (j * MR + r) * lanes);
        sum = fma(x, select(same_bits(x, INT32_MIN), zero(), set(v[j * ldv + c])), sum);
      }
      float* to = acc + (c * MR + r) * lanes;
      store(fma(load(to), load(alpha + r * lanes), sum), to);
    }
}

// The largest of old and a column of logits.
template <int MR>
HWY_INLINE vf column_top(const float* col, int64_t keys, vf old) {
  constexpr int step = MR * lanes;
  vf a = old, b = set(-__builtin_inff());
  int64_t j = 0;
  for (; j + 2 <= keys; j += 2) {
    a = vmax(a, load(col + j * step));
    b = vmax(b, load(col + (j + 1) * step));
  }
  if (j < keys) a = vmax(a, load(col + j * step));
  return vmax(a, b);
}

struct full_exp {
  HWY_INLINE vf operator()(vf x) const { return exp(x); }
};

// From logits to probabilities in place; m, l and alpha of the block follow.
template <int MR, bool careful, class E = full_exp>
HWY_NOINLINE void softmax(float* HWY_RESTRICT s, int64_t keys, float* HWY_RESTRICT m, float* HWY_RESTRICT l,
                          float* HWY_RESTRICT alpha) {
  const vf none = set(-__builtin_inff());
  for (int r = 0; r < MR; ++r) {
    float* col = s + r * lanes;
    constexpr int step = MR * lanes;
    const vf old = load(m + r * lanes);
    const vf top = column_top<MR>(col, keys, old);
    // A row that has seen no key yet: any finite reference does, since every p is exp(-inf) = 0.
    const vf ref = select(eq(top, none), zero(), top);
    const vf scale = E()(sub(old, ref));
    vf sum0 = zero(), sum1 = zero();
    for (int64_t j = 0; j < keys; ++j) {
      const vf x = load(col + j * step);
      vf p = E()(sub(x, ref));
      if (j & 1) sum1 = add(sum1, p);
      else sum0 = add(sum0, p);
      if (careful) p = select(eq(x, none), set(-0.0f), p);
      store(p, col + j * step);
    }
    store(top, m + r * lanes);
    store(fma(load(l + r * lanes), scale, add(sum0, sum1)), l + r * lanes);
    store(scale, alpha + r * lanes);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace
}  // namespace cqsa::cpu
HWY_AFTER_NAMESPACE();
