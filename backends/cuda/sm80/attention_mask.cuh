// SPDX-License-Identifier: Apache-2.0
// What hides pairs and what changes logits in the sm_80 attention, and the careful way past values that are NaN or Inf under pairs
// that are hidden.
#pragma once

#include "attention_math.cuh"

namespace cqsa::gpu::sm80 {

// The keys of a range that a block needs, relative to the first key of the range. Query n sees keys lo + n <= j < hi + n.
struct range_window {
  int first, end, lo, hi;
};

// One tile of it, relative to its first key.
struct tile_window {
  int keys, lo, hi;
};

CQSA_DEVICE range_window window_of(const attention_params& p, const block_facts& f) {
  constexpr int64_t far = int64_t(1) << 30;  // more keys than a range has
  const int64_t here = f.position - f.range.pos;
  return {int(f.first), int(f.end), int(clamp_i64(here - p.left, -far, far)), int(clamp_i64(here + p.right + 1, -far, far))};
}
CQSA_DEVICE tile_window tile_of(const range_window& w, int first, int tile_keys) {
  const int left = w.end - first;
  return {left < tile_keys ? left : tile_keys, w.lo - first, w.hi - first};
}
// Whether a key of the tile is hidden from some query.
CQSA_DEVICE bool is_partly_hidden(const tile_window& w, int queries) { return w.hi < w.keys || w.lo + queries - 1 > 0; }

// Calls f(logit, row of the tile, key of the tile, whether hidden by position) for each of a lane's logits.
template <class S, class F> CQSA_DEVICE void for_each_logit(const tile_memory<S>& mem, const tile_window& w, int warp, const F& f) {
  const int lane = thread_now() % 32;
#pragma unroll
  for (int mt = 0; mt < S::m_tiles; ++mt)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = (warp * S::m_tiles + mt) * 16 + 8 * r + lane / 4, query = mem.row_query(row);
      const int hi = w.hi + query < w.keys ? w.hi + query : w.keys, lo = w.lo + query > 0 ? w.lo + query : 0;
      const uint32_t width = hi > lo ? uint32_t(hi - lo) : 0u;
      const int at = lane % 4 * 2 - lo;
#pragma unroll
      for (int nt = 0; nt < S::keys / 8; ++nt)
#pragma unroll
        for (int i = 0; i < 2; ++i) f(mt, nt, 2 * r + i, row, nt * 8 + lane % 4 * 2 + i, CQSA_MUTANT(12) ? false : uint32_t(at + nt * 8 + i) >= width);
    }
}

template <class S> CQSA_DEVICE void hide_logits(const tile_memory<S>& mem, const tile_window& w, int warp, logit_tile<S>& x) {
  for_each_logit<S>(mem, w, warp, [&](int mt, int nt, int i, int, int, bool hidden) {
    if (hidden) x.s[mt][nt][i] = -infinity();
  });
}

// ---------------------------------------------------------------------------------------------- general kernels: logits

// Bias, or -inf under the mask, of the tile's pairs, in shared memory: neighbours read neighbouring keys.
template <class S> CQSA_DEVICE void load_addend(const attention_params& p, const tile_memory<S>& mem, const tile_window& w, int64_t tile_col) {
  const block_facts& f = mem.facts();
#pragma unroll 1
  for (int n = thread_now(); n < S::rows * S::keys; n += S::threads) {
    const int row = n / S::keys, key = n % S::keys;
    if (row >= f.rows || key >= w.keys) continue;
    const int64_t h = mem.row_head(row), at = f.mask_row + mem.row_query(row);
    float x = 0.0f;
    if (p.mask.data && p.mask.data[offset_of(p.mask, f.batch, h, at, tile_col + key)] == 0) x = -infinity();
    else if (p.bias.data) x = load_element(p.bias.data, p.bias.kind, offset_of(p.bias, f.batch, h, at, tile_col + key));
    mem.addend()[n] = x;
  }
}

