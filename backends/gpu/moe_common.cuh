// SPDX-License-Identifier: Apache-2.0
// What kernels of a mixture of experts share: where the matrix of an expert is, which expert an id means, activations, and the rounding to q8.
#pragma once

#include "quad.cuh"

#include "moe_params.h"  // needs the vendor's words of the file above

namespace cqsa::gpu {

// ---- weights ------------------------------------------------------------------------------------------------------------------

struct moe_matrix {
  const char* data;
  int64_t row_bytes;
  int32_t format;
};
CQSA_DEVICE moe_matrix matrix_of(const moe_weights& w, int64_t expert) {
  if (!w.list) return {w.data + expert * w.expert_bytes, w.row_bytes, w.format};
  const cqsa_moe_matrix& m = w.list[expert];
  return {static_cast<const char*>(m.data), m.row_bytes ? int64_t(m.row_bytes) : w.row_bytes, m.format};
}
CQSA_DEVICE int32_t format_of(const moe_weights& w, int64_t expert) { return w.list ? w.list[expert].format : w.format; }
CQSA_DEVICE float bias_of(const moe_weights& w, int64_t expert, int64_t row) {
  return w.bias ? float_of(load_u32(w.bias + 4 * (expert * w.bias_stride[0] + row * w.bias_stride[1]))) : 0.0f;
}

// Whether some projection of the expert is not here.
CQSA_DEVICE bool is_missing(const cqsa_moe_matrix* const (&lists)[3], int64_t expert) {
  bool missing = false;
#pragma unroll
  for (int i = 0; i < 3; ++i) missing |= lists[i] && lists[i][expert].data == nullptr;
  return missing;
}

// ---- ids ----------------------------------------------------------------------------------------------------------------------

CQSA_DEVICE int64_t id_at(const moe_ids& p, int64_t t, int64_t s) { return load_index(p.ids.data, p.ids.kind, t * p.ids.stride[0] + s * p.ids.stride[1]); }
CQSA_DEVICE int32_t expert_at(const moe_ids& p, int64_t t, int64_t s) {
  return moe::expert_of(id_at(p, t, s), p.num_ids, p.map, p.map_stride, p.num_experts);
}
CQSA_DEVICE void count_skipped(const moe_ids& p, int which) {
  if (p.counters) atomic_add_i64(p.counters + which * p.counters_stride, 1);
}
// .. and counts what is skipped. Negative: nothing.
CQSA_DEVICE int32_t usable_expert(const moe_ids& p, const cqsa_moe_matrix* const (&lists)[3], int64_t t, int64_t s) {
  const int32_t e = expert_at(p, t, s);
  if (e == moe::out_of_range) count_skipped(p, 0);
  if (e < 0 || !is_missing(lists, e)) return e;
  count_skipped(p, 1);
  return moe::not_here;
}

// ---- q8 -----------------------------------------------------------------------------------------------------------------------

// The scale of 32 numbers whose largest magnitude has these bits, and what they are multiplied by; the bits of backends/cpu/moe-inl.h.
struct q8_scale {
  float scale, inverse;  // inverse 0: all codes are 0
};
CQSA_DEVICE q8_scale scale_of_q8(uint32_t largest) {
  const float a = float_of(largest), inverse = largest < infinite_bits ? 127.0f / a : 0.0f;
  const bool none = largest >= infinite_bits || (bits_of(inverse) & 0x7fffffffu) >= infinite_bits;
  return {largest >= infinite_bits ? float_of(0x7fc00000u) : a / 127.0f, none ? 0.0f : inverse};
}
// Adding 1.5 * 2^23 rounds to nearest even. The product stands alone: a NaN times 0 must not get through.
CQSA_DEVICE uint32_t code_of_q8(float x, const q8_scale& s) {
  const float shifted = (s.inverse == 0.0f ? 0.0f : product_f32(x, s.inverse)) + 12582912.0f;
  return bits_of(shifted) & 0xffu;
}
CQSA_DEVICE uint32_t larger_bits(uint32_t most, float x) {
  const uint32_t bits = bits_of(x) & 0x7fffffffu;
  return bits > most ? bits : most;
}

// Eight neighbouring lanes have 32 numbers, four each.
template <int Lanes> CQSA_DEVICE q8_scale scale_of_eight(const float4x& x) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) most = larger_bits(most, x.x[i]);
#pragma unroll
  for (int mask = 1; mask < 8; mask *= 2) {
    const uint32_t other = shuffle_xor<Lanes>(most, mask);
    most = other > most ? other : most;
  }
  return scale_of_q8(most);
}
CQSA_DEVICE uint32_t word_of_q8(const float4x& x, const q8_scale& s) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) word |= code_of_q8(x.x[i], s) << 8 * i;
  return word;
}

