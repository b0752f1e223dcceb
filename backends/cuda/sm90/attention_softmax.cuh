// SPDX-License-Identifier: Apache-2.0
// From logits to p in the registers of a warpgroup of the Hopper attention.
//
// A thread has two rows of the warpgroup's 64, with w = warp % 4, g = lane / 4 and l = lane % 4: rows 16 w + g + 8 r, r 0 and 1, at
// keys 8 n + 2 l and the next (wgmma.cuh). Four neighbours have a row.
#pragma once

#include "attention_memory.cuh"
#include "wgmma.cuh"

namespace cqsa::gpu::sm90 {

// The rows of a thread: largest logit so far in powers of two, which is the reference of the exponents to the bit, so that no size of it
// sets p off; and the thread's part of l.
struct thread_rows {
  float m[2], l[2];
};

// Where a row of the tile is. Rows of each warpgroup are query * heads_packed + head; where the heads do not fill all, the last ones are
// nobody's.
struct row_place {
  int head, query;  // of the tile
};
CQSA_DEVICE row_place place_of_row(const params& p, int row) {
  constexpr int nobody = 1 << 30;
  const uint32_t packed = uint32_t(p.a.heads_packed), inside = uint32_t(row) % 64, query = packed == 1 ? inside : inside / packed;
  return {int(query) < p.group_queries ? int(inside - query * packed) : nobody, int(query) + row / 64 * p.group_queries};
}
// The thread's first row of the tile; the second one is 8 further.
CQSA_DEVICE int first_row() {
  const int t = thread_now() - 128;
  return t / 128 * 64 + t / 32 % 4 * 16 + t % 32 / 4;
}

struct key_span {
  int begin;
  uint32_t count;
};
// The keys of a tile that a query sees.
CQSA_DEVICE key_span visible(const key_tile& t, int query) {
  const int lo = t.lo + query > 0 ? t.lo + query : 0, hi = t.hi + query < t.keys ? t.hi + query : t.keys;
  return {lo, hi > lo ? uint32_t(hi - lo) : 0u};
}

// Keys on missing pages.
template <class S> CQSA_DEVICE void hide_gone(const key_tile& t, float (&s)[S::keys / 2]) {
#pragma unroll
  for (int n = 0; n < S::keys / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (t.flags >> (gone_from + 8 * n / gone_keys) & 1) s[4 * n + i] = -infinity();
}
template <class S> CQSA_DEVICE void hide_logits(const params& p, const key_tile& t, float (&s)[S::keys / 2]) {
  const int column = int(lane_now()) % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const key_span seen = visible(t, place_of_row(p, first_row() + 8 * r).query);
    const int at = column - seen.begin;
#pragma unroll
    for (int n = 0; n < S::keys / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (uint32_t(at + 8 * n + i) >= seen.count) s[4 * n + 2 * r + i] = -infinity();
  }
  if (t.flags >> gone_from) hide_gone<S>(t, s);
}

template <class S> CQSA_DEVICE void cap_logits(const attention_params& p, float (&s)[S::keys / 2]) {
  const float factor = p.softmax_scale / p.softcap;
#pragma unroll
  for (int n = 0; n < S::keys / 2; ++n) s[n] = p.softcap * tanh_fast(s[n] * factor);
}

// What logits are multiplied with to be exponents of two.
CQSA_DEVICE float scale_of(const attention_params& p) { return product_f32(p.softcap > 0 ? 1.0f : p.softmax_scale, log2_of_e); }

// What a tile's softmax hands on: references of the exponents, and what the sums so far are to be multiplied with.
struct row_factors {
  float reference[2], factor[2];
};

// Moves the maxima to those of these logits. Rows side by side: an instruction waits for the one in front of it.
template <class S> CQSA_DEVICE row_factors raise_maxima(float scale, const float (&s)[S::keys / 2], thread_rows& rows) {
  float top[4] = {s[0], s[1], s[2], s[3]};  // by column, of rows 0, 0, 1, 1
#pragma unroll
  for (int n = 1; n < S::keys / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) top[i] = max_f32(top[i], s[4 * n + i]);
  row_factors out;
  float now[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) now[r] = max_f32(top[2 * r], top[2 * r + 1]);
#pragma unroll
  for (int step = 1; step < 4; step *= 2)
#pragma unroll
    for (int r = 0; r < 2; ++r) now[r] = max_f32(now[r], shuffle_xor<32>(now[r], step));
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float old = rows.m[r];
    rows.m[r] = max_f32(old, product_f32(now[r], scale));
    out.reference[r] = rows.m[r] == -infinity() ? 0.0f : rows.m[r];  // no key yet: any finite one does, since every p is 2^-inf = 0
    out.factor[r] = exp2_f32(old - out.reference[r]);
    rows.l[r] *= out.factor[r];
  }
  return out;
}

// p as the operand of the product with v: what a thread holds of the logits is just what it has to hold.
template <class S> struct packed_weights {
  uint32_t of[S::keys / 16][4];
};
template <class S, int Kind> CQSA_DEVICE void pack_weights(const float (&s)[S::keys / 2], packed_weights<S>& to) {
#pragma unroll
  for (int n = 0; n < S::keys / 4; ++n) {
    const float low = s[2 * n], high = s[2 * n + 1];
    to.of[n / 4][n % 4] = Kind == kind_f16 ? pack_f16(low, high) : pack_bf16(low, high);
  }
}

// From logits to p.
template <class S> CQSA_DEVICE void weigh(float scale, const row_factors& factors, thread_rows& rows, float (&s)[S::keys / 2]) {
  float sum[4] = {rows.l[0], 0.0f, rows.l[1], 0.0f};
#pragma unroll
  for (int n = 0; n < S::keys / 2; ++n) {
    s[n] = exp2_f32(fma_f32(s[n], scale, -factors.reference[n % 4 / 2]));
    sum[n % 4] += s[n];
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) rows.l[r] = sum[2 * r] + sum[2 * r + 1];
}

// Products with 1 are left out: no bit depends on it. Factors are at most 1, so that their distances from it do not cancel.
template <class S> CQSA_DEVICE void scale_sums(const row_factors& factors, float (&o)[S::dv / 2]) {
  if (ballot<32>((factors.factor[0] - 1.0f) + (factors.factor[1] - 1.0f) != 0.0f) == 0) return;
#pragma unroll
  for (int n = 0; n < S::dv / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) o[4 * n + i] *= factors.factor[i / 2];
}

}  // namespace cqsa::gpu::sm90
