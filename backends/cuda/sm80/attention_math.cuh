// SPDX-License-Identifier: Apache-2.0
// Products and softmax of a warp of the sm_80 attention.
//
// A warp has m_tiles tiles of 16 query rows. With g = lane / 4 and l = lane % 4 a lane holds of the logits s[mt][nt] rows
// 16 mt + g (elements 0, 1) and 16 mt + g + 8 (2, 3) at keys 8 nt + 2 l and the next, and of the sums o the same rows at these
// channels: what the four lanes of a quad hold is a row.
#pragma once

#include "attention_tile.cuh"
#include "backends/cuda/attention_parts.cuh"

namespace cqsa::gpu::sm80 {

// General kernels have no registers for addresses.
template <class S> CQSA_DEVICE int thread_of_loop() { return S::general ? thread_now() : thread_in_loop(); }

template <class S> struct row_sums {
  float o[S::m_tiles][S::dv / 8][4];
};
// The largest logit so far of each row, natural units, is in shared memory, as is l: registers are for the sums. All lanes of a quad
// write the same to it and each reads what it wrote.
template <class S> CQSA_DEVICE float& maximum_of(const tile_memory<S>& mem, int warp, int mt, int r) {
  return mem.row_m()[(warp * S::m_tiles + mt) * 16 + 8 * r + thread_of_loop<S>() % 32 / 4];
}
template <class S> struct logit_tile {
  float s[S::m_tiles][S::keys / 8][4];
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
  CQSA_DEVICE matrix_place(const unsigned char* first_row, int row0, int thread) : base(first_row) {
    const int lane = thread % 32, matrix = lane / 8;
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

// The fragments of q for channels 16 step .. of a warp.
template <class S> CQSA_DEVICE void read_queries(const tile_memory<S>& mem, int step, int warp, uint32_t (&a)[S::m_tiles][4]) {
  const matrix_place<S::d, true> place(mem.q(), warp * 16 * S::m_tiles, thread_of_loop<S>());
#pragma unroll
  for (int mt = 0; mt < S::m_tiles; ++mt) ldmatrix_x4(a[mt], place.at(mt, step));
}

template <class S> CQSA_DEVICE void clear_logits(logit_tile<S>& x) {
#pragma unroll
  for (int mt = 0; mt < S::m_tiles; ++mt)
#pragma unroll
    for (int nt = 0; nt < S::keys / 8; ++nt)
#pragma unroll
      for (int i = 0; i < 4; ++i) x.s[mt][nt][i] = 0.0f;
}

// s = q k^T.
template <class S, int Kind>
CQSA_DEVICE void multiply_qk(const tile_memory<S>& mem, const unsigned char* keys, int warp, logit_tile<S>& x) {
  const matrix_place<S::d, false> place(keys, 0, thread_of_loop<S>());
  clear_logits<S>(x);
#pragma unroll
  for (int step = 0; step < S::d / 16; ++step) {
    uint32_t a[S::m_tiles][4];
    read_queries<S>(mem, step, warp, a);
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
  const matrix_place<S::dv, true> place(values, 0, thread_now());
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

// The largest of a lane's logits in a row: r 0 or 1 of tile mt.
template <class S> CQSA_DEVICE float largest_logit(const logit_tile<S>& x, int mt, int r) {
  float top = max_f32(x.s[mt][0][2 * r], x.s[mt][0][2 * r + 1]);
#pragma unroll
  for (int nt = 1; nt < S::keys / 8; ++nt) top = max_f32(top, max_f32(x.s[mt][nt][2 * r], x.s[mt][nt][2 * r + 1]));
  return top;
}

// What a warp's sums are multiplied with when their maxima move.
template <class S> struct row_factors {
  float of[S::m_tiles][2];
};

template <class S> struct row_references {
  float of[S::m_tiles][2];
};

// Brings row r of tile mt to a maximum of at least `top`, which the quad's lanes have in parts, natural units. m: the row's.
template <class S> CQSA_DEVICE void raise_maximum(float top, int mt, int r, float& m, row_references<S>& to, row_factors<S>& factors) {
  const float old = m;  // before the lanes meet: none of them has written yet
  const float now = max_f32(old, quad_max(top));
  to.of[mt][r] = reference_of(now);
  factors.of[mt][r] = exp2_f32(product_f32(old, log2_of_e) - to.of[mt][r]);
  m = now;
}

// Products with 1 are left out: no bit depends on it. Factors are at most 1, so that their distances from it do not cancel.
template <class S> CQSA_DEVICE void scale_sums(const tile_memory<S>& mem, const row_factors<S>& factors, row_sums<S>& sums) {
  float change = 0.0f;
#pragma unroll
  for (int n = 0; n < 2 * S::m_tiles; ++n) change += factors.of[n / 2][n % 2] - 1.0f;
  if (ballot<32>(change != 0.0f) == 0) return;
#pragma unroll
  for (int mt = 0; mt < S::m_tiles; ++mt) {
    float2x& l = mem.lane_l(mt);
    l = {{l.x[0] * factors.of[mt][0], l.x[1] * factors.of[mt][1]}};
#pragma unroll
    for (int ct = 0; ct < S::dv / 8; ++ct)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums.o[mt][ct][i] *= factors.of[mt][i / 2];
  }
}

}  // namespace cqsa::gpu::sm80
