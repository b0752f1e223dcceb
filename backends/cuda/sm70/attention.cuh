// SPDX-License-Identifier: Apache-2.0
// Attention by Volta's tensor cores: mma.m8n8k4 with f16 operands and f32 accumulation, for dense problems and selected cells.
//
// Every warp has 64 channels of its own (sm70_shape). For a tile of 32 keys it adds up its channels of q k^T for the 16 * Blocks rows
// of its team, in chains of 16 instructions, and hands f32 sums to the team through shared memory; after the softmax it has its channels
// of p v, in chains of 8. What chains give is added in f32, in a fixed order: Volta cuts addends toward zero when it aligns them, so a
// long chain drifts. q stays in registers for the whole block.
//
// Quad pair `pair` of a warp has rows 8 (pair >> 1) .. + 7 of each 16, and with half = pair & 1 of q k^T keys 4 half .. + 3 of each 8, of
// p v channels 32 half .. + 31. With l = lane % 4 and h = 1 from lane 16 on, a lane
//   multiplies keys 16 kb + 8 h + 4 half + l, and gets logits of keys 16 kb + 8 (i >> 2) + 4 half + (l & 2) + (i & 1),
//   multiplies channels 32 half + 16 j + 8 h + 4 e .. + 3 of v, and gets channels 32 half + 16 j + 8 (i >> 2) + 4 e + (l & 2) + (i & 1)
// of rows (l & 1) + (i & 2) + 4 h. So each load of shared memory is 16 bytes, and v needs no transposition.
//
// SPLIT: q and p are sums hi + lo of two f16, and each part has chains of its own. In one chain most of lo would be cut.
#pragma once

#include "attention_load.cuh"
#include "attention_softmax.cuh"
#include "mma.cuh"

namespace cqsa::gpu {

struct sm70_place {
  int t, team, warp, l, h, half, row8;  // row8: first row of the quad pair's eight among each 16
  template <class Shape> CQSA_DEVICE static sm70_place of(int thread) {
    const int t = unknown(thread);
    const int lane = t % 32, pair = lane / 4 % 4;
    return {t, t / (32 * Shape::warps), t / 32 % Shape::warps, lane % 4, lane / 16, pair & 1, pair / 2 * 8};
  }
};

template <class Shape> using sm70_operand = uint32_t[Shape::parts][Shape::blocks][16][2];
template <class Shape> using sm70_sums = float[Shape::blocks][4][8];

CQSA_DEVICE word4x read_piece(const uint16_t* at) { return *reinterpret_cast<const word4x*>(at); }

// A warp's rows and channels of q, from where stage_q has put them.
template <class Shape> CQSA_DEVICE void take_q(const sm70_memory<Shape>& mem, const sm70_place& x, sm70_operand<Shape>& q) {
#pragma unroll
  for (int part = 0; part < Shape::parts; ++part)
#pragma unroll
    for (int b = 0; b < Shape::blocks; ++b) {
      const int row = x.team * Shape::team_rows + 16 * b + x.row8 + 4 * x.h + x.l;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const word4x w = read_piece(mem.tile(0) + part * Shape::rows * Shape::dim + piece_at<Shape>(row, 8 * x.warp + j));
        q[part][b][2 * j][0] = w.x[0], q[part][b][2 * j][1] = w.x[1];
        q[part][b][2 * j + 1][0] = w.x[2], q[part][b][2 * j + 1][1] = w.x[3];
      }
    }
}

// hi and lo in one chain (mutant 10), and that chain through all tiles (11), are what these kernels are about not doing: a test shows
// what it would cost.
CQSA_DEVICE int chain_of(int part) { return CQSA_MUTANT(10) || CQSA_MUTANT(11) ? 0 : part; }

// Chains of one part and block of rows for both sixteens of keys.
template <class Shape, int Parts> using sm70_chains = float[Parts][Shape::blocks][2][8];

template <class Shape, int Parts> CQSA_DEVICE void clear(sm70_chains<Shape, Parts>& c) {
#pragma unroll
  for (int part = 0; part < Parts; ++part)
#pragma unroll
    for (int b = 0; b < Shape::blocks; ++b)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 8; ++i) c[part][b][n][i] = 0.0f;
}

