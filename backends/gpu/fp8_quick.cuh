// SPDX-License-Identifier: Apache-2.0
// FP8 where nothing is out of the ordinary: f16 or bf16 in whole aligned vectors, saturated codes of e4m3fn or e5m2, NaN that propagates, no
// counters. A block has one piece of the work and no loop, few registers, and no barrier that it could do without: so much of x is on its way
// that the device is as fast as in a copy. What is left out here the other kernels do; only NaN is looked for, and done again one at a time.
#pragma once

#include "fp8_group.cuh"
#include "fp8_tile.cuh"

namespace cqsa::gpu {

// The codes of those of eight numbers that are NaN, `step` bytes apart: nothing else is wrong in what is fast.
CQSA_DEVICE void put_nans(int kind, int32_t format, const char* x, char* to, int64_t step) {
#pragma unroll 1
  for (int i = 0; i < 8; ++i) {
    const uint32_t bits = load_number(x, kind, i);
    if ((bits & 0x7fffffffu) > inf_bits) to[i * step] = char(code_of_nan(bits, format));
  }
}

// A team of lanes has four times as many neighbouring vectors, so what a thread has of them is known but for the first. `there` is the same
// for the whole team.
struct quick_run {
  const char* x;
  char* codes;
  bool there;
};
template <int Lanes> CQSA_DEVICE uint32_t first_of_team(uint32_t thread) { return thread / Lanes * (fp8_each * Lanes) + thread % Lanes; }
// .. of all rows, one behind the other, and of a row for each block. Worked out once more where NaN is met: no register waits for that.
template <int Lanes> struct quick_flat {
  CQSA_DEVICE static uint32_t first(uint32_t piece) { return piece * fp8_each * uint32_t(block_threads()) + first_of_team<Lanes>(uint32_t(thread_index() + hidden_zero())); }
  CQSA_DEVICE static quick_run of(const fp8_job& job, uint32_t piece) {
    const uint32_t at = first(piece);
    return {job.x.data + int64_t(at) * 16, job.side[0].codes.data ? job.side[0].codes.data + int64_t(at) * 8 : nullptr, at < uint32_t(job.columns / 8)};
  }
};
template <int Lanes> struct quick_single {
  CQSA_DEVICE static quick_run of(const fp8_job& job, uint32_t row) {
    const uint32_t at = first_of_team<Lanes>(uint32_t(thread_index() + hidden_zero()));
    return {job.x.data + int64_t(row) * job.x.stride[1] * 2 + at * 16, job.side[0].codes.data + int64_t(row) * job.side[0].codes.stride[1] + at * 8, true};
  }
};

template <int Lanes> CQSA_DEVICE void load_run(const quick_run& r, fp8_vectors& v) {
  clear_vectors(v);
  if (!r.there) return;
#pragma unroll
  for (int u = 0; u < fp8_each; ++u) v.x[u] = load_now(r.x + u * Lanes * 16);
}
template <int Lanes, class Place> CQSA_DEVICE void put_run_nans(const fp8_job& job, uint32_t piece) {
  const quick_run r = Place::of(job, piece);
#pragma unroll 1
  for (int u = 0; u < fp8_each; ++u) put_nans(job.x.kind, job.side[0].format, r.x + u * Lanes * 16, r.codes + u * Lanes * 8, 1);
}
template <int Lanes, int Kind, bool Wide> CQSA_DEVICE void store_run(const quick_run& r, const fp8_vectors& v, const float (&scale)[fp8_each], const fp8_fast& f) {
#pragma unroll
  for (int u = 0; u < fp8_each; ++u) {
    const word_pair c = encode_vector<Kind, Wide>(v.x[u], scale[u], f);
    store_once8(r.codes + u * Lanes * 8, c.x[0], c.x[1]);
  }
}

// Codes of a thread's vectors, of which `most` is the largest.
template <int Lanes, class Place, int Kind>
CQSA_DEVICE void quick_codes(const fp8_job& job, uint32_t piece, const quick_run& r, const fp8_vectors& v, const float (&scale)[fp8_each], uint32_t most) {
  if (!r.there) return;
  const fp8_fast f = fast_of(job.side[0].format);
  if (has_fp8 && f.wide) store_run<Lanes, Kind, true>(r, v, scale, f);
  else store_run<Lanes, Kind, false>(r, v, scale, f);
  if (most_bits(most, Kind) > inf_bits) put_run_nans<Lanes, Place>(job_again(job), piece);
}

// The head, by the first team before its own numbers are on their way, so that what it takes of registers is not on top of theirs; a barrier
// between it and what reads control().
template <int Lanes, int Sides, class P> CQSA_DEVICE void quick_head(const P& p, const fp8_job& job) {
  if (thread_index() >= Lanes) return;
  const fp8_head head = head_of<false, Sides>(p, job);
  if (thread_index() == 0) control().scale = !head.go ? 0.0f : job.side[Sides - 1].codes.data ? head.scale[Sides - 1] : 1.0f;
}

template <int Lanes, int Sides, class P> CQSA_DEVICE void quick_end(const P& p, const fp8_job& job, bool go, uint32_t amax) {
  if (go && block_index_x() == 0) publish<false, Sides>(p, job, {true, job.rows, {0.0f, 0.0f}});
  end_block<Lanes, false>(p, job, go, amax);
}

// ---- one known scale, one row ---------------------------------------------------------------------------------------------------

// A block has one piece, or some, where blocks take tickets.
template <int Lanes, int Kind, class P> CQSA_DEVICE void quick_stream(const P& p) {
  const fp8_job& job = p.jobs[0];
  quick_head<Lanes, 1>(p, job);
  const uint32_t pieces = uint32_t((job.columns / 8 + fp8_each * block_threads() - 1) / (fp8_each * block_threads()));
  uint32_t n = uint32_t(block_index_x());
  quick_run r = quick_flat<Lanes>::of(job, job.backward ? pieces - 1 - n : n);
  fp8_vectors v;
  load_run<Lanes>(r, v);
  barrier();
  const float scale = control().scale;
  uint32_t most = 0;
  if (scale != 0.0f) {
    const float all[fp8_each] = {scale, scale, scale, scale};
#pragma unroll 1
    for (;;) {
      uint32_t m[fp8_each];
      const uint32_t mine = most_of_vectors(v, false, m);
      most = max_u16x2(most, mine);
      if (r.codes) quick_codes<Lanes, quick_flat<Lanes>, Kind>(job, job.backward ? pieces - 1 - n : n, r, v, all, mine);
      n += uint32_t(grid_size_x());
      if (n >= pieces) break;
      r = quick_flat<Lanes>::of(job, job.backward ? pieces - 1 - n : n);
      load_run<Lanes>(r, v);
    }
    most = most_bits(most, Kind);
  }
  quick_end<Lanes, 1>(p, job, scale != 0.0f, most);
}

// ---- rows -----------------------------------------------------------------------------------------------------------------------

// A row for each block, four vectors of it for each thread.
template <int Lanes, int Kind, class P> CQSA_DEVICE void quick_row(const P& p) {
  const fp8_job& job = p.jobs[0];
  const fp8_side& side = job.side[0];
  const quick_run r = quick_single<Lanes>::of(job, uint32_t(block_index_x()));
  const int thread = thread_index(), teams = block_threads() / Lanes;
  fp8_vectors v;
  load_run<Lanes>(r, v);
  if (!head_of<false, 1>(p, job).go) return;
  uint32_t m[fp8_each];
  const uint32_t mine = most_of_vectors(v, false, m);
  uint32_t most = most_of_lanes<Lanes>(most_bits(mine, Kind));
  if (thread % Lanes == 0) control().part[thread / Lanes] = most;
  barrier();
  most = most_of_lanes<Lanes>(thread % Lanes < teams ? control().part[thread % Lanes] : 0);
  const fp8::scale_pair pair = fp8::scale_of(plain_amax(most), rule_of(job, side));
  if (thread == 0) store_scales(side, block_index_x(), 0, pair.scale, pair.scale_inv);
  const float scale[fp8_each] = {pair.scale, pair.scale, pair.scale, pair.scale};
  quick_codes<Lanes, quick_single<Lanes>, Kind>(job, uint32_t(block_index_x()), r, v, scale, mine);
}

// ---- groups of neighbours ---------------------------------------------------------------------------------------------------------

// Rows of whole groups lie one behind the other, as one.
template <int Lanes, int Kind, class P> CQSA_DEVICE void quick_group(const P& p) {
  const fp8_job& job = p.jobs[0];
  const quick_run r = quick_flat<Lanes>::of(job, uint32_t(block_index_x()));
  fp8_vectors v;
  load_run<Lanes>(r, v);
  if (!head_of<false, 1>(p, job).go) return;
  uint32_t m[fp8_each];
  const uint32_t most = most_of_vectors(v, false, m);
  float scale[fp8_each];
  scale_groups<Lanes>(job, {1, 1, uint32_t(job.columns / 8)}, {0, quick_flat<Lanes>::first(uint32_t(block_index_x()))}, Lanes, m, scale);
  quick_codes<Lanes, quick_flat<Lanes>, Kind>(job, uint32_t(block_index_x()), r, v, scale, most);
}

// ---- transposed -------------------------------------------------------------------------------------------------------------------

// A tile of 128 x 128 for each block, whole ones alone: a thread has four rows of eight columns twice. Four rows of a column are a word of
// shared memory, and a column has one word more than it needs, eight columns two more: no two lanes of 32 meet in a bank.
CQSA_DEVICE uint32_t quick_word(uint32_t column, uint32_t word) { return column * (fp8_tile_size / 4 + 1) + column / 8 * 2 + word; }

struct quick_place {
  int64_t row, column;  // of the tile
  uint32_t down, right; // of the thread: four rows, eight columns
};
CQSA_DEVICE quick_place quick_place_of(const fp8_job& job) {
  constexpr uint32_t band = 8;  // tiles that are under way together are about square: long pieces of rows both ways
  const uint32_t wide = uint32_t(job.columns / fp8_tile_size), high = uint32_t(job.rows / fp8_tile_size);
  const uint32_t unit = uint32_t(job.backward ? grid_size_x() - 1 - block_index_x() : block_index_x()), first = unit / (band * wide) * band;
  const uint32_t tall = high - first < band ? high - first : band, rest = unit - first * wide, column = rest / tall;
  return {int64_t(first + rest - column * tall) * fp8_tile_size, int64_t(column) * fp8_tile_size, uint32_t(thread_index()) / 16, uint32_t(thread_index()) % 16};
}

// Codes of a thread's eight rows: those of half a tile's rows down, two times four. Both outputs have the same ones.
template <int Kind, bool Wide> CQSA_DEVICE void quick_turn(const fp8_job& job, float scale, const quick_place& at, const loaded16 (&x)[8], uint32_t* t) {
  const fp8_side& row = job.side[0];
  const fp8_fast f = fast_of(job.side[1].format);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    word_pair c[4];
    const uint32_t down = at.down + 16 * i;
#pragma unroll
    for (int r = 0; r < 4; ++r) c[r] = encode_vector<Kind, Wide>(x[4 * i + r], scale, f);
    if (row.codes.data) {
      char* to = row.codes.data + (at.row + 4 * down) * row.codes.stride[1] + at.column + 8 * at.right;
#pragma unroll
      for (int r = 0; r < 4; ++r, to += row.codes.stride[1]) store_once8(to, c[r].x[0], c[r].x[1]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      turn_four(c[0].x[h], c[1].x[h], c[2].x[h], c[3].x[h]);
#pragma unroll
      for (int j = 0; j < 4; ++j) t[quick_word(8 * at.right + 4 * h + j, down)] = c[j].x[h];
    }
  }
}
// Where the others' codes of the tile are too.
CQSA_DEVICE void put_tile_nans(const fp8_job& job, const quick_place& at, uint32_t* t) {
#pragma unroll 1
  for (int n = 0; n < 8; ++n) {
    const uint32_t down = at.down + (n & 4) * 4, r = n & 3;
    const int64_t row = at.row + 4 * down + r, column = at.column + 8 * at.right;
    const char* const x = job.x.data + (row * job.x.stride[1] + column) * 2;
    put_nans(job.x.kind, job.side[1].format, x, reinterpret_cast<char*>(t + quick_word(8 * at.right, down)) + r, (fp8_tile_size / 4 + 1) * 4);
    const fp8_side& side = job.side[0];
    if (side.codes.data) put_nans(job.x.kind, side.format, x, side.codes.data + row * side.codes.stride[1] + column, 1);
  }
}
CQSA_DEVICE void quick_store_turned(const fp8_side& side, const quick_place& at, const uint32_t* t) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int n = thread_index() + k * 256, column = n / 8, chunk = n % 8;
    const uint32_t* const from = t + quick_word(column, 4 * chunk);
    *reinterpret_cast<word4x*>(side.codes.data + (at.column + column) * side.codes.stride[2] + at.row + 16 * chunk) = {{from[0], from[1], from[2], from[3]}};
  }
}