// Logits in natural units with all that is added to them, -inf where hidden.
template <class S>
CQSA_DEVICE void fix_logits(const attention_params& p, const tile_memory<S>& mem, const tile_window& w, int64_t tile_pos, int parity, int warp,
                            logit_tile<S>& x) {
  const block_facts& f = mem.facts();
  const float* factor = mem.key_factor(parity);
  const float scale = p.softmax_scale;
  for_each_logit<S>(mem, w, warp, [&](int mt, int nt, int i, int, int key, bool) { x.s[mt][nt][i] *= scale * factor[key]; });
  if (p.softcap > 0) {
    const float inverse = 1.0f / p.softcap;
    for_each_logit<S>(mem, w, warp, [&](int mt, int nt, int i, int, int, bool) { x.s[mt][nt][i] = p.softcap * tanh_fast(x.s[mt][nt][i] * inverse); });
  }
  if (p.slopes.data) {
    const int ahead = int(f.position - tile_pos);
    for_each_logit<S>(mem, w, warp, [&](int mt, int nt, int i, int row, int key, bool) {
      const int distance = ahead + mem.row_query(row) - key;
      x.s[mt][nt][i] -= mem.row_slope()[row] * float(distance < 0 ? -distance : distance);
    });
  }
  if (p.mask.data || p.bias.data)
    for_each_logit<S>(mem, w, warp, [&](int mt, int nt, int i, int row, int key, bool) {
      const float add = mem.addend()[row * S::keys + key];
      x.s[mt][nt][i] = add == -infinity() ? add : x.s[mt][nt][i] + add;
    });
  for_each_logit<S>(mem, w, warp, [&](int mt, int nt, int i, int, int key, bool hidden) {
    if (hidden || factor[S::keys + key] != 0.0f) x.s[mt][nt][i] = -infinity();
  });
}

// --------------------------------------------------------------------- general kernels: values with a scale of their own

// o += p diag(|scale|) v; values have the signs. p times the scale is brought to at most 1 for each row before it is rounded: it neither overflows
// halves nor vanishes in them, whatever the scales are.
template <class S, int Kind>
CQSA_DEVICE void multiply_pv_scaled(const float* scale, const unsigned char* values, logit_tile<S>& x, row_sums<S>& sums) {
  static_assert(S::m_tiles == 1, "general kernels");
  const int column = thread_now() % 4 * 2;
  float most[2] = {0.0f, 0.0f};
#pragma unroll
  for (int nt = 0; nt < S::keys / 8; ++nt)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& p = x.s[0][nt][i];
      const float by = scale[nt * 8 + column + i % 2];
      if (bits_of(p) != 0x80000000u) p *= by < 0.0f ? -by : by;
      most[i / 2] = max_f32(most[i / 2], p);
    }
  float inverse[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    most[r] = quad_max(most[r]);
    if (!(most[r] > 0x1p-100f)) most[r] = 0x1p-100f;
    inverse[r] = 1.0f / most[r];
  }
  uint32_t a[S::keys / 16][4];
#pragma unroll
  for (int nt = 0; nt < S::keys / 8; ++nt)
#pragma unroll
    for (int i = 0; i < 4; ++i) x.s[0][nt][i] *= inverse[i / 2];
#pragma unroll
  for (int step = 0; step < S::keys / 16; ++step) fragment_of<S, Kind>(x, 0, step, a[step]);
  const matrix_place<S::dv, true> place(values, 0, thread_now());
#pragma unroll
  for (int pair = 0; pair < S::dv / 16; ++pair) {
    float part[2][4] = {};
#pragma unroll
    for (int step = 0; step < S::keys / 16; ++step) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, place.at(step, pair));
      mma<Kind>(part[0], a[step], b[0], b[1]);
      mma<Kind>(part[1], a[step], b[2], b[3]);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums.o[0][2 * pair + n][i] = fma_f32(part[n][i], most[i / 2], sums.o[0][2 * pair + n][i]);
  }
}

// ------------------------------------------------------------------------------------- values that are NaN or Inf

template <class S, int Kind> CQSA_DEVICE bool has_wild_values(const unsigned char* values) {
  bool found = false;
#pragma unroll 2
  for (int n = thread_now(); n < S::v_bytes / 16; n += S::threads) {
    const word4x w = *reinterpret_cast<const word4x*>(values + 16 * n);
    for (uint32_t two : w.x) found = found || is_wild<Kind>(two);
  }
  return found;
}

template <class S, int Kind> CQSA_DEVICE void zero_wild_values(unsigned char* values) {
  constexpr uint32_t half_mask = exponent_mask<Kind> & 0xffffu;
#pragma unroll 1
  for (int n = thread_now(); n < S::v_bytes / 4; n += S::threads) {
    uint32_t& two = reinterpret_cast<uint32_t*>(values)[n];
    if ((two & half_mask) == half_mask) two &= 0xffff0000u;
    if ((two >> 16 & half_mask) == half_mask) two &= 0x0000ffffu;
  }
}

