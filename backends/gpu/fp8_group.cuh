// SPDX-License-Identifier: Apache-2.0
// FP8, row-major with scales of this launch: groups of 32 to 256 neighbours in a row, each in the registers of some neighbouring lanes,
// and whole rows (or long groups), each in those of a team of lanes or of a thread block.
#pragma once

#include "fp8_stream.cuh"

namespace cqsa::gpu {

template <int Kind> CQSA_DEVICE uint32_t counted_most(const raw8<Kind>& x, bool ignore_nan) {
  const uint32_t most = most_bits<Kind>(most_of<Kind>(x));
  return ignore_nan && most >= inf_bits ? most_finite<Kind>(x) : most;
}

// Whether eight numbers of this magnitude need the slow way.
CQSA_DEVICE bool is_slow_vector(const fp8_job& job, const fp8_side& side, uint32_t raw, float scale) {
  const bool strict = job.counters || !job.saturate;
  if (raw > (job.ignore_nan || strict ? inf_bits - 1 : inf_bits)) return true;
  return strict && product_f32(float_of(raw), scale) > fp8::largest_of(side.format);
}

template <int Kind> CQSA_DEVICE void store_vector(const fp8_job& job, const fp8_side& side, const raw8<Kind>& x, float scale, const stream_place& at) {
  const codes8 codes = side.format == CQSA_DTYPE_E5M2 ? encode8<Kind, true>(x, scale) : encode8<Kind, false>(x, scale);
  store_codes(side.codes.data + at.row * side.codes.stride[1] + at.column, codes, job.columns - at.column, side.codes.aligned != 0);
}

// ---- groups -----------------------------------------------------------------------------------------------------------------

// A thread has vectors of four groups; the scale of one of them each is worked out by every fourth lane, for all four at once.
template <int Lanes, int Kind> CQSA_DEVICE uint32_t fp8_groups(const fp8_job& job, const fp8_head& head) {
  constexpr int each = 4, bytes = Kind == kind_f32 ? 4 : 2;
  const fp8_side& side = job.side[0];
  const int team = int(side.block[1] / 8), lane = thread_index() % Lanes, first = lane / team * team, mine = lane % 4;
  int shift = 5;  // of an element to its group
  while (8 * team >> shift > 1) ++shift;
  const int64_t wide = side.columns * team, vectors = head.rows * wide, step = grid_size_x() * block_threads();
  uint32_t all = 0;
#pragma unroll 1
  for (int64_t base = block_index_x() * block_threads(); base < vectors; base += each * step) {
    raw8<Kind> x[each];
    stream_place at[each];
    uint32_t most[each];
#pragma unroll
    for (int u = 0; u < each; ++u) {
      const int64_t v = base + u * step + thread_index();
      at[u] = place_of(v, wide, false);
      if (v >= vectors) at[u].column = job.columns;
      x[u] = at[u].column < job.columns ? load_some<Kind>(job.x.data + bytes * (at[u].row * job.x.stride[1] + at[u].column), job.columns - at[u].column, job.x.aligned != 0)
                                        : zero_raw8<Kind>();
    }
    uint32_t my_most = 0;
    int64_t my_row = 0, my_column = 0;
#pragma unroll
    for (int u = 0; u < each; ++u) {
      most[u] = most_of_lanes<Lanes>(counted_most<Kind>(x[u], job.ignore_nan), team);
      all = larger_u32(all, most[u]);
      if (u == mine) my_most = most[u], my_row = at[u].row, my_column = at[u].column >> shift;
    }
    const fp8::scale_pair pair = fp8::scale_of(plain_amax(my_most), rule_of(job, side));
    if (lane - first < 4 && my_column < side.columns && base + mine * step + thread_index() < vectors) {
      store_scale(side.scale, my_row, my_column, side.columns, pair.scale);
      store_scale(side.scale_inv, my_row, my_column, side.columns, pair.scale_inv);
    }
#pragma unroll
    for (int u = 0; u < each; ++u) {
      const float scale = shuffle<Lanes>(pair.scale, first + u);
      if (at[u].column >= job.columns) continue;
      if (is_slow_vector(job, side, most_bits<Kind>(most_of<Kind>(x[u])), scale)) slow_vector(job, side, scale, at[u]);
      else store_vector<Kind>(job, side, x[u], scale, at[u]);
    }
  }
  return all;
}

template <int Lanes> CQSA_DEVICE void fp8_group_block(const fp8_params& p) {
  const fp8_job& job = job_of<false>(p);
  const fp8_head head = head_of(p, job);
  uint32_t most = 0;
  if (head.go) {
    if (job.x.kind == kind_bf16) most = fp8_groups<Lanes, kind_bf16>(job, head);
    else if (job.x.kind == kind_f16) most = fp8_groups<Lanes, kind_f16>(job, head);
    else most = fp8_groups<Lanes, kind_f32>(job, head);
    publish(p, job, head);
  }
  end_block<Lanes, false>(p, job, head.go, most);
}

// ---- rows -------------------------------------------------------------------------------------------------------------------

template <int Kind> constexpr int row_vectors = Kind == kind_f32 ? 4 : 8;  // 64 or 128 bytes

// A row, or a long group of one, for each team of lanes (Whole: for each block).
template <int Lanes, int Kind, bool Whole> CQSA_DEVICE uint32_t fp8_rows(const fp8_job& job, const fp8_head& head) {
  constexpr int each = row_vectors<Kind>, bytes = Kind == kind_f32 ? 4 : 2;
  const fp8_side& side = job.side[0];
  const int team = Whole ? block_threads() : Lanes, rank = thread_index() % team, teams = block_threads() / team;
  const int64_t length = side.block[1], units = head.rows * side.columns;
  uint32_t all = 0;
#pragma unroll 1
  for (int64_t unit = block_index_x() * teams + thread_index() / team; unit < units; unit += grid_size_x() * teams) {
    const stream_place seg = place_of(unit, side.columns, false);
    const int64_t row = seg.row, group = seg.column / 8, end = min_i64(group * length + length, job.columns);
    const int64_t begin = group * length + rank * 8, pass = int64_t(team) * 8 * each;
    const bool once = end - group * length <= pass;
    raw8<Kind> x[each];
    uint32_t most = 0;
    const auto load = [&](int64_t from) {
#pragma unroll
      for (int u = 0; u < each; ++u) {
        const int64_t column = from + u * team * 8;
        x[u] = column < end ? load_some<Kind>(job.x.data + bytes * (row * job.x.stride[1] + column), job.columns - column, job.x.aligned != 0) : zero_raw8<Kind>();
      }
    };
#pragma unroll 1
    for (int64_t from = begin; from - rank * 8 < end; from += pass) {
      load(from);
#pragma unroll
      for (int u = 0; u < each; ++u) most = larger_u32(most, counted_most<Kind>(x[u], job.ignore_nan));
    }
    most = Whole ? most_of_block<Lanes>(most) : most_of_lanes<Lanes>(most);
    all = larger_u32(all, most);
    const fp8::scale_pair pair = fp8::scale_of(plain_amax(most), rule_of(job, side));
    if (rank == 0) store_scale(side.scale, row, group, side.columns, pair.scale), store_scale(side.scale_inv, row, group, side.columns, pair.scale_inv);
#pragma unroll 1
    for (int64_t from = begin; from - rank * 8 < end; from += pass) {
      if (!once) load(from);
#pragma unroll
      for (int u = 0; u < each; ++u) {
        const stream_place at{row, from + u * team * 8};
        if (at.column >= end) continue;
        if (is_slow_vector(job, side, most_bits<Kind>(most_of<Kind>(x[u])), pair.scale)) slow_vector(job, side, pair.scale, at);
        else store_vector<Kind>(job, side, x[u], pair.scale, at);
      }
    }
  }
  return all;
}

template <int Lanes, bool Whole> CQSA_DEVICE void fp8_row_block(const fp8_params& p) {
  const fp8_job& job = job_of<false>(p);
  const fp8_head head = head_of(p, job);
  uint32_t most = 0;
  if (head.go) {
    if (job.x.kind == kind_bf16) most = fp8_rows<Lanes, kind_bf16, Whole>(job, head);
    else if (job.x.kind == kind_f16) most = fp8_rows<Lanes, kind_f16, Whole>(job, head);
    else most = fp8_rows<Lanes, kind_f32, Whole>(job, head);
    publish(p, job, head);
  }
  end_block<Lanes, false>(p, job, head.go, most);
}

}  // namespace cqsa::gpu
