// SPDX-License-Identifier: Apache-2.0
// Products and softmax of a warp of the sm_80 kernels of selected-cell attention.
//
// The 16 rows of a tile of the matrix instruction are query heads. With g = lane / 4 and l = lane % 4 a lane holds of the logits
// s[n] rows g (elements 0, 1) and g + 8 (2, 3) at cells 8 n + 2 l and the next. Which channel stands where in the products is free:
//   q k  in a group of 64 (int8) or half a group (f16) lane l has the sixteen bytes of piece l: one read of a cell's row feeds all
//        steps of the group.
//   p v  tile j of a group has channels 8 g + j, so that a lane's reads of eight channels feed eight tiles; what the lane then holds
//        of the sums are the channels 16 l + 8 (i % 2) + j of the group.
#pragma once

#include "backends/cuda/attention_parts.cuh"
#include "backends/cuda/sm80/selected_gather.cuh"

namespace cqsa::gpu::sm80 {

template <class S> struct selected_sums {
  float o[S::groups][8][4];
  float m[2], l[2];  // largest logit so far in units of ln 2; sum of p over the lane's own cells
  float up;          // o is multiplied by this power of two
};
template <class S> struct selected_logits {
  float s[S::cells / 8][4];
};

// ------------------------------------------------------------------------------------------------------------ q

// q of row `row`, channels c .. c + 3, times the row's power of two, to the fragments.
template <class S> CQSA_DEVICE void store_query_quad(unsigned char* fragments, int row, int c, const float (&x)[4]) {
  constexpr int span = S::codes ? 16 : 8;  // channels of a piece
  const int l = c / span % 4, step = c / (4 * span) * (span / 4) + c % span / 4;
  uint32_t* to = reinterpret_cast<uint32_t*>(fragments) + (step * 32 + row % 8 * 4 + l) * 4 + row / 8;
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    const float a = x[2 * pair], b = x[2 * pair + 1];
    const uint32_t high = pack_f16(a, b);
    to[2 * pair] = high;
    if constexpr (S::split) to[2 * pair + S::q_bytes / 4] = pack_f16(a - low_half(high), b - high_half(high));
  }
}

// The power of two that brings the largest |q| of a row near 2^14: low parts of halves then leave the subnormals, and the bf16 range
// fits. 1 for a row of zeros, and for one with Inf or NaN.
CQSA_DEVICE float scale_up(float top) {
  const int exponent = int(bits_of(top) >> 23) - 127;
  if (top == 0.0f || exponent > 127) return 1.0f;
  return float_of(uint32_t(127 + (13 - exponent < 100 ? 13 - exponent : 100)) << 23);
}

// A thread's part of a row of q: every eighth four channels.
template <class S> struct query_part {
  static constexpr int each = S::warps * 32 / S::rows;  // threads of a row
  static constexpr int quads = S::d / 4 / each;
  float x[quads][4];
};

template <class S, int Kind> CQSA_DEVICE void load_part(const selected_params& p, const selected_place& x, query_part<S>& q) {
  const int row = thread_index() / q.each, dim = row < x.heads ? p.head_dim : 0;
  const int64_t at = dim ? offset_of(p.q, 0, x.first_head + row, x.query, 0) : 0;
  if (p.q.quads) {
    stored_quad<Kind> raw[q.quads];
#pragma unroll
    for (int n = 0; n < q.quads; ++n) {
      const int c = 4 * (n * q.each + thread_index() % q.each);
      raw[n] = c < dim ? load_quad<Kind>(p.q.data, at + c) : zero_quad<Kind>();
    }
#pragma unroll
    for (int n = 0; n < q.quads; ++n) {
      const float4x v = decode_quad<Kind>(raw[n]);
#pragma unroll
      for (int i = 0; i < 4; ++i) q.x[n][i] = v.x[i];
    }
    return;
  }
#pragma unroll
  for (int n = 0; n < q.quads; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int c = 4 * (n * q.each + thread_index() % q.each) + i;
      q.x[n][i] = c < dim ? load_element(p.q.data, Kind, at + c * p.q.stride[3]) : 0.0f;
    }
}

// Fragments of q, and for each row what turns products with them into logits in units of ln 2.
template <class S> CQSA_DEVICE void store_queries(const selected_params& p, query_part<S>& q, unsigned char* fragments, float* row_factor) {
  float top = 0.0f;
#pragma unroll
  for (int n = 0; n < q.quads; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float size = float_of(bits_of(q.x[n][i]) & 0x7fffffffu);
      top = size < infinity() ? max_f32(top, size) : infinity();
    }
#pragma unroll
  for (int mask = q.each / 2; mask > 0; mask /= 2) top = max_f32(top, shuffle_xor<32>(top, mask));
  const float up = scale_up(top);
  const int row = thread_index() / q.each;
  if (thread_index() % q.each == 0) row_factor[row] = p.softmax_scale * log2_of_e * quotient(1.0f, up);
#pragma unroll
  for (int n = 0; n < q.quads; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) q.x[n][i] *= up;
    store_query_quad<S>(fragments, row, 4 * (n * q.each + thread_index() % q.each), q.x[n]);
  }
}

