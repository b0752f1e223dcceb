// SPDX-License-Identifier: Apache-2.0
// How the sums of a thread's two rows begin and end in the Hopper attention: from nothing or a state, to a state or the result. Straight
// from and to global memory, so that the next queries may come into shared memory meanwhile.
#pragma once

#include "attention_softmax.cuh"
#include "backends/gpu/row_end.cuh"

namespace cqsa::gpu::sm90 {

CQSA_DEVICE bool is_used(const block_facts& f, const row_place& at) { return at.query < f.queries && at.head < f.heads; }
CQSA_DEVICE int64_t state_row_of(const attention_params& p, const block_facts& f, const row_place& at) {
  return (f.batch * p.num_heads + f.first_head + at.head) * p.state_rows + f.state_row + at.query;
}

// States and results have the largest logit m of a row in natural units, and sums that are relative to it. What rounding makes of it when
// it is changed goes to the sums: 2^m * change = e^natural, or the other way round.
struct row_units {
  float natural, m, change;
};
CQSA_DEVICE row_units units_of(float natural, float m) {
  constexpr float rest_of_log2 = float(1.4426950408889634 - double(log2_of_e));
  const bool none = m == -infinity();
  return {natural, m, none ? 1.0f : exp2_f32(fma_f32(natural, rest_of_log2, fma_f32(natural, log2_of_e, -m)))};
}
CQSA_DEVICE row_units from_natural(float natural) { return units_of(natural, product_f32(natural, log2_of_e)); }
CQSA_DEVICE row_units to_natural(float m) { return units_of(product_f32(m, 0.6931471805599453f), m); }

// Calls g(index into the sums, channel) for a thread's pairs of channels of row r. Sizes are multiples of 8.
template <class S, class G> CQSA_DEVICE void for_each_pair(int r, int channels, const G& g) {
  const int column = int(lane_now()) % 4 * 2;
#pragma unroll
  for (int n = 0; n < S::dv / 8; ++n)
    if (8 * n < channels) g(4 * n + 2 * r, 8 * n + column);
}

template <class S> CQSA_DEVICE void begin_rows(const params& p, const block_facts& f, thread_rows& rows, float (&o)[S::dv / 2]) {
#pragma unroll
  for (int n = 0; n < S::dv / 2; ++n) o[n] = 0.0f;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows.m[r] = -infinity();
    rows.l[r] = 0.0f;
    const row_place at = place_of_row(p, first_row() + 8 * r);
    if (__builtin_expect(!(p.a.flags & flag_state_in), 1) || !is_used(f, at)) continue;
    const int64_t row = state_row_of(p.a, f, at);
    const row_units units = from_natural(p.a.state_m[row]);
    rows.m[r] = units.m;
    if (lane_now() % 4 == 0) rows.l[r] = p.a.state_l[row] * units.change;
    const float* acc = p.a.state_acc + row * p.a.head_dim_v;
    for_each_pair<S>(r, p.a.head_dim_v, [&](int i, int channel) {
      const float2x two = *reinterpret_cast<const float2x*>(acc + channel);
      o[i] = two.x[0] * units.change, o[i + 1] = two.x[1] * units.change;
    });
  }
}

template <class S>
CQSA_DEVICE void store_state(const params& p, const block_facts& f, const thread_rows& rows, const float (&l)[2], const float (&o)[S::dv / 2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const row_place at = place_of_row(p, first_row() + 8 * r);
    if (!is_used(f, at)) continue;
    const int64_t row = state_row_of(p.a, f, at);
    const row_units units = to_natural(rows.m[r]);
    const float back = reciprocal_f32(units.change);
    if (lane_now() % 4 == 0) p.a.state_m[row] = units.natural, p.a.state_l[row] = l[r] * back;
    float* acc = p.a.state_acc + row * p.a.head_dim_v;
    for_each_pair<S>(r, p.a.head_dim_v, [&](int i, int channel) { *reinterpret_cast<float2x*>(acc + channel) = {{o[i] * back, o[i + 1] * back}}; });
  }
}

