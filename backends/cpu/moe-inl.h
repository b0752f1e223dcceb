// SPDX-License-Identifier: Apache-2.0
// What mixtures of experts compute, for one instruction set: rows of weights to codes or numbers, dot products, activations. The file that includes this has
// included one of moe_dot_*-inl.h before. Compiled without contraction: what is fused says so, so a token's bits do not depend on who stands beside it.
#pragma once

#include <math.h>

#include "moe_job.h"
#include "quant-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cqsa::cpu {
namespace {
namespace HWY_NAMESPACE {

// ---- weights ----------------------------------------------------------------------------------------------------------------

struct unpacked_apart {
  int8_t* code;
  alignas(64) float scale[16], min[16];
};

template <class Format> static void unpack_row(const uint8_t* from, int64_t n, const moe_codes* to, int64_t r) {
  int8_t* code = to->code + r * to->padded;
  float *scale = to->scale + r * (to->padded / 16), *least = to->least + r * (to->padded / 16);
  constexpr int parts = Format::elements / 16, per_group = Format::group / 16;
  unpacked_apart u;
  for (int64_t i = 0; i < n; i += Format::elements, from += Format::bytes) {
    u.code = code + i;
    Format::unpack(from, &u);
    for (int g = 0; g < parts; ++g) scale[i / 16 + g] = u.scale[g / per_group];
    if (Format::has_min)
      for (int g = 0; g < parts; ++g) least[i / 16 + g] = u.min[g / per_group];
  }
  memset(code + n, 0, size_t(to->padded - n));
  memset(scale + n / 16, 0, size_t((to->padded - n) / 16) * 4);
  if (Format::has_min) memset(least + n / 16, 0, size_t((to->padded - n) / 16) * 4);
}

// At CQSA_QUANT_*, from Q1_0 on.
using unpack_fn = void (*)(const uint8_t* from, int64_t n, const moe_codes* to, int64_t r);
static const unpack_fn unpackers[] = {
    nullptr,           nullptr,          nullptr,          nullptr,          unpack_row<q1_0>,    unpack_row<q2_0>,  unpack_row<q4_0>,    unpack_row<q4_1>,
    unpack_row<q5_0>,  unpack_row<q5_1>, unpack_row<q8_0>, unpack_row<q2_k>, unpack_row<q3_k>,    unpack_row<q4_k>,  unpack_row<q5_k>,    unpack_row<q6_k>,
    unpack_row<iq1_s>, unpack_row<iq1_m>, unpack_row<iq2_xxs>, unpack_row<iq2_xs>, unpack_row<iq2_s>, unpack_row<iq3_xxs>, unpack_row<iq3_s>, unpack_row<iq4_nl>,
    unpack_row<iq4_xs>, unpack_row<tq1_0>, unpack_row<tq2_0>, unpack_row<mxfp4>, unpack_row<nvfp4>,
};
static_assert(sizeof unpackers / sizeof *unpackers == CQSA_QUANT_NVFP4 + 1, "every format");

static void moe_unpack(cqsa_quant_format format, const uint8_t* from, int64_t n, const moe_codes* to, int64_t r) { unpackers[format](from, n, to, r); }

// F32, F16 and BF16 have room for a piece at a time.
static void moe_decode(cqsa_quant_format format, const uint8_t* from, int64_t n, float* to) {
  if (format > CQSA_QUANT_BF16) return decoders[format](from, n, to);
  const int64_t bytes = format == CQSA_QUANT_F32 ? 4 : 2;
  for (int64_t i = 0; i < n; i += quant_piece) decoders[format](from + i * bytes, min64(quant_piece, n - i), to + i);
}

// ---- products ---------------------------------------------------------------------------------------------------------------

template <bool has_least, int rows> static void dot_all(dot_block b, int64_t count, float* sums, int64_t step) {
  int64_t c = 0;
  for (; c + dot_count <= count; c += dot_count, b.index += dot_count, sums += dot_count * step) dot_tile<has_least, rows, dot_count>(b, sums, step);
  if constexpr (dot_count == 4) {  // experts with few tokens are the usual case
    if (count - c == 3) return dot_tile<has_least, rows, 3>(b, sums, step);
    if (count - c == 2) return dot_tile<has_least, rows, 2>(b, sums, step);
  }
  for (; c < count; ++c, ++b.index, sums += step) dot_tile<has_least, rows, 1>(b, sums, step);
}

template <bool has_least> static void dot_rows_of(const moe_codes* w, int64_t rows, const moe_activations* x, const int32_t* index, int64_t count, float* sums,
                                                  int64_t step) {
  int64_t r = 0;
  for (; r + dot_rows <= rows; r += dot_rows) dot_all<has_least, dot_rows>({w, x, r, index}, count, sums + r, step);
  for (; r < rows; ++r) dot_all<has_least, 1>({w, x, r, index}, count, sums + r, step);
}

static void moe_dot_codes(const moe_codes* w, int64_t rows, const moe_activations* x, const int32_t* index, int64_t count, float* sums, int64_t step) {
  (w->has_least ? dot_rows_of<true> : dot_rows_of<false>)(w, rows, x, index, count, sums, step);
}

static inline float sum_lanes(vf v) {
  alignas(64) float x[lanes];
  store(v, x);
  for (int n = lanes / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) x[i] += x[i + n];
  return x[0];
}

template <int rows, int count> static void plain_tile(const float* w, int64_t n, const float* x, const int32_t* index, float* sums, int64_t step) {
  vf acc[rows][count];
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < count; ++c) acc[r][c] = zero();
  for (int64_t i = 0; i < n; i += lanes) {
    vf a[rows];
    for (int r = 0; r < rows; ++r) a[r] = loadu(w + r * n + i);
    for (int c = 0; c < count; ++c) {
      const vf b = loadu(x + index[c] * n + i);
      for (int r = 0; r < rows; ++r) acc[r][c] = fma(a[r], b, acc[r][c]);
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < count; ++c) sums[c * step + r] = sum_lanes(acc[r][c]);
}

template <int rows> static void plain_all(const float* w, int64_t n, const float* x, const int32_t* index, int64_t count, float* sums, int64_t step) {
  int64_t c = 0;
  for (; c + 4 <= count; c += 4) plain_tile<rows, 4>(w, n, x, index + c, sums + c * step, step);
  for (; c + 2 <= count; c += 2) plain_tile<rows, 2>(w, n, x, index + c, sums + c * step, step);
  for (; c < count; ++c) plain_tile<rows, 1>(w, n, x, index + c, sums + c * step, step);
}

static void moe_dot_plain(const float* w, int64_t rows, const moe_activations* x, const int32_t* index, int64_t count, float* sums, int64_t step) {
  const int64_t n = x->padded;
  int64_t r = 0;
  for (; r + 2 <= rows; r += 2) plain_all<2>(w + r * n, n, x->plain, index, count, sums + r, step);
  for (; r < rows; ++r) plain_all<1>(w + r * n, n, x->plain, index, count, sums + r, step);
}

// ---- activations ------------------------------------------------------------------------------------------------------------

static inline uint32_t largest_bits(const float* x) {
  uint32_t most = 0;
  for (int i = 0; i < 32; ++i) {
    uint32_t bits;
    memcpy(&bits, x + i, 4);
    bits &= 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  return most;
}

// Adding 1.5 * 2^23 rounds to nearest even.
static void moe_quantize(const float* x, int64_t n, int8_t* code, float* scale, float* sum) {
  for (int64_t g = 0; g < n / 32; ++g, x += 32, code += 32) {
    const uint32_t most = largest_bits(x);
    float a;
    memcpy(&a, &most, 4);
    const float id = most < 0x7f800000u ? 127.0f / a : 0.0f;
    const bool none = most >= 0x7f800000u || !(id <= 3.4028234663852886e38f);
    int32_t sums[2] = {0, 0};
    for (int i = 0; i < 32; ++i) {
      const float shifted = (none ? 0.0f : x[i] * id) + 12582912.0f;
      int32_t bits;
      memcpy(&bits, &shifted, 4);
      code[i] = int8_t(bits - 0x4b400000);
    }
    for (int i = 0; i < 32; ++i) sums[i / 16] += code[i];
    const uint32_t nan = 0x7fc00000u;
    scale[g] = a / 127.0f;
    if (most >= 0x7f800000u) memcpy(scale + g, &nan, 4);
    sum[2 * g] = scale[g] * float(sums[0]), sum[2 * g + 1] = scale[g] * float(sums[1]);
  }
}

static inline vf sigmoid(vf x) { return div(set(1.0f), add(set(1.0f), exp(sub(zero(), x)))); }

// The two bounds let a NaN through.
static inline vf at_most(vf x, vf limit) { return select(lt(limit, x), limit, x); }
static inline vf at_least(vf x, vf limit) { return select(lt(x, limit), limit, x); }

static inline vf gelu(vf x, bool by_tanh) {
  const vf half = mul(set(0.5f), x);
  if (by_tanh) return mul(half, add(set(1.0f), tanh(mul(set(0.797884561f), fma(mul(mul(x, x), x), set(0.044715f), x)))));
  alignas(64) float z[lanes];
  store(mul(x, set(0.707106781f)), z);
  for (int i = 0; i < lanes; ++i) z[i] = erff(z[i]);
  return mul(half, add(set(1.0f), load(z)));
}

static inline vf activated(const moe_activation* how, vf g, vf u) {
  const vf limit = set(how->limit);
  switch (how->kind) {
    case CQSA_MOE_SWIGLU:
      g = at_most(g, limit);
      u = at_least(at_most(u, limit), set(-how->limit));
      return mul(mul(g, sigmoid(mul(set(how->alpha), g))), add(u, set(how->beta)));
    case CQSA_MOE_GEGLU: return mul(gelu(g, false), u);
    case CQSA_MOE_GEGLU_TANH: return mul(gelu(g, true), u);
    case CQSA_MOE_SILU: return mul(u, sigmoid(u));
    case CQSA_MOE_GELU: return gelu(u, false);
    case CQSA_MOE_GELU_TANH: return gelu(u, true);
    default: return mul(at_least(u, zero()), at_least(u, zero()));
  }
}

static void moe_activate(const moe_activation* how, const float* g, const float* u, int64_t n, float* h) {
  alignas(64) float part[2][lanes];
  for (int64_t i = 0; i < n; i += lanes) {
    const int64_t count = min64(lanes, n - i);
    memset(part, 0, sizeof part);
    if (g) memcpy(part[0], g + i, size_t(4 * count));
    memcpy(part[1], u + i, size_t(4 * count));
    store(activated(how, load(part[0]), load(part[1])), part[0]);
    memcpy(h + i, part[0], size_t(4 * count));
  }
}

static void moe_add(const float* HWY_RESTRICT y, float factor, int64_t n, float* HWY_RESTRICT sum) {
  for (int64_t i = 0; i < n; ++i) sum[i] = sum[i] + factor * y[i];
}

}  // namespace HWY_NAMESPACE
}  // namespace
}  // namespace cqsa::cpu
HWY_AFTER_NAMESPACE();