CQSA_DEVICE void read_fragment(const unsigned char* fragments, int step, uint32_t (&a)[4]) {
  const word4x w = *reinterpret_cast<const word4x*>(fragments + (step * 32 + thread_index() % 32) * 16);
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = w.x[i];
}

// ------------------------------------------------------------------------------------------------------------ q k

// Channels 4 j .. of a lane's piece of k: the two registers of b.
template <class S> CQSA_DEVICE void key_fragment(const word4x (&k)[S::bytes], int j, uint32_t (&b)[2]) {
  if constexpr (S::codes) {
    const uint32_t turned = k[0].x[j] ^ sign_bits;
    b[0] = codes_to_f16x2(turned, 0x4140);
    b[1] = codes_to_f16x2(turned, 0x4342);
  } else {
    b[0] = k[j / 2].x[j % 2 * 2];
    b[1] = k[j / 2].x[j % 2 * 2 + 1];
  }
}

// c = q k over the 64 channels of a group. High and low part of q go to the same sums: an addend is cut 24 bits (sm_80; 25 since)
// below the largest of its step, which costs the low part nothing that an f32 sum would keep, and a chain is only eight steps long.
template <class S>
CQSA_DEVICE void multiply_group(const warp_memory<S>& mem, const unsigned char* fragments, int group, float (&c)[S::cells / 8][4]) {
  constexpr int tiles = S::cells / 8;
  const int g = thread_index() % 32 / 4, l = thread_index() % 4;
  word4x k[tiles][S::bytes];
#pragma unroll
  for (int n = 0; n < tiles; ++n)
#pragma unroll
    for (int i = 0; i < S::bytes; ++i) {
      const int piece = (4 * (group * S::bytes + i) + l) ^ key_exchange(g);
      k[n][i] = *reinterpret_cast<const word4x*>(mem.tile(0) + (8 * n + g) * S::pitch + 16 * (CQSA_MUTANT(2) ? piece ^ 1 : piece));
    }
#pragma unroll
  for (int n = 0; n < tiles; ++n) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.0f;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t high[4], low[4], b[tiles][2];
    read_fragment(fragments, group * 4 + j, high);
    if constexpr (S::split) read_fragment(fragments + S::q_bytes, group * 4 + j, low);
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
      key_fragment<S>(k[n], j, b[n]);
      mma_m16n8k16_f16(c[n], high, b[n]);
    }
    if constexpr (S::split) {
#pragma unroll
      for (int n = 0; n < tiles; ++n) mma_m16n8k16_f16(c[n], low, b[n]);
    }
  }
}

template <class S>
CQSA_DEVICE void multiply_keys(const warp_memory<S>& mem, const unsigned char* fragments, int dim, selected_logits<S>& x) {
  constexpr int tiles = S::cells / 8;
#pragma unroll
  for (int n = 0; n < tiles; ++n) x.s[n][0] = x.s[n][1] = x.s[n][2] = x.s[n][3] = 0.0f;
#pragma unroll 1
  for (int group = 0; 64 * group < dim; ++group) {
    float c[tiles][4];
    multiply_group<S>(mem, fragments, group, c);
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
      float2x scale{{1.0f, 1.0f}};
      if constexpr (S::codes) scale = mem.cell_scales(0, group, n);
#pragma unroll
      for (int i = 0; i < 4; ++i) x.s[n][i] = S::codes ? fma_f32(c[n][i], scale.x[i % 2], x.s[n][i]) : x.s[n][i] + c[n][i];
    }
  }
}

// ------------------------------------------------------------------------------------------------------------ softmax

// From products to p; m and l follow, and factor[r] is what o is to be multiplied with. Bits of `there`: cells of the tile.
template <class S>
CQSA_DEVICE void softmax(uint32_t there, const float (&row_factor)[2], selected_logits<S>& x, selected_sums<S>& sums, float (&factor)[2]) {
  constexpr int tiles = S::cells / 8;
  const uint32_t mine = there >> thread_index() % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float top = -infinity();
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
      for (int i = 2 * r; i < 2 * r + 2; ++i) {
        const bool hidden = !(mine >> (8 * n + i % 2) & 1) && !CQSA_MUTANT(3);
        // Rounded, not fused with the difference below: the largest less itself is 0 at any size.
        x.s[n][i] = hidden ? -infinity() : product_f32(x.s[n][i], row_factor[r]);
        top = max_f32(top, x.s[n][i]);
      }
    const float now = max_f32(sums.m[r], quad_max(top));
    // A row that has seen no cell yet: any finite reference does, since every p is 2^-inf = 0.
    const float ref = now == -infinity() ? 0.0f : now;
    factor[r] = CQSA_MUTANT(4) ? 1.0f : exp2_f32(sums.m[r] - ref);
    sums.m[r] = now;
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
      for (int i = 2 * r; i < 2 * r + 2; ++i) {
        x.s[n][i] = exp2_f32(x.s[n][i] - ref);
        sum += x.s[n][i];
      }
    sums.l[r] = fma_f32(sums.l[r], factor[r], sum);
  }
}

