// SPDX-License-Identifier: Apache-2.0
// FP8, row-major with one scale: a stream of vectors through the whole device, as a copy does it. Also the amax of a tensor alone.
#pragma once

#include "fp8_head.cuh"

namespace cqsa::gpu {

struct stream_place {
  int64_t row, column;
};

// Vector number v of a job; a row has `wide` of them.
CQSA_DEVICE stream_place place_of(int64_t v, int64_t wide, bool one_row) {
  if (one_row) return {0, v * 8};
  if (v < int64_t(1) << 31) {
    const uint32_t row = uint32_t(v) / uint32_t(wide);
    return {int64_t(row), int64_t(uint32_t(v) - row * uint32_t(wide)) * 8};
  }
  const int64_t row = v / wide;
  return {row, (v - row * wide) * 8};
}

// Eight elements, one at a time: what the fast way does not do right.
CQSA_DEVICE void slow_vector(const fp8_job& job, const fp8_side& side, float scale, const stream_place& at) {
  const fp8_encoder how{side.format, job.saturate, 0, 0, 0};
  const int64_t n = min_i64(job.columns - at.column, 8);
  fp8_counts counts{};
  uint32_t most = 0;
#pragma unroll 1
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t x = load_number(job.x.data, job.x.kind, at.row * job.x.stride[1] + at.column + i), mag = x & 0x7fffffffu;
    if (!job.ignore_nan || mag < inf_bits) most = larger_u32(most, mag);
    if (side.codes.data) side.codes.data[at.row * side.codes.stride[1] + at.column + i] = char(encode_number(x, scale, how, 0, &counts));
  }
  atomic_max(&control().amax, most);
  take_counts(counts);
}

// Magnitudes above this need the slow way: NaN always; where it makes a difference also infinities and what is too large. Four units
// in the last place are more than the roundings of the quotient and of the product.
CQSA_DEVICE uint32_t slow_limit(const fp8_job& job, const fp8_side& side, float scale) {
  uint32_t limit = job.ignore_nan || job.counters ? inf_bits - 1 : inf_bits;
  if (side.codes.data && (job.counters || !job.saturate)) {
    const uint32_t most = bits_of(fp8::largest_of(side.format) / scale);
    const uint32_t safe = most < 4 ? 0 : most - 4;
    limit = safe < limit ? safe : limit;
  }
  return limit;
}

// What a thread has in flight: vectors of eight elements, 64 bytes.
template <int Kind> constexpr int stream_vectors = Kind == kind_f32 ? 2 : 4;

// The vectors of one row of x that are aligned and whole, as long as all that a thread takes at a time are there; from where the others
// go on. This is the loop that the time goes into: nothing but addresses, conversions and the amax.
template <int Kind, bool Wide, bool Codes>
CQSA_DEVICE int64_t stream_whole(const fp8_job& job, float scale, uint32_t limit, uint32_t* most) {
  constexpr int each = stream_vectors<Kind>, bytes = Kind == kind_f32 ? 32 : 16;
  const fp8_side& side = job.side[0];
  const int32_t step = block_threads() * int32_t(job.blocks), back = job.backward ? -step : step;
  const int64_t vectors = job.columns / 8, v = (block_index_x() - job.first_block) * block_threads() + thread_index();
  const int64_t begin = job.backward ? vectors - 1 - v : v;
  const int64_t rounds = v + (each - 1) * int64_t(step) < vectors ? (vectors - 1 - v - (each - 1) * int64_t(step)) / (each * int64_t(step)) + 1 : 0;
  const char* from = job.x.data + begin * bytes;
  char* to = side.codes.data + begin * 8;
#pragma unroll 1
  for (int32_t left = int32_t(rounds); left > 0; --left, from += int64_t(each * back) * bytes, to += int64_t(each * back) * 8) {
    raw8<Kind> x[each];
#pragma unroll
    for (int u = 0; u < each; ++u) x[u] = load_raw8<Kind>(from + u * back * bytes, true);
    uint32_t these = most_of<Kind>(x[0]);
#pragma unroll
    for (int u = 1; u < each; ++u) these = most_of_two<Kind>(these, most_of<Kind>(x[u]));
    if (most_bits<Kind>(these) > limit) {
#pragma unroll 1
      for (int u = 0; u < each; ++u) slow_vector(job, side, scale, {0, (from - job.x.data) / bytes * 8 + u * int64_t(back) * 8});
      continue;
    }
    *most = most_of_two<Kind>(*most, these);
    if constexpr (Codes) {
#pragma unroll
      for (int u = 0; u < each; ++u) {
        const codes8 c = encode8<Kind, Wide>(x[u], scale);
        *reinterpret_cast<word_pair*>(to + u * back * 8) = {{c.x[0], c.x[1]}};
      }
    }
  }
  return v + rounds * each * int64_t(step);
}

