// SPDX-License-Identifier: Apache-2.0
// Products and softmax of a warp of the decode kernels: 16 query rows by 16 keys at a time.
//
// With g = lane / 4 and l = lane % 4 a lane has, of the logits s[n], rows g (elements 0, 1) and g + 8 (2, 3) at keys 8 n + 2 l and
// the next, and of the sums o the same rows at the channels that channel_of() tells.
#pragma once

#include "backends/cuda/attention_parts.cuh"
#include "backends/cuda/sm80/decode_block.cuh"

namespace cqsa::gpu::decode {

template <class V> struct row_sums {
  float o[V::d / 8][4];
  float m[2];  // largest logit so far, natural units
  float l[2];  // sum of p over the lane's own keys
};

// Of element i of o[n], without the lane's part; codes of v come in pairs of channels, even ones to one product, odd ones to another.
template <class V> CQSA_DEVICE int channel_of(int n, int i) {
  const int l = thread_index() % 4;
  if (V::narrow) return n / 2 * 16 + 4 * l + 2 * (i % 2) + n % 2;
  return n * 8 + 2 * l + i % 2;
}

// The lane. Where registers are scarce it is read anew, so that places in shared memory are not kept for all steps.
template <class V> CQSA_DEVICE int lane_of() { return (V::narrow && V::d > 128 ? thread_now() : thread_index()) % 32; }

// Fragments of q of a warp's rows: they stay in registers where there is room.
template <class V> struct query_tile {
  static constexpr bool kept = V::d <= 128;
  uint32_t a[kept ? V::d / 16 : 1][4];
};
template <class V> CQSA_DEVICE void read_query(const block_memory<V>& mem, int m_tile, int step, uint32_t (&a)[4]) {
  const int lane = lane_of<V>(), row = m_tile * 16 + (lane & 15);
  ldmatrix_x4(a, mem.q() + chunk_offset<V::d * 2>(row, 2 * step + (lane >> 4)));
}

// Fragment `step`, from where it is.
template <class V> CQSA_DEVICE void take_query(const block_memory<V>& mem, const query_tile<V>& q, int m_tile, int step, uint32_t (&a)[4]) {
  if constexpr (query_tile<V>::kept) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = q.a[step][i];
  } else {
    read_query(mem, m_tile, step, a);
  }
}

template <int Type> CQSA_DEVICE void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const uint32_t b[2] = {b0, b1};
  if constexpr (Type == kind_f16) mma_m16n8k16_f16(c, a, b);
  else mma_m16n8k16_bf16(c, a, b);
}

// Keys lo <= j < hi of the sequence that every row of the block sees.
struct common_keys {
  int32_t lo, hi;
};

CQSA_DEVICE int32_t key_number(int64_t x) { return int32_t(clamp_i64(x, -1, INT32_MAX)); }

CQSA_DEVICE common_keys common_of(const decode_params& p, const block_facts& f) {
  return {key_number(f.position + f.queries - 1 - p.a.left), key_number(f.position + p.a.right + 1)};
}

// What a lane has to know of one of its rows to mask it. Made anew where it is needed: registers are for the sums.
struct row_facts {
  int32_t lo, hi;
  int64_t position;
  float slope;
};

// Rows that are not in use see everything: nobody looks at them.
CQSA_DEVICE row_facts facts_of_row(const decode_params& p, const block_facts& f, int row) {
  const bool used = row < f.rows;
  const int query = used ? row / f.heads : 0, head = used ? row % f.heads : 0;
  row_facts out;
  out.position = f.position + query;
  out.lo = used ? key_number(out.position - p.a.left) : -1;
  out.hi = used ? key_number(out.position + p.a.right + 1) : INT32_MAX;
  out.slope = p.a.slopes.data ? load_element(p.a.slopes.data, kind_f32, offset_of(p.a.slopes, f.batch, f.first_head + head, 0, 0)) : 0.0f;
  return out;
}

// One step of a warp: 16 keys of a stage.
struct step_place {
  int slot, table;    // of the stage
  int group, m_tile;  // group: of 16 keys
  int32_t key;               // number of the first one in the sequence
};

// s = q k^T, 16-bit k.
template <class V>
CQSA_DEVICE void multiply_qk(const decode_params& p, const block_memory<V>& mem, const step_place& at, const query_tile<V>& q,
                             float (&s)[2][4]) {
  const int lane = lane_of<V>(), row = at.group * 16 + (lane & 7) + (lane >> 4) * 8;
  const unsigned char* panel = mem.panel(at.slot, 0);
#pragma unroll
  for (int step = 0; step < V::d / 16; ++step) {
    if (step * 16 % V::pad == 0 && step * 16 >= p.a.head_dim) break;
    uint32_t b[4], a[4];
    ldmatrix_x4(b, panel + chunk_offset<V::shape::row_bytes>(row, 2 * step + (lane >> 3 & 1)));
    take_query(mem, q, at.m_tile, step, a);
    mma<V::type>(s[0], a, b[0], b[1]);
    mma<V::type>(s[1], a, b[2], b[3]);
  }
}

