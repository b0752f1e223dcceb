// SPDX-License-Identifier: Apache-2.0
// Which rows of weights the lines of an operand of 16 are, and what becomes of their sums. Gated: lines 0-7 are rows of gate, 8-15 the same of up, so that
// a thread has both. Otherwise neighbours.
#pragma once

#include "moe_halves.cuh"

namespace cqsa::gpu::sm80 {

CQSA_DEVICE bool is_paired(const moe_multiply_params& p) { return p.gate_up && p.gate.present; }
// Of h or y: how many come from an operand.
CQSA_DEVICE int outputs_of_operand(const moe_multiply_params& p) { return is_paired(p) ? 8 : 16; }

// Line g (high 0) or g + 8 (high 1) of an operand whose first output is `first`: the output that it is about.
CQSA_DEVICE int64_t output_of_line(const moe_multiply_params& p, int64_t first, int g, int high) { return first + g + (is_paired(p) ? 0 : 8 * high); }
CQSA_DEVICE int64_t row_of_output(const moe_multiply_params& p, int64_t n, int high) {
  if (!p.gate_up) return n;
  return is_paired(p) && high == 0 ? moe::gate_row(p.layout, n) : moe::up_row(p.layout, n, p.outputs);
}
CQSA_DEVICE const moe_weights& weights_of_half(const moe_multiply_params& p, int high) { return is_paired(p) && high == 0 ? p.gate : p.up; }

// Rows past the last one are read as that one, and not stored.
template <class Walk> CQSA_DEVICE void take_rows(const moe_multiply_params& p, int64_t expert, int64_t first, int operands, Walk& walk) {
  const int g = thread_index() % 32 / 4;
  const moe_matrix of[2] = {matrix_of(weights_of_half(p, 0), expert), matrix_of(weights_of_half(p, 1), expert)};
#pragma unroll
  for (int i = 0; i < 2 * operands; ++i) {
    const int64_t n = min_i64(output_of_line(p, first + i / 2 * outputs_of_operand(p), g, i % 2), p.outputs - 1);
    walk.take(i, of[i % 2].data + row_of_output(p, n, i % 2) * of[i % 2].row_bytes, of[i % 2].format);
  }
}

// Sums of two tokens for lines g and g + 8 of an operand.
struct line_bias {
  float x[2];
};
CQSA_DEVICE line_bias bias_of_lines(const moe_multiply_params& p, int64_t expert, int64_t first, int g) {
  line_bias b{{0.0f, 0.0f}};
#pragma unroll
  for (int high = 0; high < 2; ++high) {
    const int64_t n = output_of_line(p, first, g, high);
    if (n < p.outputs) b.x[high] = bias_of(weights_of_half(p, high), expert, row_of_output(p, n, high));
  }
  return b;
}

// Where a token's outputs go, and what sums have to be multiplied by.
struct token_place {
  float* to;
  int64_t step;
  float scale;
};
CQSA_DEVICE void store_output(const moe_multiply_params& p, const token_place& at, int64_t n, float x) {
  if (n < p.outputs) at.to[n * at.step] = x;
}
// What becomes of sums. Of the usual two there is a copy for each register; code for every activation at each would not stay in the instruction cache.
enum class ending { down, swiglu, any };
CQSA_DEVICE ending ending_of(const moe_multiply_params& p) {
  return !p.gate_up ? ending::down : is_paired(p) && p.how.kind == CQSA_MOE_SWIGLU ? ending::swiglu : ending::any;
}
template <ending End>
CQSA_DEVICE void store_lines(const moe_multiply_params& p, const token_place& at, int64_t first, int g, const line_bias& bias, float low, float high) {
  const float a = fma_f32(low, at.scale, bias.x[0]), b = fma_f32(high, at.scale, bias.x[1]);
  if (End == ending::swiglu) return store_output(p, at, first + g, swiglu_f32(p.how, a, b));
  if (End == ending::any && is_paired(p)) return store_output(p, at, first + g, activated(p.how, a, b));
  store_output(p, at, first + g, End == ending::any ? activated(p.how, 0.0f, a) : a);
  store_output(p, at, first + g + 8, End == ending::any ? activated(p.how, 0.0f, b) : b);
}
CQSA_DEVICE token_place place_of_token(const moe_multiply_params& p, const moe_tile& tile, int token, float half_scale) {
  const int64_t place = tile.first + token;
  const float scale = half_scale * (1.0f / moe_weight_factor);
  if (p.gate_up) return {p.h.plain + place * p.h.padded, 1, scale};
  return {reinterpret_cast<float*>(p.y.data) + slot_at(p.tiles, place) * p.y.stride[0], p.y.stride[1], scale};
}

// The row of activations of a token, and its scale.
CQSA_DEVICE int32_t row_of_token(const moe_multiply_params& p, const moe_tile& tile, int token) {
  return p.gate_up ? int32_t(uint32_t(slot_at(p.tiles, tile.first + token)) / uint32_t(p.topk)) : tile.first + token;
}

// The end of a tile: of a warp the sums of two operands by 8 Eights tokens, as mma.cuh has them.
template <ending End>
CQSA_DEVICE void store_token(const moe_multiply_params& p, const moe_tile& tile, int64_t first, const line_bias (&bias)[2], int token, float scale,
                             const float (&low)[2], const float (&high)[2]) {
  const int g = thread_index() % 32 / 4;
  const token_place at = place_of_token(p, tile, token, scale);
#pragma unroll
  for (int m = 0; m < 2; ++m) store_lines<End>(p, at, first + m * outputs_of_operand(p), g, bias[m], low[m], high[m]);
}
template <ending End, int Eights, class Scale>
CQSA_DEVICE void store_sums(const moe_multiply_params& p, const moe_tile& tile, int64_t first, const Scale& scale_of, const float (&c)[2][4 * Eights]) {
  const int lane = thread_index() % 32, g = lane / 4, l = lane % 4;
  const line_bias bias[2] = {bias_of_lines(p, tile.expert, first, g), bias_of_lines(p, tile.expert, first + outputs_of_operand(p), g)};
  const auto one = [&](int n, int i, float a, float b, float c0, float c1) {
    const int token = 8 * n + 2 * l + i;
    const float low[2] = {a, c0}, high[2] = {b, c1};
    if (token < tile.count) store_token<End>(p, tile, first, bias, token, scale_of(token), low, high);
  };
  if constexpr (End == ending::any) {
    // Registers have no index: by way of local memory.
    float sums[2][4 * Eights];
#pragma unroll
    for (int i = 0; i < 8 * Eights; ++i) sums[i / (4 * Eights)][i % (4 * Eights)] = c[i / (4 * Eights)][i % (4 * Eights)];
#pragma unroll 1
    for (int n = 0; n < 2 * Eights; ++n) {
      const int at = n / 2 * 4 + n % 2;
      one(n / 2, n % 2, sums[0][at], sums[0][at + 2], sums[1][at], sums[1][at + 2]);
    }
  } else {
#pragma unroll
    for (int n = 0; n < Eights; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) one(n, i, c[0][4 * n + i], c[0][4 * n + 2 + i], c[1][4 * n + i], c[1][4 * n + 2 + i]);
  }
}
template <int Eights, class Scale>
CQSA_DEVICE void end_sums(const moe_multiply_params& p, const moe_tile& tile, int64_t first, const Scale& scale_of, const float (&c)[2][4 * Eights]) {
  const ending end = ending_of(p);
  if (end == ending::down) store_sums<ending::down, Eights>(p, tile, first, scale_of, c);
  else if (end == ending::swiglu) store_sums<ending::swiglu, Eights>(p, tile, first, scale_of, c);
  else store_sums<ending::any, Eights>(p, tile, first, scale_of, c);
}

}  // namespace cqsa::gpu::sm80
