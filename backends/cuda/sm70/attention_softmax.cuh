// SPDX-License-Identifier: Apache-2.0
// From logits of a tile to probabilities, and what becomes of a row when all its keys are through. Everything here is f32.
#pragma once

#include "attention_memory.cuh"
#include "backends/gpu/row_end.cuh"

namespace cqsa::gpu {

// Softcap, bias, ALiBi, masks on one logit; -inf where the key is hidden.
template <class Shape>
CQSA_DEVICE float fix_logit(const attention_params& p, const sm70_memory<Shape>& mem, const sm70_tile& tile, int row, int key, float s) {
  const block_facts& f = mem.facts();
  const int query = mem.row_query()[row];
  const int64_t h = mem.row_head()[row];
  bool hidden = key < tile.lo + query || key >= tile.keys || (tile.gone >> key & 1u);
  if (!CQSA_MUTANT(3)) hidden = hidden || key >= tile.hi + query;
  if (hidden) return -infinity();
  if (p.mask.data && p.mask.data[offset_of(p.mask, f.batch, h, f.mask_row + query, tile.tile_col + key)] == 0) return -infinity();
  if (p.softcap > 0) s = p.softcap * tanh_f32(s / p.softcap);
  if (p.bias.data) s += load_element(p.bias.data, p.bias.kind, offset_of(p.bias, f.batch, h, f.mask_row + query, tile.tile_col + key));
  if (p.slopes.data) {
    const int64_t ahead = f.position + query - (tile.tile_pos + key);
    s -= mem.row_slope()[row] * float(ahead < 0 ? -ahead : ahead);
  }
  return s;
}

// One row, four of its keys; eight neighbouring lanes have all of them. Probabilities take the place of the logits of warp 0, a hidden
// pair is -0 there.
template <class Shape>
CQSA_DEVICE void softmax_row(const sm70_memory<Shape>& mem, int slab, int first_row, int row, int quad, const float4x& logits) {
  constexpr float log2e = 1.4426950408889634f;
  const float old = mem.row_m()[first_row + row];
  float top = max_f32(max_f32(logits.x[0], logits.x[1]), max_f32(logits.x[2], logits.x[3]));
#pragma unroll
  for (int mask = 4; mask > 0; mask /= 2) top = max_f32(top, shuffle_xor<32>(top, mask));
  top = max_f32(old, top);
  // A row that has seen no key yet: any finite reference does, since every p is 2^-inf = 0.
  const float ref = top == -infinity() ? 0.0f : top;
  float4x out;
  float e[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    e[j] = exp2_f32((logits.x[j] - ref) * log2e);
    out.x[j] = logits.x[j] == -infinity() ? -0.0f : e[j];
  }
  float sum = (e[0] + e[1]) + (e[2] + e[3]);
#pragma unroll
  for (int mask = 4; mask > 0; mask /= 2) sum = sum + shuffle_xor<32>(sum, mask);
  *reinterpret_cast<float4x*>(logits_at(mem, slab, row, quad)) = out;
  // Everyone has read m: the shuffles needed it.
  if (quad == 0) {
    const float factor = exp2_f32((old - ref) * log2e);
    mem.row_m()[first_row + row] = top;
    mem.row_l()[first_row + row] = fma_f32(mem.row_l()[first_row + row], factor, sum);
    mem.row_factor()[first_row + row] = factor;
  }
}

// The rows of a team, by its threads. What its warps have of a logit is added in their order.
template <class Shape>
CQSA_DEVICE void softmax(const attention_params& p, const sm70_memory<Shape>& mem, const sm70_tile& tile, int team, int t) {
  const int quad = t & 7, first_row = team * Shape::team_rows, slab = team * Shape::warps;
#pragma unroll 1
  for (int row = t >> 3; row < Shape::team_rows; row += 4 * Shape::warps) {
    float4x s = *reinterpret_cast<const float4x*>(logits_at(mem, slab, row, quad));
#pragma unroll
    for (int w = 1; w < Shape::warps - CQSA_MUTANT(7); ++w) {
      const float4x more = *reinterpret_cast<const float4x*>(logits_at(mem, slab + w, row, quad));
#pragma unroll
      for (int j = 0; j < 4; ++j) s.x[j] += more.x[j];
    }
    const float scale = mem.row_scale()[first_row + row];
#pragma unroll
    for (int j = 0; j < 4; ++j) s.x[j] = product_f32(s.x[j], scale);
    if (tile.fix || tile.gone) {
      float* at = logits_at(mem, slab, row, quad);
      *reinterpret_cast<float4x*>(at) = s;
#pragma unroll 1
      for (int j = 0; j < 4; ++j) at[j] = fix_logit(p, mem, tile, first_row + row, quad * 4 + j, at[j]);
      s = *reinterpret_cast<const float4x*>(at);
    }
    softmax_row(mem, slab, first_row, row, quad, s);
  }
}

CQSA_DEVICE int64_t sm70_state_index(const attention_params& p, const block_facts& f, int query, int64_t h) {
  return (f.batch * p.num_heads + h) * p.state_rows + f.state_row + query;
}

// One thread per row: turns (m, l) into the factor of its sums, and writes its lse.
template <class Shape> CQSA_DEVICE void close_row(const attention_params& p, const sm70_memory<Shape>& mem, int row) {
  const block_facts& f = mem.facts();
  const int64_t h = mem.row_head()[row];
  const row_end end = end_row(mem.row_m()[row], mem.row_l()[row], sink_of(p.sinks, h));
  if (p.lse.data) store_u32(p.lse.data + 4 * offset_of(p.lse, f.batch, h, f.q_row + mem.row_query()[row], 0), bits_of(end.lse));
  mem.row_factor()[row] = end.factor / end.divisor;
}

}  // namespace cqsa::gpu