// What the chains have of the logits, times the scale of their 32 or 64 channels, to shared memory; added to what is there when `more`.
template <class Shape, int Parts>
CQSA_DEVICE void store_logits(const sm70_memory<Shape>& mem, const sm70_place& x, const sm70_chains<Shape, Parts>& c, int group,
                              bool more) {
#pragma unroll
  for (int kb = 0; kb < 2; ++kb)
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const int key = 16 * kb + 8 * (i >> 2) + 4 * x.half + (x.l & 2);
      const float2x scale = *reinterpret_cast<const float2x*>(mem.scale(0) + group * Shape::keys + key);
#pragma unroll
      for (int b = 0; b < Shape::blocks; ++b) {
        const int row = 16 * b + x.row8 + (x.l & 1) + (i & 2) + 4 * x.h;
        float2x* at = reinterpret_cast<float2x*>(logits_at(mem, x.team * Shape::warps + x.warp, row, key >> 2) + (x.l & 2));
        float2x s;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          s.x[n] = c[0][b][kb][i + n];
          if constexpr (Parts == 2) s.x[n] += c[1][b][kb][i + n];
          s.x[n] = product_f32(s.x[n], scale.x[n]);
        }
        if (more) {
          CQSA_SM70_PHASE("more", 0);
          s.x[0] += at->x[0], s.x[1] += at->x[1];
        }
        CQSA_SM70_PHASE("scores", Parts);
        *at = s;
      }
    }
}

// A warp's channels of the logits of a tile. Parts: of q, 1 where it is f16 itself.
template <class Shape, int Parts>
CQSA_DEVICE void multiply_qk(const sm70_memory<Shape>& mem, const sm70_place& x, const sm70_operand<Shape>& q, bool break_chains) {
  sm70_chains<Shape, Parts> c;
  const int key = (8 * x.h + 4 * x.half + x.l) ^ int(CQSA_MUTANT(2));
  CQSA_SM70_PHASE("scores", Parts);
  clear<Shape, Parts>(c);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    word4x w[2];
    forget_loads();
#pragma unroll
    for (int kb = 0; kb < 2; ++kb) w[kb] = read_piece(mem.tile(0) + piece_at<Shape>(16 * kb + key, 8 * x.warp + j));
#pragma unroll
    for (int step = 0; step < 2; ++step)
#pragma unroll
      for (int kb = 0; kb < 2; ++kb) {
        const uint32_t k[2] = {w[kb].x[2 * step], w[kb].x[2 * step + 1]};
#pragma unroll
        for (int part = 0; part < Parts; ++part)
#pragma unroll
          for (int b = 0; b < Shape::blocks; ++b) {
            float(&sums)[8] = c[chain_of(part)][b][kb];
            mma_m8n8k4<order::row, order::col>(sums, q[CQSA_MUTANT(5) ? 0 : part][b][2 * j + step], k);
          }
      }
    if (j == 7) store_logits<Shape, Parts>(mem, x, c, 2 * x.warp + break_chains, break_chains);
    if (j == 3 && break_chains) {
      CQSA_SM70_PHASE("more", 0);
      store_logits<Shape, Parts>(mem, x, c, 2 * x.warp, false);
      clear<Shape, Parts>(c);
    }
    CQSA_SM70_PHASE("scores", Parts);
  }
  CQSA_SM70_PHASE("other", 0);
}

// The power of two by which p is multiplied before it is rounded to f16: with the largest scale of v among the keys of the tile, which
// p takes along, that makes at most 2^12. Chosen by the 32 channels that the quad pair has.
template <class Shape> CQSA_DEVICE power_pair scale_p(const attention_params& p, const sm70_memory<Shape>& mem, const sm70_place& x) {
  if (p.scale_v == scale_none) return power_for(1.0f, 11);
  float most[2];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    most[n] = float_of(bits_of(mem.scale(1)[(2 * x.warp + n) * Shape::keys + x.t % 32]) & 0x7fffffffu);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) most[n] = max_f32(most[n], shuffle_xor<32>(most[n], mask));
  }
  return power_for(x.half ? most[1] : most[0], 11);
}

// p times the scale of v, as operands, for step s: 4 keys.
template <class Shape>
CQSA_DEVICE void take_p(const sm70_memory<Shape>& mem, const sm70_place& x, float up, int s,
                        uint32_t (&out)[Shape::blocks][Shape::parts][2]) {
  float4x scale = *reinterpret_cast<const float4x*>(mem.scale(1) + (2 * x.warp + x.half) * Shape::keys + 4 * s);
#pragma unroll
  for (int n = 0; n < 4; ++n) scale.x[n] = product_f32(scale.x[n], up);
#pragma unroll
  for (int b = 0; b < Shape::blocks; ++b) {
    const int row = 16 * b + x.row8 + 4 * x.h + x.l;
    const float4x v = *reinterpret_cast<const float4x*>(logits_at(mem, x.team * Shape::warps, row, s));
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      uint32_t pair[Shape::parts];
      split_pair<Shape::parts>(product_f32(v.x[2 * n], scale.x[2 * n]), product_f32(v.x[2 * n + 1], scale.x[2 * n + 1]), pair);
#pragma unroll
      for (int part = 0; part < Shape::parts; ++part) out[b][part][n] = pair[part];
    }
  }
}

