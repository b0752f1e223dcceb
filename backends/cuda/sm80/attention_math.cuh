// SPDX-License-Identifier: Apache-2.0
// Products and softmax of a warp of the sm_80 attention.
//
// A warp has m_tiles tiles of 16 query rows. With g = lane / 4 and l = lane % 4 a lane holds of the logits s[mt][nt] rows
// 16 mt + g (elements 0, 1) and 16 mt + g + 8 (2, 3) at keys 8 nt + 2 l and the next, and of the sums o the same rows at these
// channels: what the four lanes of a quad hold is a row.
#pragma once

#include "attention_tile.cuh"

namespace cqsa::gpu::sm80 {

constexpr float log2_of_e = 1.4426950408889634f;

template <class S> struct row_sums {
  float o[S::m_tiles][S::dv / 8][4];
  float m[S::m_tiles][2];  // largest logit so far, natural units
  float l[S::m_tiles][2];  // sum of p over the lane's own keys
};
template <class S> struct logit_tile {
  float s[S::m_tiles][S::keys / 8][4];
};
// Fragments of q that stay in registers.
template <class S> struct query_tile {
  uint32_t a[S::q_in_registers ? S::d / 16 : 1][S::m_tiles][4];
};

template <int Kind> CQSA_DEVICE void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const uint32_t b[2] = {b0, b1};
  if constexpr (Kind == kind_f16) mma_m16n8k16_f16(c, a, b);
  else mma_m16n8k16_bf16(c, a, b);
}
template <int Kind> CQSA_DEVICE uint32_t pack(float low, float high) { return Kind == kind_f16 ? pack_f16(low, high) : pack_bf16(low, high); }

// Address of a lane for ldmatrix.x4 of 16 x 16 halves at (row0, chunk 2 step): the four matrices in the order of registers are
// rows first (RowsFirst: a of q; v transposed) or chunks first (k, whose rows are columns of b).
template <int D, bool RowsFirst> struct matrix_place {
  static constexpr int mixed_chunks = D % 64 == 0 ? 8 : 4;  // the XOR stays within so many neighbours
  const unsigned char* base;
  int lane_at;
  CQSA_DEVICE matrix_place(const unsigned char* first_row, int row0) : base(first_row) {
    const int lane = thread_index() % 32, matrix = lane / 8;
    const int down = RowsFirst ? matrix & 1 : matrix >> 1, right = RowsFirst ? matrix >> 1 : matrix & 1;
    const int r = row0 + down * 8 + lane % 8;
    lane_at = r * (2 * D) + 16 * (right ^ mix_of<D>(r));
  }
  // Rows further down in steps of 16, which all have the lane's swizzle. Few different XORs, the rest is in the instruction.
  CQSA_DEVICE const unsigned char* at(int down, int step) const {
    constexpr int steps = mixed_chunks / 2;
    return base + ((lane_at ^ 32 * (step % steps)) + 16 * mixed_chunks * (step / steps) + down * (16 * 2 * D));
  }
};

template <class S> CQSA_DEVICE void read_queries(const tile_memory<S>& mem, int step, int warp, uint32_t (&a)[S::m_tiles][4]) {
  const matrix_place<S::d, true> place(mem.q(), warp * 16 * S::m_tiles);
#pragma unroll
  for (int mt = 0; mt < S::m_tiles; ++mt) ldmatrix_x4(a[mt], place.at(mt, step));
}

// s = q k^T.
template <class S, int Kind>
CQSA_DEVICE void multiply_qk(const tile_memory<S>& mem, const unsigned char* keys, int warp, const query_tile<S>& q, logit_tile<S>& x) {
  const matrix_place<S::d, false> place(keys, 0);
#pragma unroll
  for (int mt = 0; mt < S::m_tiles; ++mt)
#pragma unroll
    for (int nt = 0; nt < S::keys / 8; ++nt)
#pragma unroll
      for (int i = 0; i < 4; ++i) x.s[mt][nt][i] = 0.0f;
#pragma unroll
  for (int step = 0; step < S::d / 16; ++step) {
    uint32_t a[S::m_tiles][4];
    if constexpr (!S::q_in_registers) {
      read_queries<S>(mem, step, warp, a);
    } else {
#pragma unroll
      for (int n = 0; n < 4 * S::m_tiles; ++n) a[n / 4][n % 4] = q.a[step][n / 4][n % 4];
    }
#pragma unroll
    for (int pair = 0; pair < S::keys / 16; ++pair) {
      uint32_t b[4];
      ldmatrix_x4(b, place.at(pair, step));
#pragma unroll
      for (int mt = 0; mt < S::m_tiles; ++mt) {
        mma<Kind>(x.s[mt][2 * pair], a[mt], b[0], b[1]);
        mma<Kind>(x.s[mt][2 * pair + 1], a[mt], b[2], b[3]);
      }
    }
  }
}

