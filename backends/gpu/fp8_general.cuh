// SPDX-License-Identifier: Apache-2.0
// FP8 for everything that section 13 of cqsa.h allows: any strides, types, blocks, groups, random rounding, silu, codes in. One
// element at a time. Work of all outputs stands one after the other; a scale block is read twice, by the same threads. No loop is unrolled
// and each has one place where a number is read: this is much code that is seldom needed.
#pragma once

#include "fp8_head.cuh"

namespace cqsa::gpu {

// The number that counts as x, as bits.
CQSA_DEVICE uint32_t job_number(const fp8_job& job, int64_t i, int64_t j) {
  uint32_t x = load_number(job.x.data, job.x.kind, place_in(job.x, job.batch, job.rows, i, j));
  if (job.x_scale_inv.data) {
    const float scale = load_scale(job.x_scale_inv, i / job.x_block[0], j / job.x_block[1], 0);
    if ((x & 0x7fffffffu) <= inf_bits) x = bits_of(product_f32(float_of(x), scale));
  }
  if (job.up.data) {
    const float v = float_of(x), up = float_of(load_number(job.up.data, job.up.kind, place_in(job.up, job.batch, job.rows, i, j)));
    x = bits_of(product_f32(v / (1.0f + exp_f32(-v)), up));
  }
  return x;
}

CQSA_DEVICE uint32_t counted(const fp8_job& job, uint32_t x) {
  const uint32_t mag = x & 0x7fffffffu;
  return job.ignore_nan && mag >= inf_bits ? 0 : mag;
}

struct fp8_writer {
  fp8_encoder how;
  fp8_counts counts;
};
CQSA_DEVICE fp8_writer writer_of(const fp8_job& job, const fp8_side& side) {
  fp8_writer w{{side.format, job.saturate, job.rng != nullptr, 0, 0}, {}};
  if (job.rng) {
    const char* const rng = reinterpret_cast<const char*>(job.rng);
    w.how.seed = load_index(rng, 8, 0), w.how.offset = load_index(rng, 8, job.rng_stride);
  }
  return w;
}
CQSA_DEVICE void write_code(const fp8_job& job, const fp8_side& side, fp8_writer* w, int64_t i, int64_t j, uint32_t x, float scale) {
  const int64_t to = place_in(side.codes, job.batch, job.rows, i, j);
  side.codes.data[to] = char(encode_number(x, scale, w->how, uint64_t(i) * uint64_t(job.columns) + uint64_t(j), &w->counts));
}

// Scales are known: element after element, neighbours to neighbouring threads.
CQSA_DEVICE uint32_t general_elements(const fp8_job& job, const fp8_head& head, int s) {
  const fp8_side& side = job.side[s];
  const int64_t n = head.rows * job.columns, step = job.blocks * block_threads();
  fp8_writer w = writer_of(job, side);
  uint32_t most = 0;
#pragma unroll 1
  for (int64_t e = (block_index_x() - job.first_block) * block_threads() + thread_index(); e < n; e += step) {
    const int64_t i = e / job.columns, j = e - i * job.columns;
    const uint32_t x = job_number(job, i, j);
    most = larger_u32(most, counted(job, x));
    float scale = head.scale[s < 2 ? s : 0];
    if (!side.single) {
      const int64_t r = side.per_group ? group_of(job.groups, job.groups_bytes, job.groups_stride, job.num_groups, i, job.batch * job.rows) : i / side.block[0];
      scale = known_scale(job, side, r, j / side.block[1]).scale;
      if (!fp8::is_scale(scale)) continue;
    }
    write_code(job, side, &w, i, j, x, scale);
  }
  if (s == job.first_side) take_counts(w.counts);
  return most;
}

// Only how large they are; with groups each into its word.
template <int Lanes> CQSA_DEVICE uint32_t general_amax(const fp8_job& job, const fp8_head& head) {
  const int64_t threads = block_threads();
  const bool one = !job.per_group;  // all elements in a row, or a row for each block
  const int64_t mine = block_index_x() - job.first_block, units = one ? 1 : head.rows, n = one ? head.rows * job.columns : job.columns;
  const int64_t first = (one ? mine * threads : 0) + thread_index(), step = one ? job.blocks * threads : threads;
  uint32_t most = 0;
#pragma unroll 1
  for (int64_t unit = one ? 0 : mine; unit < units; unit += one ? 1 : job.blocks) {
    uint32_t row = 0;
#pragma unroll 1
    for (int64_t e = first; e < n; e += step) {
      const int64_t i = one ? e / job.columns : unit;
      row = larger_u32(row, counted(job, job_number(job, i, one ? e - i * job.columns : e)));
    }
    most = larger_u32(most, row);
    if (one) break;
    row = most_of_lanes<Lanes>(row);
    const int64_t g = group_of(job.groups, job.groups_bytes, job.groups_stride, job.num_groups, unit, job.batch * job.rows);
    if (thread_index() % Lanes == 0 && row) atomic_max(job.words + 1 + g, row);
  }
  return most;
}

// What a scale block ends with: its scale, for all of its threads, and stored by one.
CQSA_DEVICE float end_of_block(const fp8_job& job, const fp8_side& side, int s, int64_t r, int64_t c, uint32_t bits, bool store) {
  const float amax = plain_amax(bits);
  if (s == amax_side) {
    if (store) store_u32(side.scale.data + 4 * (r * side.scale.stride[0] + c * side.scale.stride[1]), bits_of(amax));
    return 0;
  }
  const fp8::scale_pair pair = fp8::scale_of(amax, rule_of(job, side));
  if (store) store_scales(side, r, c, pair.scale, pair.scale_inv);
  return pair.scale;
}

// A scale block for every team of threads: `whole` thread blocks, or lanes. It is read twice, first for its amax.
template <int Lanes> CQSA_DEVICE uint32_t general_blocks(const fp8_job& job, const fp8_head& head, int s, bool whole) {
  const fp8_side& side = job.side[s];
  const int team = whole ? block_threads() : Lanes, rank = thread_index() % team, teams = block_threads() / team;
  const int64_t units = side.rows * side.columns;
  fp8_writer w = writer_of(job, side);
  uint32_t all = 0;
#pragma unroll 1
  for (int64_t unit = (block_index_x() - job.first_block) * teams + thread_index() / team; unit < units; unit += job.blocks * teams) {
    const int64_t r = unit / side.columns, c = unit - r * side.columns, i0 = r * side.block[0], j0 = c * side.block[1];
    const int64_t high = min_i64(side.block[0], head.rows - i0), wide = min_i64(side.block[1], job.columns - j0);
    if (high <= 0 && (job.groups || head.rows > 0)) continue;  // rows in no group; an empty x has scales all the same
    uint32_t most = 0;
    float scale = 0;
#pragma unroll 1
    for (int pass = 0; pass < (s == amax_side ? 1 : 2); ++pass) {
#pragma unroll 1
      for (int64_t e = rank; e < high * wide; e += team) {
        const int64_t i = i0 + e / wide, j = j0 + e % wide;
        const uint32_t x = job_number(job, i, j);
        if (pass == 0) most = larger_u32(most, counted(job, x));
        else write_code(job, side, &w, i, j, x, scale);
      }
      if (pass) break;
      most = whole ? most_of_block<Lanes>(most) : most_of_lanes<Lanes>(most);
      all = larger_u32(all, most);
      scale = end_of_block(job, side, s, r, c, most, rank == 0);
    }
  }
  if (s == job.first_side) take_counts(w.counts);
  return all;
}

// Scale blocks of one column: a strip of them, a column to each thread of a quarter of the block, which shares its rows with three others.
CQSA_DEVICE uint32_t general_columns(const fp8_job& job, const fp8_head& head, int s) {
  const fp8_side& side = job.side[s];
  uint32_t* const parts = reinterpret_cast<uint32_t*>(shared_memory() + fp8_control_bytes);
  const int wide = block_threads() / 4, mine = thread_index() % wide, part = thread_index() / wide;
  const int64_t strips = (job.columns + wide - 1) / wide, units = side.rows * strips;
  fp8_writer w = writer_of(job, side);
  uint32_t all = 0;
#pragma unroll 1
  for (int64_t unit = block_index_x() - job.first_block; unit < units; unit += job.blocks) {
    const int64_t r = unit / strips, j = (unit - r * strips) * wide + mine, i0 = r * side.block[0], i1 = min_i64(i0 + side.block[0], head.rows);
    const bool none = j >= job.columns || (i0 >= i1 && head.rows > 0);
    uint32_t most = 0;
    float scale = 0;
#pragma unroll 1
    for (int pass = 0; pass < (s == amax_side ? 1 : 2); ++pass) {
#pragma unroll 1
      for (int64_t i = i0 + part; i < i1 && j < job.columns; i += 4) {
        const uint32_t x = job_number(job, i, j);
        if (pass == 0) most = larger_u32(most, counted(job, x));
        else write_code(job, side, &w, i, j, x, scale);
      }
      if (pass) break;
      parts[thread_index()] = most;
      barrier();
#pragma unroll 1
      for (int n = 0; n < 4; ++n) most = larger_u32(most, parts[n * wide + mine]);
      barrier();
      all = larger_u32(all, most);
      if (!none) scale = end_of_block(job, side, s, r, j, most, part == 0);
    }
  }
  if (s == job.first_side) take_counts(w.counts);
  return all;
}

// Sums of columns: four threads have a column, their parts are added in order.
CQSA_DEVICE void general_sums(const fp8_job& job, const fp8_head& head) {
  float* const parts = reinterpret_cast<float*>(shared_memory() + fp8_control_bytes);
  const int wide = block_threads() / 4, mine = thread_index() % wide, part = thread_index() / wide;
#pragma unroll 1
  for (int64_t unit = block_index_x() - job.first_block; unit * wide < job.columns; unit += job.blocks) {
    const int64_t j = unit * wide + mine;
    float sum = 0;
#pragma unroll 1
    for (int64_t i = part; i < head.rows && j < job.columns; i += 4) sum += float_of(job_number(job, i, j));
    parts[thread_index()] = sum;
    barrier();
    if (part == 0 && j < job.columns) {
#pragma unroll 1
      for (int n = 1; n < 4; ++n) sum += parts[n * wide + mine];
      store_u32(reinterpret_cast<char*>(job.column_sum + j * job.column_sum_stride), bits_of(sum));
    }
    barrier();
  }
}

template <int Lanes, class P> CQSA_DEVICE uint32_t general_side(const P& p, const fp8_job& job, const fp8_head& head, int s) {
  const fp8_side& side = job.side[s];
  if (s != amax_side && is_known(p, job, side)) return general_elements(job, head, s);
  if (side.block[1] == 1 && side.block[0] > 1) return general_columns(job, head, s);
  return general_blocks<Lanes>(job, head, s, side.block[0] * side.block[1] > 32 * Lanes);
}

template <int Lanes, class P> CQSA_DEVICE void fp8_general_block(const P& p) {
  const fp8_job& job = job_of<true>(p);
  const fp8_head head = head_of<true>(p, job);
  barrier();
  uint32_t most = 0;
  if (head.go) {
    bool any = false;
#pragma unroll 1
    for (int s = 0; s < 3 && p.phase != phase_amax; ++s) {
      if (s == amax_side ? !job.side[s].scale.data : !job.side[s].codes.data) continue;
      most = larger_u32(most, general_side<Lanes>(p, job, head, s));
      any = true;
    }
    if (!any && job.words) most = general_amax<Lanes>(job, head);
    if (job.column_sum && p.phase != phase_amax) general_sums(job, head);
    publish<true>(p, job, head);
  }
  end_block<Lanes, true>(p, job, head.go, p.phase == phase_codes ? 0 : most);
}

}  // namespace cqsa::gpu