// For mutant 11: the running sums into the chains, or back.
template <bool In, int Blocks>
CQSA_DEVICE void move_sums(float (&o)[Blocks][4][8], float (&c)[Blocks][2][8], int j, const float (&factor)[Blocks][2],
                           const power_pair& power) {
#pragma unroll
  for (int b = 0; b < Blocks; ++b)
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (In) c[b][e][i] = o[b][2 * j + e][i] * factor[b][i >> 1 & 1] * power.up;
        else o[b][2 * j + e][i] = c[b][e][i] * power.down;
      }
}

// o = o * factor + p v, a warp's channels; 16 channels of a quad pair at a time.
template <class Shape>
CQSA_DEVICE void multiply_pv(const attention_params& p, const sm70_memory<Shape>& mem, const sm70_place& x, sm70_sums<Shape>& o) {
  CQSA_SM70_PHASE("values", Shape::parts);
  const power_pair power = scale_p(p, mem, x);
  float factor[Shape::blocks][2];
#pragma unroll
  for (int b = 0; b < Shape::blocks; ++b)
#pragma unroll
    for (int n = 0; n < 2; ++n)
      factor[b][n] = mem.row_factor()[x.team * Shape::team_rows + 16 * b + x.row8 + (x.l & 1) + 2 * n + 4 * x.h];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    sm70_chains<Shape, Shape::parts> c;
    clear<Shape, Shape::parts>(c);
    if (CQSA_MUTANT(11)) move_sums<true>(o, c[0], j, factor, power);
    forget_loads();
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      uint32_t a[Shape::blocks][Shape::parts][2];
      take_p(mem, x, power.up, s, a);
      const word4x w = read_piece(mem.tile(1) + piece_at<Shape>(4 * s + x.l, 8 * x.warp + 4 * x.half + 2 * j + x.h));
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint32_t v[2] = {w.x[2 * e], w.x[2 * e + 1]};
#pragma unroll
        for (int part = 0; part < Shape::parts; ++part)
#pragma unroll
          for (int b = 0; b < Shape::blocks; ++b)
            mma_m8n8k4<order::row, order::row>(c[chain_of(part)][b][e], a[b][CQSA_MUTANT(6) ? 0 : part], v);
      }
    }
    if (CQSA_MUTANT(11)) move_sums<false>(o, c[0], j, factor, power);
#pragma unroll
    for (int e = 0; e < 2 && !CQSA_MUTANT(11); ++e)
#pragma unroll
      for (int b = 0; b < Shape::blocks; ++b)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float sum = c[0][b][e][i];
          if constexpr (Shape::parts == 2) sum += c[1][b][e][i];
          o[b][2 * j + e][i] = fma_f32(o[b][2 * j + e][i], factor[b][i >> 1 & 1], product_f32(sum, power.down));
        }
  }
  CQSA_SM70_PHASE("other", 0);
}

// ------------------------------------------------------------------------------------------------- values that are NaN or Inf

// All threads: v is kept in the place of k, and where it is NaN or Inf there are zeros instead for the matrix unit, which would spread
// them over rows that must not see them.
template <class Shape> CQSA_DEVICE void hide_bad_values(const sm70_memory<Shape>& mem, int t) {
  uint32_t *v = reinterpret_cast<uint32_t*>(mem.tile(1)), *raw = reinterpret_cast<uint32_t*>(mem.tile(0));
#pragma unroll 1
  for (int i = t; i < Shape::tile_bytes / 4; i += Shape::threads) {
    const uint32_t pair = v[i];
    raw[i] = pair;
    v[i] = (not_finite(pair & 0xffffu) ? 0u : pair & 0xffffu) | (not_finite(pair & 0xffff0000u) ? 0u : pair & 0xffff0000u);
  }
}

CQSA_DEVICE int sm70_channel(const sm70_place& x, int nb, int i) {
  return 64 * x.warp + 32 * x.half + 16 * (nb >> 1) + 8 * (i >> 2) + 4 * (nb & 1) + (x.l & 2) + (i & 1);
}

