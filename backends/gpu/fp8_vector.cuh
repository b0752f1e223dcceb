// SPDX-License-Identifier: Apache-2.0
// FP8 in vectors of 16 bytes: several of them in flight in each thread, their codes, and the slow way for what is rare. A thread looks once at
// the largest magnitude that it holds; where that is NaN, or infinite or too large and this makes a difference, it does its elements again, one
// at a time. There is one such loop in a kernel: code that is rare must not stand in the way of that which is not.
#pragma once

#include "fp8_head.cuh"

namespace cqsa::gpu {

// Vectors that a thread has in flight: 64 bytes.
constexpr int fp8_each = 4;
struct fp8_vectors {
  loaded16 x[fp8_each];
};

// Vectors at, at + step, ..; one that is not there is the last one: a second time it makes no difference. `step` may be below 0.
CQSA_DEVICE void load_vectors(const char* from, uint32_t at, uint32_t step, uint32_t vectors, fp8_vectors& v) {
  const uint32_t last = vectors - 1;
#pragma unroll
  for (uint32_t u = 0; u < uint32_t(fp8_each); ++u) {
    const uint32_t i = at + u * step;
    v.x[u] = load_once(from + int64_t(i < last ? i : last) * 16);
  }
}
CQSA_DEVICE void clear_vectors(fp8_vectors& v) {
#pragma unroll
  for (int u = 0; u < fp8_each; ++u) v.x[u] = {{0, 0, 0, 0}};
}

CQSA_DEVICE uint32_t most_of_vector(const loaded16& x, bool f32) { return most_of_words(x.x, 4, f32); }
CQSA_DEVICE uint32_t most_of_vectors(const fp8_vectors& v, bool f32) {
  uint32_t most = most_of_vector(v.x[0], f32);
#pragma unroll
  for (int u = 1; u < fp8_each; ++u) most = most_of_two(most, most_of_vector(v.x[u], f32), f32);
  return most;
}
CQSA_DEVICE void drop_strange(fp8_vectors& v, int kind) {
#pragma unroll
  for (int u = 0; u < fp8_each; ++u) drop_strange(v.x[u].x, 4, kind);
}

// ---- codes ------------------------------------------------------------------------------------------------------------------

struct fp8_codes {
  word_pair x[fp8_each];
};
template <int Kind, bool Wide> CQSA_DEVICE void encode_as(const fp8_vectors& v, const float (&scale)[fp8_each], const fp8_fast& f, fp8_codes& c) {
#pragma unroll
  for (int u = 0; u < fp8_each; ++u) c.x[u] = encode_vector<Kind, Wide>(v.x[u], scale[u], f);
}
template <int Kind> CQSA_DEVICE void encode_kind(const fp8_vectors& v, const float (&scale)[fp8_each], const fp8_fast& f, fp8_codes& c) {
  if (has_fp8 && f.wide) encode_as<Kind, true>(v, scale, f, c);
  else encode_as<Kind, false>(v, scale, f, c);
}
CQSA_DEVICE void encode_vectors(const fp8_vectors& v, int kind, const float (&scale)[fp8_each], const fp8_fast& f, fp8_codes& c) {
  if (kind == kind_bf16) encode_kind<kind_bf16>(v, scale, f, c);
  else if (kind == kind_f16) encode_kind<kind_f16>(v, scale, f, c);
  else encode_kind<kind_f32>(v, scale, f, c);
}
CQSA_DEVICE void encode_vectors(const fp8_vectors& v, int kind, float scale, const fp8_fast& f, fp8_codes& c) {
  float all[fp8_each];
#pragma unroll
  for (int u = 0; u < fp8_each; ++u) all[u] = scale;
  encode_vectors(v, kind, all, f, c);
}
// Codes of the vectors that load_vectors() had.
CQSA_DEVICE void store_vectors(char* to, bool f32, uint32_t at, uint32_t step, uint32_t vectors, const fp8_codes& c) {
#pragma unroll
  for (uint32_t u = 0; u < uint32_t(fp8_each); ++u) {
    const uint32_t i = at + u * step;
    if (i >= vectors) continue;
    if (f32) *reinterpret_cast<uint32_t*>(to + int64_t(i) * 4) = c.x[u].x[0];
    else *reinterpret_cast<word_pair*>(to + int64_t(i) * 8) = c.x[u];
  }
}

// ---- the slow way -----------------------------------------------------------------------------------------------------------

// n elements of a row, `step` apart, one at a time: what the fast way does not do right.
CQSA_DEVICE void slow_run(const fp8_job& job, const fp8_side& side, float scale, int64_t row, int64_t column, int64_t n, int64_t step) {
  const fp8_encoder how{side.format, job.saturate, 0, 0, 0};
  fp8_counts counts{};
  uint32_t most = 0;
#pragma unroll 1
  for (; n > 0; --n, column += step) {
    const uint32_t x = load_number(job.x.data, job.x.kind, row * job.x.stride[1] + column), mag = x & 0x7fffffffu;
    if (!job.ignore_nan || mag < inf_bits) most = larger_u32(most, mag);
    if (side.codes.data) side.codes.data[row * side.codes.stride[1] + column] = char(encode_number(x, scale, how, 0, &counts));
  }
  atomic_max(&control().amax, most);
  take_counts(counts);
}

// Counters and what is not saturated make a difference between a large number and a too large one.
CQSA_DEVICE bool is_strict(const fp8_job& job) { return job.counters || !job.saturate; }
// A magnitude above this needs the slow way whatever the scale is.
CQSA_DEVICE uint32_t strange_limit(const fp8_job& job) { return job.ignore_nan || is_strict(job) ? inf_bits - 1 : inf_bits; }
// More than the largest code by less than half of its last place.
CQSA_DEVICE float largest_quick(int32_t format) { return fp8::largest_of(format) * 1.0078125f; }
CQSA_DEVICE bool is_too_large(const fp8_side& side, uint32_t magnitude, float scale) { return product_f32(float_of(magnitude), scale) > largest_quick(side.format); }

}  // namespace cqsa::gpu
