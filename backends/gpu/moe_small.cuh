// SPDX-License-Identifier: Apache-2.0
// Around the products of a mixture of experts: tokens to what is multiplied, descriptors of experts, combination, and the rounding to q8 by itself.
#pragma once

#include "moe_common.cuh"
#include "moe_order.cuh"

namespace cqsa::gpu {

CQSA_DEVICE void store_index(char* array, int bytes, int64_t i, int64_t value) {
  store_u32(array + bytes * i, uint32_t(value));
  if (bytes == 8) store_u32(array + 8 * i + 4, uint32_t(uint64_t(value) >> 32));
}

// ---- tokens -------------------------------------------------------------------------------------------------------------------

// The sum, or the largest, over a block, for all of its threads; shared memory has a word for each team of lanes.
template <int Lanes, class T, class Join> CQSA_DEVICE T over_block(T x, T* memory, const Join& join) {
#pragma unroll
  for (int mask = Lanes / 2; mask > 0; mask /= 2) x = join(x, shuffle_xor<Lanes>(x, mask));
  barrier();
  if (thread_index() % Lanes == 0) memory[thread_index() / Lanes] = x;
  barrier();
  x = memory[0];
  for (int i = 1; i < block_threads() / Lanes; ++i) x = join(x, memory[i]);
  return x;
}

// The power of two that brings the largest magnitude to 2^12 .. 2^13, and its inverse: sums of f16 products stay far from the ends.
CQSA_DEVICE float power_for(uint32_t largest) {
  const int exponent = int(largest >> 23);
  if (largest == 0 || exponent == 255) return 1.0f;
  const int up = 127 + 127 + 12 - exponent;  // at most 254: very small rows stay below
  return float_of(uint32_t(up > 253 ? 253 : up < 1 ? 1 : up) << 23);
}

// Four elements of a row in the forms that are wanted. Eight lanes have 32.
template <int Lanes> CQSA_DEVICE float4x put_four(const moe_take_params& p, int64_t t, int64_t c, const float4x& x) {
  const moe_activations& to = p.to;
  const bool inside = c < to.padded;
  if (to.plain && inside) *reinterpret_cast<float4x*>(to.plain + t * to.padded + c) = x;
  if (!to.code && !p.q8_first) return x;
  const q8_scale s = scale_of_eight<Lanes>(x);
  const uint32_t word = word_of_q8(x, s);
  if (to.code && inside) {
    *reinterpret_cast<uint32_t*>(to.code + t * to.padded + c) = word;
    if (c % 32 == 0) to.scale[(t * to.padded + c) / 32] = s.scale;
  }
  if (!p.q8_first) return x;
  float4x rounded;
#pragma unroll
  for (int i = 0; i < 4; ++i) rounded.x[i] = float(int8_t(word >> 8 * i & 0xffu)) * s.scale;
  return rounded;
}

CQSA_DEVICE void put_halves(const moe_take_params& p, int64_t t, int64_t c, const float4x& x, float power) {
  word2x words;
#pragma unroll
  for (int i = 0; i < 2; ++i) words.x[i] = f32_to_f16(x.x[2 * i] * power) | uint32_t(f32_to_f16(x.x[2 * i + 1] * power)) << 16;
  put_ordered(p.to.half + t * p.to.padded, c, words, p.order);
}

// A block takes a row, or a team of lanes where rows are short.
template <int Lanes> struct row_takers {
  bool team;
  float* memory;
  CQSA_DEVICE int index() const { return team ? thread_index() % Lanes : thread_index(); }
  CQSA_DEVICE int count() const { return team ? Lanes : block_threads(); }
  template <class T, class Join> CQSA_DEVICE T joined(T x, const Join& join) const {
    if (!team) return over_block<Lanes>(x, reinterpret_cast<T*>(memory), join);
#pragma unroll
    for (int mask = Lanes / 2; mask > 0; mask /= 2) x = join(x, shuffle_xor<Lanes>(x, mask));
    return x;
  }
};

template <int Lanes> CQSA_DEVICE void take_row(const moe_take_params& p, int64_t t, const row_takers<Lanes>& us) {
  uint32_t most = 0;
  float sum = 0;
  for (int64_t first = 0; first < p.to.padded; first += 4 * us.count()) {
    const int64_t c = first + 4 * us.index();
    const float4x x = four_of(p.x, t, c, p.elements);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      most = larger_bits(most, x.x[i]);
      if (p.factor && !p.factor_is_logit && c + i < p.elements) sum = fma_f32(x.x[i], p.factor[(c + i) * p.factor_stride], sum);
    }
    if (!p.to.half) put_four<Lanes>(p, t, c, x);
  }
  if (p.to.half) {
    most = us.joined(most, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
    const float power = power_for(most);
    for (int64_t first = 0; first < p.to.padded; first += 4 * us.count()) {
      const int64_t c = first + 4 * us.index();
      const float4x x = put_four<Lanes>(p, t, c, four_of(p.x, t, c, p.elements));
      if (c < p.to.padded) put_halves(p, t, c, x, power);
    }
    if (us.index() == 0) p.to.half_scale[t] = 1.0f / power;
  }
  if (!p.factors) return;
  if (p.factor && !p.factor_is_logit) sum = us.joined(sum, [](float a, float b) { return a + b; });
  if (us.index() == 0) p.factors[t] = !p.factor ? 1.0f : sigmoid_f32(p.factor_is_logit ? p.factor[t * p.factor_stride] : sum);
}

template <int Lanes> CQSA_DEVICE void take_block(const moe_take_params& p) {
  const row_takers<Lanes> us{p.teams != 0, reinterpret_cast<float*>(shared_memory())};
  const int64_t each = us.team ? block_threads() / Lanes : 1;
  if (block_index_x() == 0 && thread_index() < 16 && p.control) p.control[thread_index()] = 0;
  for (int64_t t = block_index_x() * each + (us.team ? thread_index() / Lanes : 0); t < p.tokens; t += grid_size_x() * each) {
    for (int64_t s = us.index(); p.experts && s < p.ids.topk; s += us.count()) p.experts[t * p.ids.topk + s] = usable_expert(p.ids, p.lists, t, s);
    take_row<Lanes>(p, t, us);
  }
}

// ---- descriptors --------------------------------------------------------------------------------------------------------------

CQSA_DEVICE void describe_block(const moe_describe_params& p) {
  for (int64_t i = thread_index(); i < p.count; i += block_threads()) {
    cqsa_moe_matrix m{};
    m.data = p.list[i].data, m.row_bytes = p.list[i].row_bytes, m.format = p.list[i].format;
    p.to[i] = m;
  }
}

// ---- combination --------------------------------------------------------------------------------------------------------------

CQSA_DEVICE bool contributes(const moe_combine_params& p, int64_t t, int64_t s) {
  if (p.experts) return p.experts[t * p.topk + s] >= 0;
  return !p.ids.ids.data || id_at(p.ids, t, s) >= 0;
}

CQSA_DEVICE void add_four(float4x& sum, const float4x& y, float factor) {
#pragma unroll
  for (int i = 0; i < 4; ++i) sum.x[i] += product_f32(factor, y.x[i]);
}

CQSA_DEVICE float4x combined_four(const moe_combine_params& p, int64_t t, int64_t c) {
  float4x sum = {{0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll 4
  for (int64_t s = 0; s < p.topk; ++s) {
    const float weight = float_of(load_u32(p.weights.data + 4 * (t * p.weights.stride[0] + s * p.weights.stride[1])));
    if (weight != 0.0f && contributes(p, t, s)) add_four(sum, four_of(p.y, t * p.topk + s, c, p.hidden), weight);
  }
  if (!p.shared) return sum;
  const moe_view shared{const_cast<char*>(reinterpret_cast<const char*>(p.shared)), {p.hidden, 1}, kind_f32, p.hidden % 4 == 0};
  add_four(sum, four_of(shared, t, c, p.hidden), p.factors ? p.factors[t] : 1.0f);
  return sum;
}

CQSA_DEVICE void store_out(const moe_view& out, int64_t row, int64_t c, int64_t n, const float4x& x) {
  gpu_view v = view_of_row(out);
  if (c + 4 > n) v.quads = 0;
  store_four(v, row * out.stride[0], c, n, x);
}

CQSA_DEVICE void combine_block(const moe_combine_params& p) {
  const int64_t quads = (p.hidden + 3) / 4, rows = p.clear ? p.tokens * p.topk : p.tokens;
  for (int64_t unit = block_index_x() * block_threads() + thread_index(); unit < rows * quads; unit += grid_size_x() * block_threads()) {
    const int64_t row = unit / quads, c = unit % quads * 4;
    if (!p.clear) store_out(p.out, row, c, p.hidden, combined_four(p, row, c));
    else if (p.experts[row] < 0) store_out(p.out, row, c, p.hidden, float4x{{0.0f, 0.0f, 0.0f, 0.0f}});
  }
}

// ---- q8 by itself -------------------------------------------------------------------------------------------------------------

template <int Lanes> CQSA_DEVICE void quantize_block(const moe_quantize_params& p) {
  const int64_t quads = p.elements / 4, all = p.rows * quads;
  for (int64_t first = block_index_x() * block_threads(); first < all; first += grid_size_x() * block_threads()) {
    const int64_t unit = first + thread_index(), row = min_i64(unit, all - 1) / quads, c = min_i64(unit, all - 1) % quads * 4;
    const float4x x = four_of(p.x, row, c, p.elements);
    const q8_scale s = scale_of_eight<Lanes>(x);
    const uint32_t word = word_of_q8(x, s);
    if (unit >= all) continue;
    signed char* const to = reinterpret_cast<signed char*>(p.codes.data) + row * p.codes.stride[0] + c * p.codes.stride[1];
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i * p.codes.stride[1]] = static_cast<signed char>(word >> 8 * i & 0xffu);
    if (c % 32 == 0) store_u32(p.scales.data + 4 * (row * p.scales.stride[0] + c / 32 * p.scales.stride[1]), bits_of(s.scale));
  }
}

}  // namespace cqsa::gpu