// The same with codes: sums over 32 channels, which share their scale, are multiplied with it in f32.
template <class V, int Kind>
CQSA_DEVICE void multiply_qk_codes(const decode_params& p, const block_memory<V>& mem, const step_place& at, const query_tile<V>& q,
                                   float (&s)[2][4]) {
  const int lane = lane_of<V>(), row = at.group * 16 + (lane & 15);
  const unsigned char* panel = mem.panel(at.slot, 0);
#pragma unroll
  for (int step = 0; step < V::d / 16; step += 2) {
    if (step * 16 % V::pad == 0 && step * 16 >= p.a.head_dim) break;
    uint32_t codes[4];
    ldmatrix_x4(codes, panel + chunk_offset<V::shape::row_bytes>(row, step + (lane >> 4)));
    float part[2][4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t a[4];
      take_query(mem, q, at.m_tile, step + i, a);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        uint32_t b0, b1;
        decode_four<Kind, V::type>(codes[2 * i + n], &b0, &b1);
        mma<V::type>(part[n], a, b0, b1);
      }
    }
    // Channels come up to a multiple of V::pad, scales do not.
    const int group = step * 16 >> p.group_shift, last = p.k_groups - 1;
    const float* scale = mem.scales(at.table, 0, group < last ? group : last) + at.group * 16 + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2x x = *reinterpret_cast<const float2x*>(scale + n * 8);
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = fma_f32(part[n][i], x.x[i % 2], s[n][i]);
    }
  }
}

// Softcap, ALiBi, and -inf where the key is hidden.
CQSA_DEVICE void fix_logits(const decode_params& p, const block_facts& f, const step_place& at, uint32_t present, float (&s)[2][4]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const row_facts row = facts_of_row(p, f, at.m_tile * 16 + thread_index() % 32 / 4 + 8 * r);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int number = n * 8 + thread_index() % 4 * 2 + i;
        const int32_t key = at.key + number;
        float x = s[n][2 * r + i];
        if (p.a.softcap > 0) x = p.a.softcap * tanh_f32(x / p.a.softcap);
        if (p.a.slopes.data) {
          const int64_t ahead = row.position - key;
          x -= row.slope * float(ahead < 0 ? -ahead : ahead);
        }
        const bool hidden = key < row.lo || (key >= row.hi && !CQSA_MUTANT(2)) || !(present >> number & 1);
        s[n][2 * r + i] = hidden ? -infinity() : x;
      }
  }
}

// From logits to probabilities; a hidden key becomes -0, by which others know it. o follows the new maxima. True where some
// key is hidden from some row of the warp.
template <class V> CQSA_DEVICE bool softmax(float (&s)[2][4], row_sums<V>& w) {
  float factor[2];
  bool hidden = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float top = max_f32(max_f32(s[0][2 * r], s[0][2 * r + 1]), max_f32(s[1][2 * r], s[1][2 * r + 1]));
    top = max_f32(top, shuffle_xor<32>(top, 1));
    top = max_f32(top, shuffle_xor<32>(top, 2));
    const float old = w.m[r], now = max_f32(old, top);
    // A row that has seen no key yet: any finite reference does, since every p is 2^-inf = 0.
    const float ref = now == -infinity() ? 0.0f : now;
    factor[r] = exp2_f32((old - ref) * log2_of_e);
    w.m[r] = now;
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 2 * r; i < 2 * r + 2; ++i) {
        const float e = exp2_f32((s[n][i] - ref) * log2_of_e);
        sum += e;
        hidden = hidden || s[n][i] == -infinity();
        s[n][i] = s[n][i] == -infinity() ? -0.0f : e;
      }
    w.l[r] = fma_f32(w.l[r], CQSA_MUTANT(3) ? 1.0f : factor[r], sum);
  }
  // Products with 1 are left out: no bit depends on it.
  if (!(factor[0] == 1.0f && factor[1] == 1.0f)) {
#pragma unroll
    for (int n = 0; n < V::d / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) w.o[n][i] *= factor[i / 2];
  }
  return ballot<32>(hidden) != 0;
}

// o += what NaN and Inf in the fragment b of v, which were left out of the product, are to the rows that see their keys: how many
// there are is a product of zeros and ones.
template <int Type, bool Signed> CQSA_DEVICE void add_special(const uint32_t (&p)[4], uint32_t b0, uint32_t b1, float (&o)[4]) {
  using word = half_word<Type>;
#pragma unroll
  for (int sign = 0; sign < (Signed ? 2 : 1); ++sign) {
    const uint32_t a[4] = {word::seen(p[0], sign), word::seen(p[1], sign), word::seen(p[2], sign), word::seen(p[3], sign)};
#pragma unroll
    for (int n = 0; n < 3; ++n) {
      const special what = n == 0 ? special::nan : n == 1 ? special::plus : special::minus;
      const float value = n == 0 ? float_of(0x7fc00000u) : (n == 1) == (sign == 0) ? infinity() : -infinity();
      float count[4] = {};
      mma<Type>(count, a, word::ones(what, b0), word::ones(what, b1));
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (count[i] > 0.0f) o[i] += value;
    }
  }
}