template <int Kind, bool Wide, bool Codes> CQSA_DEVICE uint32_t stream(const fp8_job& job, const fp8_head& head) {
  constexpr int bytes = Kind == kind_f32 ? 4 : 2;
  const fp8_side& side = job.side[0];
  const bool one_row = head.rows == 1, aligned = job.x.aligned != 0, codes_aligned = side.codes.aligned != 0;
  const int64_t wide = (job.columns + 7) / 8, vectors = head.rows * wide, step = block_threads() * job.blocks;
  const uint32_t limit = slow_limit(job, side, head.scale[0]);
  const float scale = head.scale[0];
  uint32_t most = 0;
  int64_t v = (block_index_x() - job.first_block) * block_threads() + thread_index();
  const bool whole = one_row && aligned && (!Codes || codes_aligned);
  if (whole) v = stream_whole<Kind, Wide, Codes>(job, scale, limit, &most);
  // Backwards, the whole ones are counted from the last whole one; what is left over comes last either way.
  const int64_t full = job.columns / 8;
#pragma unroll 1
  for (; v < vectors; v += step) {
    const int64_t at_v = !job.backward ? v : !whole ? vectors - 1 - v : v < full ? full - 1 - v : v;
    const stream_place at = place_of(at_v, wide, one_row);
    const raw8<Kind> x = load_some<Kind>(job.x.data + bytes * (at.row * job.x.stride[1] + at.column), job.columns - at.column, aligned);
    const uint32_t these = most_of<Kind>(x);
    if (most_bits<Kind>(these) > limit) {
      slow_vector(job, side, scale, at);
      continue;
    }
    most = most_of_two<Kind>(most, these);
    if constexpr (Codes)
      store_codes(side.codes.data + at.row * side.codes.stride[1] + at.column, encode8<Kind, Wide>(x, scale), job.columns - at.column, codes_aligned);
  }
  return most_bits<Kind>(most);
}

template <int Kind> CQSA_DEVICE uint32_t stream_of(const fp8_job& job, const fp8_head& head, bool codes) {
  if (!codes) return stream<Kind, false, false>(job, head);
  if (job.side[0].format == CQSA_DTYPE_E5M2) return stream<Kind, true, true>(job, head);
  return stream<Kind, false, true>(job, head);
}

template <int Lanes, bool Many> CQSA_DEVICE void fp8_stream_block(const fp8_params& p) {
  const fp8_job& job = job_of<Many>(p);
  const fp8_head head = head_of(p, job);
  uint32_t most = 0;
  if (head.go) {
    const bool codes = job.side[0].codes.data != nullptr;
    if (job.x.kind == kind_bf16) most = stream_of<kind_bf16>(job, head, codes);
    else if (job.x.kind == kind_f16) most = stream_of<kind_f16>(job, head, codes);
    else most = stream_of<kind_f32>(job, head, codes);
    publish(p, job, head);
  }
  end_block<Lanes, Many>(p, job, head.go, most);
}

}  // namespace cqsa::gpu