// Fragment of p for keys 16 step ..: what a lane holds of the logits is just what it has to hold of a.
template <class S, int Kind> CQSA_DEVICE void fragment_of(const logit_tile<S>& x, int mt, int step, uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float(&s)[4] = x.s[mt][2 * step + i / 2];
    a[i] = pack<Kind>(s[i % 2 * 2], s[i % 2 * 2 + 1]);
  }
}

// o += p v.
template <class S, int Kind> CQSA_DEVICE void multiply_pv(const unsigned char* values, const logit_tile<S>& x, row_sums<S>& sums) {
  const matrix_place<S::dv, true> place(values, 0);
#pragma unroll
  for (int step = 0; step < S::keys / 16; ++step) {
    uint32_t a[S::m_tiles][4];
#pragma unroll
    for (int mt = 0; mt < S::m_tiles; ++mt) fragment_of<S, Kind>(x, mt, step, a[mt]);
#pragma unroll
    for (int pair = 0; pair < S::dv / 16; ++pair) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, place.at(step, pair));
#pragma unroll
      for (int mt = 0; mt < S::m_tiles; ++mt) {
        mma<Kind>(sums.o[mt][2 * pair], a[mt], b[0], b[1]);
        mma<Kind>(sums.o[mt][2 * pair + 1], a[mt], b[2], b[3]);
      }
    }
  }
}

CQSA_DEVICE float quad_max(float x) {
  x = max_f32(x, shuffle_xor<32>(x, 1));
  return max_f32(x, shuffle_xor<32>(x, 2));
}
CQSA_DEVICE float quad_sum(float x) {
  x += shuffle_xor<32>(x, 1);
  return x + shuffle_xor<32>(x, 2);
}

// From logits to p; m, l and o follow. The logits are x.s * scale; scale2 is scale * log2 e. Where Mark, the p of a pair that is
// hidden is -0, by which others know it.
template <class S, bool Mark> CQSA_DEVICE void softmax(float scale, float scale2, logit_tile<S>& x, row_sums<S>& sums) {
  constexpr int tiles = S::keys / 8;
  float factor[S::m_tiles][2], change = 0.0f;
#pragma unroll
  for (int mt = 0; mt < S::m_tiles; ++mt)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = max_f32(x.s[mt][0][2 * r], x.s[mt][0][2 * r + 1]);
#pragma unroll
      for (int nt = 1; nt < tiles; ++nt) top = max_f32(top, max_f32(x.s[mt][nt][2 * r], x.s[mt][nt][2 * r + 1]));
      const float old = sums.m[mt][r];
      const float now = max_f32(old, quad_max(top) * scale);
      // A row that has seen no key yet: any finite reference does, since every p is 2^-inf = 0.
      const float ref2 = product_f32(now == -infinity() ? 0.0f : now, log2_of_e);
      factor[mt][r] = exp2_f32(product_f32(old, log2_of_e) - ref2);
      change += factor[mt][r] - 1.0f;
      sums.m[mt][r] = now;
      float sum = 0.0f;
#pragma unroll
      for (int nt = 0; nt < tiles; ++nt)
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; ++i) {
          const float e = exp2_f32(fma_f32(x.s[mt][nt][i], scale2, -ref2));
          sum += e;
          x.s[mt][nt][i] = Mark && x.s[mt][nt][i] == -infinity() ? -0.0f : e;
        }
      sums.l[mt][r] = fma_f32(sums.l[mt][r], factor[mt][r], sum);
    }
  // Products with 1 are left out: no bit depends on it. The factors are at most 1, so that their differences do not cancel.
  if (ballot<32>(change != 0.0f) == 0) return;
#pragma unroll
  for (int mt = 0; mt < S::m_tiles; ++mt)
#pragma unroll
    for (int ct = 0; ct < S::dv / 8; ++ct)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums.o[mt][ct][i] *= factor[mt][i / 2];
}

}  // namespace cqsa::gpu::sm80
