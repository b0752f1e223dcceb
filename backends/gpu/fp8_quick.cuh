// SPDX-License-Identifier: Apache-2.0
// FP8 where nothing is out of the ordinary: f16 or bf16 in whole aligned vectors, saturated codes of e4m3fn or e5m2, NaN that propagates, no
// counters. A block has one piece of the work and no loop, few registers, and no barrier that it could do without: so much of x is on its way
// that the device is as fast as in a copy. What is left out here the other kernels do; only NaN is looked for, and done again one at a time.
#pragma once

#include "fp8_group.cuh"
#include "fp8_tile.cuh"

namespace cqsa::gpu {

// Eight numbers of x again, for the bits of NaN. Codes are `step` bytes apart.
CQSA_DEVICE void again(int kind, int32_t format, float scale, const char* x, char* to, int64_t step) {
  const fp8_encoder how{format, 1, 0, 0, 0};
  fp8_counts counts{};
#pragma unroll 1
  for (int i = 0; i < 8; ++i) to[i * step] = char(encode_number(load_number(x, kind, i), scale, how, 0, &counts));
}
// .. of a thread's vectors at, at + step, ..
CQSA_DEVICE void again(int kind, const fp8_side& side, const float (&scale)[fp8_each], const char* x, char* to, uint32_t at, uint32_t step, uint32_t vectors) {
#pragma unroll 1
  for (uint32_t u = 0; u < uint32_t(fp8_each); ++u, at += step)
    if (at < vectors) again(kind, side.format, u < 2 ? (u ? scale[1] : scale[0]) : u == 2 ? scale[2] : scale[3], x + int64_t(at) * 16, to + int64_t(at) * 8, 1);
}

// Codes of a thread's vectors, of which `most` is the largest.
template <int Kind>
CQSA_DEVICE void quick_codes(const fp8_side& side, const fp8_vectors& v, const float (&scale)[fp8_each], uint32_t most, const char* x, char* to, uint32_t at, uint32_t step,
                             uint32_t vectors) {
  fp8_codes c;
  encode_kind<Kind>(v, scale, fast_of(side.format), c);
  store_vectors(to, false, at, step, vectors, c);
  if (most_bits(most, Kind) > inf_bits) again(Kind, side, scale, x, to, at, step, vectors);
}

// ---- one known scale, one row ---------------------------------------------------------------------------------------------------

template <int Lanes, int Kind> CQSA_DEVICE void quick_stream(const fp8_params& p) {
  const fp8_job& job = p.jobs[0];
  const fp8_side& side = job.side[0];
  const uint32_t threads = uint32_t(block_threads()), block = uint32_t(job.backward ? grid_size_x() - 1 - block_index_x() : block_index_x());
  const uint32_t vectors = uint32_t(job.columns / 8), at = block * fp8_each * threads + uint32_t(thread_index());
  fp8_vectors v;
  load_vectors(job.x.data, at, threads, vectors, v);
  const fp8_head head = head_of<false, 1>(p, job);
  uint32_t m[fp8_each], most = 0;
  if (head.go) {
    most = most_of_vectors(v, false, m);
    const float scale[fp8_each] = {head.scale[0], head.scale[0], head.scale[0], head.scale[0]};
    if (side.codes.data) quick_codes<Kind>(side, v, scale, most, job.x.data, side.codes.data, at, threads, vectors);
    if (block_index_x() == 0) publish<false, 1>(p, job, head);
    most = most_bits(most, Kind);
  }
  end_block<Lanes, false>(p, job, head.go, most);
}

// ---- rows -----------------------------------------------------------------------------------------------------------------------

// A row for each block, four vectors of it for each thread.
template <int Lanes, int Kind> CQSA_DEVICE void quick_row(const fp8_params& p) {
  const fp8_job& job = p.jobs[0];
  const fp8_side& side = job.side[0];
  const uint32_t threads = uint32_t(block_threads()), vectors = fp8_each * threads, at = uint32_t(thread_index());
  const char* const x = job.x.data + block_index_x() * job.x.stride[1] * 2;
  fp8_vectors v;
  load_vectors(x, at, threads, vectors, v);
  if (!head_of<false, 1>(p, job).go) return;
  uint32_t m[fp8_each];
  const uint32_t mine = most_of_vectors(v, false, m);
  uint32_t most = most_of_lanes<Lanes>(most_bits(mine, Kind));
  if (at % Lanes == 0) control().part[at / Lanes] = most;
  barrier();
  most = most_of_lanes<Lanes>(at % Lanes < threads / Lanes ? control().part[at % Lanes] : 0);
  const fp8::scale_pair pair = fp8::scale_of(plain_amax(most), rule_of(job, side));
  if (at == 0) store_scales(side, block_index_x(), 0, pair.scale, pair.scale_inv);
  const float scale[fp8_each] = {pair.scale, pair.scale, pair.scale, pair.scale};
  quick_codes<Kind>(side, v, scale, mine, x, side.codes.data + block_index_x() * side.codes.stride[1], at, threads, vectors);
}

// ---- groups of neighbours ---------------------------------------------------------------------------------------------------------

// Rows of whole groups lie one behind the other, as one.
template <int Lanes, int Kind> CQSA_DEVICE void quick_group(const fp8_params& p) {
  const fp8_job& job = p.jobs[0];
  const fp8_side& side = job.side[0];
  const uint32_t threads = uint32_t(block_threads()), vectors = uint32_t(job.columns / 8);
  const uint32_t at = uint32_t(block_index_x()) * fp8_each * threads + uint32_t(thread_index());
  fp8_vectors v;
  load_vectors(job.x.data, at, threads, vectors, v);
  if (!head_of<false, 1>(p, job).go) return;
  uint32_t m[fp8_each];
  const uint32_t most = most_of_vectors(v, false, m);
  float scale[fp8_each];
  scale_groups<Lanes>(job, {1, 1, vectors}, {0, at}, m, scale);
  quick_codes<Kind>(side, v, scale, most, job.x.data, side.codes.data, at, threads, vectors);
}

// ---- transposed -------------------------------------------------------------------------------------------------------------------

// A tile of 128 x 128 for each block, whole ones alone: a thread has four rows of eight columns twice. Four rows of a column are a word of
// shared memory, and a column has one word more than it needs, for its banks.
constexpr int quick_pitch = fp8_tile_size / 4 + 1;
static_assert(fp8_tile_size * quick_pitch * 4 <= fp8_tile_bytes);

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

template <int Kind> CQSA_DEVICE word_pair quick_code(const loaded16& x, float scale, const fp8_fast& f) {
  return has_fp8 && f.wide ? encode_vector<Kind, true>(x, scale, f) : encode_vector<Kind, false>(x, scale, f);
}

// Codes of a thread's eight rows: those of half a tile's rows down, two times four.
template <int Kind>
CQSA_DEVICE void quick_turn(const fp8_job& job, const fp8_head& head, const quick_place& at, const loaded16 (&x)[8], uint32_t* t) {
  const fp8_side &row = job.side[0], &turned = job.side[1];
  const fp8_fast f[2] = {fast_of(row.format), fast_of(turned.format)};
  const bool same = row.codes.data && row.format == turned.format && head.scale[0] == head.scale[1];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    word_pair c[4];
    const uint32_t down = at.down + 16 * i;
    if (row.codes.data) {
      char* to = row.codes.data + (at.row + 4 * down) * row.codes.stride[1] + at.column + 8 * at.right;
#pragma unroll
      for (int r = 0; r < 4; ++r, to += row.codes.stride[1]) {
        c[r] = quick_code<Kind>(x[4 * i + r], head.scale[0], f[0]);
        store_once8(to, c[r].x[0], c[r].x[1]);
      }
    }
    if (!same)
#pragma unroll
      for (int r = 0; r < 4; ++r) c[r] = quick_code<Kind>(x[4 * i + r], head.scale[1], f[1]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      turn_four(c[0].x[h], c[1].x[h], c[2].x[h], c[3].x[h]);
#pragma unroll
      for (int j = 0; j < 4; ++j) t[(8 * at.right + 4 * h + j) * quick_pitch + down] = c[j].x[h];
    }
  }
}
// A thread's rows again, where the others' codes of the tile are too.
CQSA_DEVICE void quick_turn_again(const fp8_job& job, const fp8_head& head, const quick_place& at, uint32_t* t) {
#pragma unroll 1
  for (int n = 0; n < 8; ++n) {
    const uint32_t down = at.down + (n & 4) * 4, r = n & 3;
    const int64_t row = at.row + 4 * down + r;
    const char* const x = job.x.data + (row * job.x.stride[1] + at.column + 8 * at.right) * 2;
    again(job.x.kind, job.side[1].format, head.scale[1], x, reinterpret_cast<char*>(t + 8 * at.right * quick_pitch + down) + r, quick_pitch * 4);
    const fp8_side& side = job.side[0];
    if (side.codes.data) again(job.x.kind, side.format, head.scale[0], x, side.codes.data + row * side.codes.stride[1] + at.column + 8 * at.right, 1);
  }
}
CQSA_DEVICE void quick_store_turned(const fp8_side& side, const quick_place& at, const uint32_t* t) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int n = thread_index() + k * 256, column = n / 8, chunk = n % 8;
    const uint32_t* const from = t + column * quick_pitch + 4 * chunk;
    *reinterpret_cast<word4x*>(side.codes.data + (at.column + column) * side.codes.stride[2] + at.row + 16 * chunk) = {{from[0], from[1], from[2], from[3]}};
  }
}

template <int Lanes, int Kind> CQSA_DEVICE void quick_tile(const fp8_params& p) {
  const fp8_job& job = p.jobs[0];
  uint32_t* const t = reinterpret_cast<uint32_t*>(shared_memory() + fp8_control_bytes);
  const quick_place at = quick_place_of(job);
  loaded16 x[8];
#pragma unroll
  for (int n = 0; n < 8; ++n) x[n] = load_once(job.x.data + ((at.row + 4 * (at.down + (n & 4) * 4) + (n & 3)) * job.x.stride[1] + at.column + 8 * at.right) * 2);
  const fp8_head head = head_of<false, 2>(p, job);
  uint32_t most = 0;
  if (head.go) {
#pragma unroll
    for (int n = 0; n < 8; ++n) most = max_u16x2(most, most_of_vector(x[n], false));
    most = most_bits(most, Kind);
    quick_turn<Kind>(job, head, at, x, t);
    if (most > inf_bits) quick_turn_again(job, head, at, t);
    barrier();
    quick_store_turned(job.side[1], at, t);
    if (block_index_x() == 0) publish<false, 2>(p, job, head);
  }
  end_block<Lanes, false>(p, job, head.go, most);
}

}  // namespace cqsa::gpu