// Wild values as numbers that can be counted: +Inf 1, -Inf 2^8, NaN 3 * 2^14, others 0. A tile has at most 128 keys, each of which is
// one of these, so that without a NaN the sum is at most 2^15.
template <int Kind> CQSA_DEVICE uint32_t count_code(uint32_t half) {
  constexpr uint32_t inf = exponent_mask<Kind> & 0xffffu;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude < inf) return 0;
  if (magnitude > inf) return Kind == kind_f16 ? 0x7a00u : 0x4740u;
  if (half & 0x8000u) return Kind == kind_f16 ? 0x5c00u : 0x4380u;
  return Kind == kind_f16 ? 0x3c00u : 0x3f80u;
}
template <int Kind> CQSA_DEVICE uint32_t count_codes(uint32_t two) { return count_code<Kind>(two & 0xffffu) | count_code<Kind>(two >> 16) << 16; }

CQSA_DEVICE float sum_of_wild(float count) {
  const int n = int(count);
  const bool plus = (n & 0xff) != 0, minus = (n >> 8) != 0;
  if (n > 1 << 15 || (plus && minus)) return float_of(0x7fc00000u);
  return plus ? infinity() : minus ? -infinity() : 0.0f;
}

// Which of a lane's pairs of row tile `tile` are visible: bit 4 nt + i for logit [nt][i].
template <class S> CQSA_DEVICE uint64_t find_visible(const tile_memory<S>& mem, const tile_window& w, int warp, int tile, const logit_tile<S>& x) {
  uint64_t bits = 0;
  for_each_logit<S>(mem, w, warp, [&](int mt, int nt, int i, int, int, bool hidden) {
    const bool gone = S::general ? bits_of(x.s[mt][nt][i]) == 0x80000000u : hidden;  // softmax marks them there
    if (mt == tile) bits |= uint64_t(gone ? 0 : 1) << (4 * nt + i);
  });
  return bits;
}
template <int Kind> CQSA_DEVICE void visible_fragment(uint32_t bits, uint32_t (&a)[4]) {
  constexpr uint32_t one = Kind == kind_f16 ? 0x3c00u : 0x3f80u;
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = (bits >> 2 * i & 1u) * one | (bits >> (2 * i + 1) & 1u) * (one << 16);
}

// Adds to o what wild values make of it in the rows of tile mt that see them. A second product counts them; it is slow and small,
// since nobody waits for it.
template <class S, int Kind> CQSA_DEVICE void add_wild_values(const unsigned char* values, uint64_t visible, int mt, row_sums<S>& sums) {
  const matrix_place<S::dv, true> place(values, 0, thread_now());
#pragma unroll 1
  for (int pair = 0; pair < S::dv / 16; ++pair) {
    float count[2][4] = {};
#pragma unroll 1
    for (int step = 0; step < S::keys / 16; ++step) {
      uint32_t a[4], b[4];
      ldmatrix_x4_trans(b, place.at(step, pair));
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i] = count_codes<Kind>(b[i]);
      visible_fragment<Kind>(uint32_t(visible >> 8 * step), a);
      mma<Kind>(count[0], a, b[0], b[1]);
      mma<Kind>(count[1], a, b[2], b[3]);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float add = sum_of_wild(count[n][i]);
#pragma unroll
        for (int ct = n; ct < S::dv / 8; ct += 2)
          if (ct / 2 == pair && add != 0.0f) sums.o[mt][ct][i] += add;
      }
  }
}

// Whether the tile has wild values under hidden pairs; then what they do is added, and they are made 0. All threads come here.
template <class S, int Kind>
CQSA_DEVICE void settle_wild_values(const tile_memory<S>& mem, const tile_window& w, int warp, bool busy, unsigned char* values,
                                    const logit_tile<S>& x, row_sums<S>& sums) {
  block_facts& f = mem.facts();
  if (has_wild_values<S, Kind>(values) && !CQSA_MUTANT(13)) atomic_or(&f.bad[0], 1);
  barrier();
  if (!f.bad[0]) return;
  if (busy) {
#pragma unroll
    for (int mt = 0; mt < S::m_tiles; ++mt) add_wild_values<S, Kind>(values, find_visible<S>(mem, w, warp, mt, x), mt, sums);
  }
  barrier();
  zero_wild_values<S, Kind>(values);
  if (thread_now() == 0) f.bad[0] = 0;
  barrier();
}

}  // namespace cqsa::gpu::sm80