// .. and here the rows that do see them get them, times p.
template <class Shape> CQSA_DEVICE void add_bad_values(const sm70_memory<Shape>& mem, const sm70_place& x, sm70_sums<Shape>& o) {
  const float* scales = mem.scale(2) + (2 * x.warp + x.half) * Shape::keys;
#pragma unroll 1
  for (int key = 0; key < Shape::keys; ++key) {
#pragma unroll
    for (int b = 0; b < Shape::blocks; ++b)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int row = 16 * b + x.row8 + (x.l & 1) + 2 * n + 4 * x.h;
        const float p = logits_at(mem, x.team * Shape::warps, row, key >> 2)[key & 3];
        if (bits_of(p) == 0x80000000u && !CQSA_MUTANT(4)) continue;  // hidden
#pragma unroll
        for (int m = 0; m < 16; ++m) {
          const int nb = m >> 2, i = (m & 1) + 2 * n + (m >> 1 & 1) * 4, channel = sm70_channel(x, nb, i);
          const float v = f16_to_f32(mem.tile(0)[piece_at<Shape>(key, channel >> 3) + (channel & 7)]) * scales[key];
          if (v - v != 0.0f) o[b][nb][i] = fma_f32(p, v, o[b][nb][i]);
        }
      }
  }
}

// -------------------------------------------------------------------------------------------------------- results and state

// Calls f(block, n block, first of two neighbouring registers, row of the block, channel) for each pair of channels of a thread.
template <class Shape, class F> CQSA_DEVICE void each_pair(const sm70_place& x, const F& f) {
#pragma unroll
  for (int b = 0; b < Shape::blocks; ++b)
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const int row = x.team * Shape::team_rows + 16 * b + x.row8 + (x.l & 1) + (i & 2) + 4 * x.h;
#pragma unroll
      for (int nb = 0; nb < 4; ++nb) f(b, nb, i, row, sm70_channel(x, nb, i));
    }
}

template <class Shape, bool Store>
CQSA_DEVICE void exchange_state(const attention_params& p, const sm70_memory<Shape>& mem, const sm70_place& x, sm70_sums<Shape>& o) {
  const block_facts& f = mem.facts();
  each_pair<Shape>(x, [&](int b, int nb, int i, int row, int channel) {
    const int64_t at = sm70_state_index(p, f, mem.row_query()[row], mem.row_head()[row]) * p.head_dim_v + channel;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const bool there = row < f.rows && channel + n < p.head_dim_v;
      if (Store && there) p.state_acc[at + n] = o[b][nb][i + n];
      if (!Store) o[b][nb][i + n] = there ? p.state_acc[at + n] : 0.0f;
    }
  });
}

// Two neighbouring channels: at once where the view says that it can be.
CQSA_DEVICE void store_pair(const gpu_view& out, int64_t at, float a, float b) {
  if (out.kind == kind_f32) {
    *reinterpret_cast<float2x*>(out.data + 4 * at) = float2x{{a, b}};
  } else {
    const uint32_t low = out.kind == kind_f16 ? f32_to_f16(a) : f32_to_bf16(a);
    const uint32_t high = out.kind == kind_f16 ? f32_to_f16(b) : f32_to_bf16(b);
    *reinterpret_cast<uint32_t*>(out.data + 2 * at) = low | high << 16;
  }
}

template <class Shape>
CQSA_DEVICE void store_rows(const attention_params& p, const sm70_memory<Shape>& mem, const sm70_place& x, const sm70_sums<Shape>& o) {
  const block_facts& f = mem.facts();
  each_pair<Shape>(x, [&](int b, int nb, int i, int row, int channel) {
    if (row >= f.rows || channel >= p.head_dim_v) return;
    const float factor = mem.row_factor()[row];
    const int64_t at = offset_of(p.out, f.batch, mem.row_head()[row], f.q_row + mem.row_query()[row], 0);
    const float first = o[b][nb][i] * factor, second = o[b][nb][i + 1] * factor;
    if (p.out.quads) {
      store_pair(p.out, at + channel, first, second);
      return;
    }
    store_element(p.out.data, p.out.kind, at + channel * p.out.stride[3], first);
    if (channel + 1 < p.head_dim_v) store_element(p.out.data, p.out.kind, at + (channel + 1) * p.out.stride[3], second);
  });
}

template <class Shape>
CQSA_DEVICE void finish(const attention_params& p, const sm70_memory<Shape>& mem, const sm70_place& x, sm70_sums<Shape>& o) {
  const block_facts& f = mem.facts();
  if (p.flags & flag_state_out) {
    exchange_state<Shape, true>(p, mem, x, o);
    for (int row = x.t; row < f.rows; row += Shape::threads) {
      const int64_t at = sm70_state_index(p, f, mem.row_query()[row], mem.row_head()[row]);
      p.state_m[at] = mem.row_m()[row];
      p.state_l[at] = mem.row_l()[row];
    }
    return;
  }
  for (int row = x.t; row < f.rows; row += Shape::threads) close_row(p, mem, row);
  barrier();
  store_rows(p, mem, x, o);
}