template <int Lanes, int Kind, class P> CQSA_DEVICE void quick_tile(const P& p) {
  const fp8_job& job = p.jobs[0];
  uint32_t* const t = reinterpret_cast<uint32_t*>(shared_memory() + fp8_control_bytes);
  quick_head<Lanes, 2>(p, job);
  const quick_place at = quick_place_of(job);
  loaded16 x[8];
#pragma unroll
  for (int n = 0; n < 8; ++n) x[n] = load_now(job.x.data + ((at.row + 4 * (at.down + (n & 4) * 4) + (n & 3)) * job.x.stride[1] + at.column + 8 * at.right) * 2);
  barrier();
  const float scale = control().scale;
  uint32_t most = 0;
  if (scale != 0.0f) {
#pragma unroll
    for (int n = 0; n < 8; ++n) most = max_u16x2(most, most_of_vector(x[n], false));
    most = most_bits(most, Kind);
    if (has_fp8 && job.side[1].format == CQSA_DTYPE_E5M2) quick_turn<Kind, true>(job, scale, at, x, t);
    else quick_turn<Kind, false>(job, scale, at, x, t);
    if (most > inf_bits) put_tile_nans(job_again(job), at, t);
    barrier();
    quick_store_turned(job.side[1], at, t);
  }
  quick_end<Lanes, 2>(p, job, scale != 0.0f, most);
}

}  // namespace cqsa::gpu