// ------------------------------------------------------------------------------------------------------------ p v

// Fragments of p for 16 cells, times the scales of a group of channels (times the power of two), as a sum of halves.
template <class S> struct weight_fragments {
  uint32_t high[S::cells / 16][4], low[S::cells / 16][4];
};
template <class S>
CQSA_DEVICE void make_weights(const warp_memory<S>& mem, const selected_logits<S>& x, int group, float up, weight_fragments<S>& w) {
#pragma unroll
  for (int n = 0; n < S::cells / 8; ++n) {
    float2x scale{{up, up}};
    if constexpr (S::codes) scale = mem.cell_scales(1, group, n);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float a = x.s[n][2 * r] * scale.x[0], b = x.s[n][2 * r + 1] * scale.x[1];
      const uint32_t high = pack_f16(a, b);
      w.high[n / 2][n % 2 * 2 + r] = high;
      if constexpr (S::split) w.low[n / 2][n % 2 * 2 + r] = pack_f16(a - low_half(high), b - high_half(high));
    }
  }
}

// A lane's eight channels of four cells of a step: rows 2 l, 2 l + 1, 2 l + 8, 2 l + 9.
template <class S> struct value_words {
  uint32_t x[4][2 * S::bytes];
};
template <class S> CQSA_DEVICE void read_values(const warp_memory<S>& mem, int group, int step, value_words<S>& v) {
  const int g = thread_index() % 32 / 4, l = thread_index() % 4;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int row = 16 * step + 2 * l + r % 2 + r / 2 * 8;
    const unsigned char* at = mem.tile(1) + row * S::pitch;
    if constexpr (S::codes) {
      const word2x w = *reinterpret_cast<const word2x*>(at + 16 * ((4 * group + g / 2) ^ value_exchange(2 * l)) + 8 * (g % 2));
      v.x[r][0] = w.x[0], v.x[r][1] = w.x[1];
    } else {
      const word4x w = *reinterpret_cast<const word4x*>(at + 16 * ((8 * group + g) ^ value_exchange(2 * l)));
#pragma unroll
      for (int i = 0; i < 4; ++i) v.x[r][i] = w.x[i];
    }
  }
}

// Channels 4 half .. 4 half + 3 of a lane's values: registers of b for four tiles.
template <class S> CQSA_DEVICE void value_fragments(const value_words<S>& v, int half, uint32_t (&b)[4][2]) {
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    if constexpr (S::codes) {
      const uint32_t first = v.x[2 * pair][half] ^ sign_bits, second = v.x[2 * pair + 1][half] ^ sign_bits;
      const uint32_t low = permute_bytes(first, second, 0x5140), high = permute_bytes(first, second, 0x7362);
      b[0][pair] = codes_to_f16x2(low, 0x4140), b[1][pair] = codes_to_f16x2(low, 0x4342);
      b[2][pair] = codes_to_f16x2(high, 0x4140), b[3][pair] = codes_to_f16x2(high, 0x4342);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        b[j][pair] = permute_bytes(v.x[2 * pair][2 * half + j / 2], v.x[2 * pair + 1][2 * half + j / 2], j % 2 ? 0x7632 : 0x5410);
    }
  }
}

// o = factor o + p v. The products of a tile are summed by themselves, in chains of two to four steps: the sums over all tiles are f32
// additions to nearest, not those of the matrix unit, which cut.
template <class S>
CQSA_DEVICE void add_values(const warp_memory<S>& mem, const selected_logits<S>& x, const float (&factor)[2], int dim,
                            selected_sums<S>& sums) {
  constexpr int steps = S::cells / 16;
  weight_fragments<S> w;
  if constexpr (!S::codes) make_weights<S>(mem, x, 0, sums.up, w);
#pragma unroll
  for (int group = 0; group < S::groups; ++group) {
    // The rest is filling. And a branch keeps ptxas from putting off the additions below until their terms spill.
    if (64 * group >= dim) break;
    if constexpr (S::codes) make_weights<S>(mem, x, group, sums.up, w);
    value_words<S> v[steps];
#pragma unroll
    for (int step = 0; step < steps; ++step) read_values<S>(mem, group, step, v[step]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float c[4][4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) c[j][i] = 0.0f;
#pragma unroll
      for (int step = 0; step < steps; ++step) {
        uint32_t b[4][2];
        value_fragments<S>(v[step], half, b);
#pragma unroll
        for (int j = 0; j < 4; ++j) mma_m16n8k16_f16(c[j], w.high[step], b[j]);
        if constexpr (S::split) {
#pragma unroll
          for (int j = 0; j < 4; ++j) mma_m16n8k16_f16(c[j], w.low[step], b[j]);
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums.o[group][4 * half + j][i] = fma_f32(sums.o[group][4 * half + j][i], factor[i / 2], c[j][i]);
    }
  }
}

}  // namespace cqsa::gpu::sm80