// ------------------------------------------------------------------------------------------------------------------ the block

// Rows, q to registers, the first tile of k on its way.
template <bool Selected, class Shape>
CQSA_DEVICE bool begin(const sm70_params& params, const sm70_memory<Shape>& mem, const sm70_place& x, sm70_operand<Shape>& q) {
  if (x.t == 0) {
    if constexpr (Selected) begin_selected(params, mem.facts());
    else begin_block(params.a, mem.facts());
    mem.walk() = {-1, 0};
    mem.facts().end = 0;
    next_tile<Selected>(params, mem, mem.facts_of(0));
  }
  barrier();
  if (mem.facts().rows == 0) return false;
  for (int row = x.t; row < Shape::rows; row += Shape::threads) begin_row(params, mem, row);
  if (x.t < 32 && mem.facts_of(0).valid) find_keys<Selected>(params, mem, mem.facts_of(0), x.t);
  barrier();
  if (params.a.q.kind != kind_f16) {
    scale_rows(params.a, mem, x.t);
    barrier();
  }
  stage_q(params.a, mem, x.t);
  barrier();
  take_q(mem, x, q);
  barrier();
  return true;
}

template <bool Selected, class Shape> CQSA_DEVICE void sm70_attention(const sm70_params& params) {
  const attention_params& p = params.a;
  const sm70_memory<Shape> mem{shared_memory()};
  const sm70_place first = sm70_place::of<Shape>(thread_index());
  sm70_operand<Shape> q;
  if (!begin<Selected>(params, mem, first, q)) return;
  const bool active = first.team * Shape::team_rows < mem.facts().rows;  // all of a team or none
  sm70_sums<Shape> o;
#pragma unroll
  for (int b = 0; b < Shape::blocks; ++b)
#pragma unroll
    for (int nb = 0; nb < 4; ++nb)
#pragma unroll
      for (int i = 0; i < 8; ++i) o[b][nb][i] = 0.0f;
  if (p.flags & flag_state_in) exchange_state<Shape, false>(p, mem, first, o);
  if (mem.facts_of(0).valid) {
    sm70_stage<Shape> stage;
    load_tile<0>(p, mem, first.t, stage);
    store_tile<0>(p, mem, first.t, stage);
  }
  barrier();
  // While k is multiplied v arrives, while v is multiplied the next tile of k does.
#pragma unroll 1
  for (int turn = 0; mem.facts_of(turn).valid; turn ^= 1) {
    sm70_tile &tile = mem.facts_of(turn), &next = mem.facts_of(turn ^ 1);
    sm70_place x = sm70_place::of<Shape>(thread_index());
    sm70_stage<Shape> values, keys;
    load_tile<1>(p, mem, x.t, values);
    if (x.t == 0) next_tile<Selected>(params, mem, next);
    if (active) {
      const bool break_chains = p.kv_group == 32 && !CQSA_MUTANT(9);
      if (Shape::parts == 1 || p.q.kind == kind_f16) multiply_qk<Shape, 1>(mem, x, q, break_chains);
      else multiply_qk<Shape, Shape::parts>(mem, x, q, break_chains);
    }
    if (store_tile<1>(p, mem, x.t, values)) atomic_or(&tile.bad, 1);
    if (!CQSA_MUTANT(1)) barrier();
    if (x.t < 32 && next.valid) find_keys<Selected>(params, mem, next, x.t);
    CQSA_SM70_PHASE("softmax", 1);
    if (active) softmax(p, mem, tile, x.team, x.t % (32 * Shape::warps));
    CQSA_SM70_PHASE("other", 0);
    barrier();
    x = sm70_place::of<Shape>(thread_index());
    if (next.valid) load_tile<0>(p, mem, x.t, keys);
    if (tile.bad) {
      hide_bad_values(mem, x.t);
      barrier();
    }
    if (active) {
      multiply_pv(p, mem, x, o);
      if (tile.bad) add_bad_values(mem, x, o);
    }
    if (tile.bad) barrier();  // k takes its place again
    if (next.valid) store_tile<0>(p, mem, x.t, keys);
    barrier();
  }
  finish(p, mem, sm70_place::of<Shape>(thread_index()), o);
}

}  // namespace cqsa::gpu