// Of each lane of a quad, word i to lane i: out.x[j] is what lane j had for this one.
CQSA_DEVICE word4x exchange_words(const uint32_t (&w)[4]) {
  const bool odd = lane_now() & 1, upper = lane_now() & 2;
  const uint32_t a0 = shuffle_xor<32>(odd ? w[0] : w[1], 1), a1 = shuffle_xor<32>(odd ? w[2] : w[3], 1);
  const uint32_t x[4] = {odd ? a0 : w[0], odd ? w[1] : a0, odd ? a1 : w[2], odd ? w[3] : a1};  // words 0, 2 of pairs of lanes are in order
  const uint32_t b0 = shuffle_xor<32>(upper ? x[0] : x[2], 2), b1 = shuffle_xor<32>(upper ? x[1] : x[3], 2);
  if (upper) return {{b0, b1, x[2], x[3]}};
  return {{x[0], x[1], b0, b1}};
}

// Sixteen bytes a lane: four lanes have four runs of eight channels.
template <class S> CQSA_DEVICE void store_halves(const gpu_view& out, char* to, int channels, int r, float factor, bool used, const float (&o)[S::dv / 2]) {
  const int l = int(lane_now()) % 4;
#pragma unroll
  for (int n = 0; n < S::dv / 8; n += 4) {
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float a = o[4 * (n + i) + 2 * r] * factor, b = o[4 * (n + i) + 2 * r + 1] * factor;
      w[i] = out.kind == kind_f16 ? pack_f16(a, b) : pack_bf16(a, b);
    }
    const word4x chunk = exchange_words(w);
    if (used && 8 * (n + l) < channels) *reinterpret_cast<word4x*>(to + 16 * (n + l)) = chunk;
  }
}
template <class S> CQSA_DEVICE void store_elements(const gpu_view& out, int64_t to, int channels, int r, float factor, const float (&o)[S::dv / 2]) {
  for_each_pair<S>(r, channels, [&](int i, int channel) {
    store_element(out.data, out.kind, to + channel * out.stride[3], o[i] * factor);
    store_element(out.data, out.kind, to + (channel + 1) * out.stride[3], o[i + 1] * factor);
  });
}

// Lanes 0 and 1 of four end a row each: logarithms in f64 take a while. Returns what the lane's row is multiplied with.
CQSA_DEVICE float close_row(const params& p, const block_facts& f, const thread_rows& rows, const float (&l)[2]) {
  const int mine = int(lane_now()) % 2;
  const row_place at = place_of_row(p, first_row() + 8 * mine);
  const bool used = is_used(f, at);
  const int64_t head = f.first_head + at.head;
  const row_units units = to_natural(mine ? rows.m[1] : rows.m[0]);
  const float back = reciprocal_f32(units.change);
  const row_end end = end_row(units.natural, (mine ? l[1] : l[0]) * back, used ? sink_of(p.a.sinks, head) : -infinity());
  if (used && p.a.lse.data && lane_now() % 4 < 2)
    store_u32(p.a.lse.data + 4 * offset_of(p.a.lse, f.batch, head, f.q_row + at.query, 0), bits_of(end.lse));
  return end.factor / end.divisor * back;
}

template <class S> CQSA_DEVICE void end_rows(const params& p, const block_facts& f, const thread_rows& rows, const float (&o)[S::dv / 2]) {
  const float l[2] = {quad_sum(rows.l[0]), quad_sum(rows.l[1])};
  if (__builtin_expect(p.a.flags & flag_state_out, 0)) {
    store_state<S>(p, f, rows, l, o);
    return;
  }
  const float scale = close_row(p, f, rows, l);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float factor = shuffle<32>(scale, int(lane_now()) / 4 * 4 + r);
    const row_place at = place_of_row(p, first_row() + 8 * r);
    const int64_t to = offset_of(p.a.out, f.batch, f.first_head + at.head, f.q_row + at.query, 0);
    if (__builtin_expect(p.a.out.quads && p.a.out.kind != kind_f32, 1)) store_halves<S>(p.a.out, p.a.out.data + 2 * to, p.a.head_dim_v, r, factor, is_used(f, at), o);
    else if (is_used(f, at)) store_elements<S>(p.a.out, to, p.a.head_dim_v, r, factor, o);
  }
}

}  // namespace cqsa::gpu::sm90