// ---- rows of x ----------------------------------------------------------------------------------------------------------------

CQSA_DEVICE gpu_view view_of_row(const moe_view& x) {
  gpu_view v{};
  v.data = x.data, v.kind = x.kind, v.quads = x.quads, v.stride[3] = x.stride[1];
  return v;
}
// Elements c .. c + 3 of row r, zeros from n on. n need not be a multiple of four.
CQSA_DEVICE float4x four_of(const moe_view& x, int64_t r, int64_t c, int64_t n) {
  gpu_view v = view_of_row(x);
  if (c + 4 > n) v.quads = 0;
  return load_four(v, r * x.stride[0], c, n);
}

// ---- activations --------------------------------------------------------------------------------------------------------------

CQSA_DEVICE float sigmoid_f32(float x) { return 1.0f / (1.0f + exp_f32(-x)); }
// The two bounds let a NaN through.
CQSA_DEVICE float at_most(float x, float limit) { return x > limit ? limit : x; }
CQSA_DEVICE float at_least(float x, float limit) { return x < limit ? limit : x; }
CQSA_DEVICE float gelu_f32(float x, bool by_tanh) {
  const float s = by_tanh ? tanh_f32(0.797884561f * fma_f32(x * x * x, 0.044715f, x)) : erf_f32(x * 0.707106781f);
  return 0.5f * x * (1.0f + s);
}
CQSA_DEVICE float swiglu_f32(const moe_activation& how, float g, float u) {
  g = at_most(g, how.limit), u = at_least(at_most(u, how.limit), -how.limit);
  return g * sigmoid_f32(how.alpha * g) * (u + how.beta);
}
CQSA_DEVICE float activated(const moe_activation& how, float g, float u) {
  switch (how.kind) {
    case CQSA_MOE_SWIGLU: return swiglu_f32(how, g, u);
    case CQSA_MOE_GEGLU: return gelu_f32(g, false) * u;
    case CQSA_MOE_GEGLU_TANH: return gelu_f32(g, true) * u;
    case CQSA_MOE_SILU: return u * sigmoid_f32(u);
    case CQSA_MOE_GELU: return gelu_f32(u, false);
    case CQSA_MOE_GELU_TANH: return gelu_f32(u, true);
    default: return at_least(u, 0.0f) * at_least(u, 0.0f);
  }
}

// ---- tiles --------------------------------------------------------------------------------------------------------------------

CQSA_DEVICE int64_t count_of_tiles(const moe_tiles& t) {
  return t.list ? int64_t(*t.count) : t.slots_are_tiles ? t.tokens : int64_t((uint32_t(t.tokens) + uint32_t(t.most) - 1) / uint32_t(t.most));
}
CQSA_DEVICE moe_tile tile_of(const moe_tiles& t, int64_t n) {
  if (t.list) return t.list[n];
  if (t.slots_are_tiles) return {t.experts[n], int32_t(n), 1, 0};
  const int64_t first = n * t.most;
  return {0, int32_t(first), int32_t(min_i64(t.most, t.tokens - first)), 0};
}
CQSA_DEVICE int64_t slot_at(const moe_tiles& t, int64_t place) { return t.order ? t.order[place] : place; }

}  // namespace cqsa::gpu