// o += p v, 16-bit v. Careful: NaN and Inf in v must not meet hidden keys.
template <class V, bool Careful>
CQSA_DEVICE void multiply_pv(const decode_params& p, const block_memory<V>& mem, const step_place& at, const float (&s)[2][4],
                             row_sums<V>& w) {
  using word = half_word<V::type>;
  const int lane = lane_of<V>(), row = at.group * 16 + (lane & 15);
  const unsigned char* panel = mem.panel(at.slot, 1);
  const uint32_t a[4] = {pack<V::type>(s[0][0], s[0][1]), pack<V::type>(s[0][2], s[0][3]), pack<V::type>(s[1][0], s[1][1]),
                         pack<V::type>(s[1][2], s[1][3])};
#pragma unroll
  for (int step = 0; step < V::d / 16; ++step) {
    if (step * 16 % V::pad == 0 && step * 16 >= p.a.head_dim_v) break;
    uint32_t b[4];
    ldmatrix_x4_trans(b, panel + chunk_offset<V::shape::row_bytes>(row, 2 * step + (lane >> 4)));
    if (Careful && ballot<32>(word::any(b[0]) || word::any(b[1]) || word::any(b[2]) || word::any(b[3]))) {
#pragma unroll
      for (int n = 0; n < 2; ++n) add_special<V::type, false>(a, b[2 * n], b[2 * n + 1], w.o[2 * step + n]);
#pragma unroll
      for (uint32_t& x : b) x = word::finite(x);
    }
    mma<V::type>(w.o[2 * step], a, b[0], b[1]);
    mma<V::type>(w.o[2 * step + 1], a, b[2], b[3]);
  }
}

// p times the scales of v for one group of channels, as the sum of two bf16.
template <class V> struct scaled_p {
  uint32_t high[4], low[4];
  CQSA_DEVICE void make(const block_memory<V>& mem, const step_place& at, int group, const float (&s)[2][4]) {
    const float* scale = mem.scales(at.table, 1, group) + at.group * 16 + thread_index() % 4 * 2;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2x x = *reinterpret_cast<const float2x*>(scale + n * 8);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float e0 = weigh(s[n][2 * r], x.x[0]), e1 = weigh(s[n][2 * r + 1], x.x[1]);
        const uint32_t top = pack_bf16(e0, e1);
        high[2 * n + r] = top;
        low[2 * n + r] = CQSA_MUTANT(4) ? 0 : pack_bf16(e0 - bf16_to_f32(top & 0xffffu), e1 - float_of(top & 0xffff0000u));
      }
    }
  }
  // A scale of a hidden key may be NaN; a weight that is not hidden is never -0.
  CQSA_DEVICE static float weigh(float e, float scale) {
    return bits_of(e) == 0x80000000u ? e : e * scale + 0.0f;
  }
};

template <class V, int Kind, bool Careful>
CQSA_DEVICE void multiply_pv_codes(const decode_params& p, const block_memory<V>& mem, const step_place& at, const float (&s)[2][4],
                                   row_sums<V>& w) {
  using word = half_word<kind_bf16>;
  const int lane = lane_of<V>(), row = at.group * 16 + (lane & 15);
  const unsigned char* panel = mem.panel(at.slot, 1);
  scaled_p<V> a;
  int group = -1;
#pragma unroll
  for (int step = 0; step < V::d / 16; step += 2) {
    if (step * 16 % V::pad == 0 && step * 16 >= p.a.head_dim_v) break;
    const int next = step * 16 >> p.group_shift;
    if (next != group && next < p.v_groups) {  // channels come up to a multiple of V::pad, scales do not
      group = next;
      a.make(mem, at, group, s);
    }
    uint32_t codes[4];
    ldmatrix_x4_trans(codes, panel + chunk_offset<V::shape::row_bytes>(row, step + (lane >> 4)));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t b[2][2];  // even channels, odd ones
#pragma unroll
      for (int n = 0; n < 2; ++n) decode_four<Kind, kind_bf16>(permute_bytes(codes[2 * i + n], 0, 0x3120), &b[0][n], &b[1][n]);
      const bool found = Careful && (word::any(b[0][0]) || word::any(b[0][1]) || word::any(b[1][0]) || word::any(b[1][1]));
      if (Careful && ballot<32>(found)) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          add_special<kind_bf16, true>(a.high, b[n][0], b[n][1], w.o[2 * (step + i) + n]);
          b[n][0] = word::finite(b[n][0]), b[n][1] = word::finite(b[n][1]);
        }
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) mma<kind_bf16>(w.o[2 * (step + i) + n], a.high, b[n][0], b[n][1]);
#pragma unroll
      for (int n = 0; n < 2; ++n) mma<kind_bf16>(w.o[2 * (step + i) + n], a.low, b[n][0], b[n][1]);
    }
  }
}

}  // namespace cqsa::gpu::decode
