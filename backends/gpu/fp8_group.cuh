// SPDX-License-Identifier: Apache-2.0
// FP8, row-major in pieces of rows, one for each thread block at a time: groups of 32 to 256 neighbours, each with a scale of its own and in
// the registers of some neighbouring lanes; or whole rows and long groups, with one scale of this launch or one that is known.
#pragma once

#include "fp8_vector.cuh"

namespace cqsa::gpu {

// Of a row and a piece of it. Whoever launches sees to it that 31 bits are enough for rows and pieces, and 32 for columns.
struct fp8_place {
  uint32_t row, column;
};
CQSA_DEVICE fp8_place place_of(uint32_t unit, uint32_t wide) {
  if (wide == 1) return {unit, 0};
  const uint32_t row = unit / wide;
  return {row, unit - row * wide};
}

// The largest magnitude of each vector that counts, and of them all; *raw is with those that do not count.
CQSA_DEVICE uint32_t counted_most(const fp8_job& job, fp8_vectors& v, uint32_t (&m)[fp8_each], uint32_t* raw) {
  const bool f32 = job.x.kind == kind_f32;
  uint32_t these = most_of_vectors(v, f32, m);
  *raw = larger_u32(*raw, most_bits(these, job.x.kind));
  if (job.ignore_nan && *raw >= inf_bits) drop_strange(v, job.x.kind), these = most_of_vectors(v, f32, m);
  return these;
}

// ---- groups -----------------------------------------------------------------------------------------------------------------

// Four maxima of a thread and those of its team, 4 to 32 lanes: half of the words go to a neighbour, so that in the end a lane has the
// maximum of one of the four, of number mine_of().
CQSA_DEVICE int mine_of(int lane, int team) { return (lane & team / 2 ? 2 : 0) + (lane & team / 4 ? 1 : 0); }
template <int Lanes> CQSA_DEVICE uint32_t most_of_four(const uint32_t (&m)[fp8_each], int lane, int team, bool f32) {
  const bool high = lane & team / 2, odd = lane & team / 4;
  const uint32_t a = most_of_two(high ? m[2] : m[0], shuffle_xor<Lanes>(high ? m[0] : m[2], team / 2), f32);
  const uint32_t b = most_of_two(high ? m[3] : m[1], shuffle_xor<Lanes>(high ? m[1] : m[3], team / 2), f32);
  uint32_t most = most_of_two(odd ? b : a, shuffle_xor<Lanes>(odd ? a : b, team / 4), f32);
#pragma unroll 1
  for (int mask = team / 8; mask > 0; mask /= 2) most = most_of_two(most, shuffle_xor<Lanes>(most, mask), f32);
  return most;
}

// Pieces of a row: what all threads of a block have in flight.
struct fp8_pieces {
  uint32_t per_row, all, vectors;  // vectors of a row
};
CQSA_DEVICE fp8_pieces pieces_of(const fp8_job& job) {
  const uint32_t vectors = uint32_t(job.columns >> shift_of(job.x.kind)), each = uint32_t(fp8_each * block_threads()), per_row = (vectors + each - 1) / each;
  return {per_row, uint32_t(job.rows) * per_row, vectors};
}
// The row of a piece, and this thread's first vector.
CQSA_DEVICE void load_piece(const fp8_job& job, const fp8_pieces& g, uint32_t piece, fp8_place* at, fp8_vectors& v) {
  if (piece >= g.all) return;
  *at = place_of(piece, g.per_row);
  at->column = at->column * uint32_t(fp8_each * block_threads()) + uint32_t(thread_index());
  load_vectors(job.x.data + at->row * (job.x.stride[1] * (16 / numbers_of(job.x.kind))), at->column, uint32_t(block_threads()), g.vectors, v);
}

// Which of four vectors need the slow way, a bit for each.
CQSA_DEVICE uint32_t slow_groups(const fp8_job& job, const uint32_t (&m)[fp8_each], uint32_t raw, const float (&scale)[fp8_each]) {
  if (raw > strange_limit(job)) return 15;
  uint32_t slow = 0;
  if (is_strict(job))
#pragma unroll
    for (int u = 0; u < fp8_each; ++u) slow |= uint32_t(is_too_large(job.side[0], most_bits(m[u], job.x.kind), scale[u])) << u;
  return slow;
}

// The scale of one group of four that this lane has, to all; stored where that is mine to do. The four are `step` vectors apart.
template <int Lanes>
CQSA_DEVICE void scale_groups(const fp8_job& job, const fp8_pieces& g, const fp8_place& at, int step, const uint32_t (&m)[fp8_each], float (&scale)[fp8_each]) {
  const fp8_side& side = job.side[0];
  const int kind = job.x.kind, team = int(side.block[1]) >> shift_of(kind), lane = thread_index() % Lanes, first = lane & ~(team - 1);
  const uint32_t group = (at.column + uint32_t(mine_of(lane, team) * step)) / uint32_t(team);
  const fp8::scale_pair pair = fp8::scale_of(plain_amax(most_bits(most_of_four<Lanes>(m, lane, team, kind == kind_f32), kind)), rule_of(job, side));
  if ((lane & (team / 4 - 1)) == 0 && group * uint32_t(team) < g.vectors) {
    const fp8_place to = place_of(group, uint32_t(side.columns));  // x may be many rows in one
    store_scales(side, at.row + to.row, to.column, pair.scale, pair.scale_inv);
  }
#pragma unroll
  for (int u = 0; u < fp8_each; ++u) scale[u] = shuffle<Lanes>(pair.scale, first + (u & 2 ? team / 2 : 0) + (u & 1 ? team / 4 : 0));
}

// Whole vectors that are aligned, a team of 4 to 32 lanes for a group; so a piece begins with a group.
template <int Lanes> CQSA_DEVICE uint32_t fp8_groups(const fp8_job& job, const fp8_pieces& g, fp8_place at, fp8_vectors& v) {
  const fp8_side& side = job.side[0];
  const int kind = job.x.kind;
  const uint32_t step = uint32_t(block_threads());
  uint32_t all = 0;
#pragma unroll 1
  for (uint32_t piece = uint32_t(block_index_x()); piece < g.all;) {
    uint32_t m[fp8_each], raw = 0;
    all = most_of_two(all, counted_most(job, v, m, &raw), kind == kind_f32);
    float scale[fp8_each];
    scale_groups<Lanes>(job, g, at, int(step), m, scale);
    uint32_t slow = slow_groups(job, m, raw, scale);
    fp8_codes c;
    encode_vectors(v, kind, scale, fast_of(side.format), c);
    store_vectors(side.codes.data + at.row * side.codes.stride[1], kind == kind_f32, at.column, step, g.vectors, c);
#pragma unroll 1
    for (uint32_t u = 0; slow; ++u, slow >>= 1) {
      const uint32_t i = at.column + u * step;
      if (!(slow & 1) || i >= g.vectors) continue;
      slow_run(job_again(job), u < 2 ? (u ? scale[1] : scale[0]) : u == 2 ? scale[2] : scale[3], at.row, int64_t(i) * numbers_of(kind), numbers_of(kind), 1);
    }
    piece += uint32_t(grid_size_x());
    load_piece(job, g, piece, &at, v);
  }
  return most_bits(all, kind);
}

template <int Lanes, class P> CQSA_DEVICE void fp8_group_block(const P& p) {
  const fp8_job& job = p.jobs[0];
  const fp8_pieces g = pieces_of(job);
  fp8_place at{};
  fp8_vectors v;
  clear_vectors(v);
  load_piece(job, g, uint32_t(block_index_x()), &at, v);
  const fp8_head head = head_of<false, 1>(p, job);
  barrier();
  uint32_t most = 0;
  if (head.go) {
    most = fp8_groups<Lanes>(job, g, at, v);
    publish<false, 1>(p, job, head);
  }
  end_block<Lanes, false>(p, job, head.go, most);
}

// ---- rows -------------------------------------------------------------------------------------------------------------------

// A row, or a long group of one, for each block.
struct fp8_rows {
  bool known, vectors;  // whether the scale is known, and whether vectors are aligned
  uint32_t length, per_row, all;
};
template <class P> CQSA_DEVICE fp8_rows rows_of(const P& p, const fp8_job& job) {
  const fp8_side& side = job.side[0];
  const bool known = !side.codes.data || is_known(p, job, side), vectors = job.x.aligned && (!side.codes.data || side.codes.aligned);
  const uint32_t per_row = known ? 1 : uint32_t(side.columns);
  return {known, vectors, known ? uint32_t(job.columns) : uint32_t(side.block[1]), per_row, uint32_t(job.rows) * per_row};
}
// As many vectors as are whole and aligned, and the elements behind them.
struct fp8_row {
  uint32_t row, column, vectors, rest;
};
CQSA_DEVICE fp8_row row_of(const fp8_job& job, const fp8_rows& r, uint32_t unit) {
  const fp8_place at = place_of(unit, r.per_row);
  const uint32_t column = at.column * r.length, left = uint32_t(job.columns) - column, length = left < r.length ? left : r.length;
  const uint32_t vectors = r.vectors ? length >> shift_of(job.x.kind) : 0;
  return {at.row, column, vectors, length - vectors * uint32_t(numbers_of(job.x.kind))};
}
CQSA_DEVICE const char* begin_of(const fp8_job& job, const fp8_row& row) { return job.x.data + (row.row * job.x.stride[1] + row.column) * (16 / numbers_of(job.x.kind)); }
CQSA_DEVICE void load_row(const fp8_job& job, const fp8_row& row, uint32_t chunk, fp8_vectors& v) {
  const uint32_t threads = uint32_t(block_threads());
  if (row.vectors) load_vectors(begin_of(job, row), chunk * fp8_each * threads + uint32_t(thread_index()), threads, row.vectors, v);
  else clear_vectors(v);
}

// The largest magnitude of a row that counts, of this thread's part of it; afterwards v is the last of `chunks` pieces.
CQSA_DEVICE uint32_t row_most(const fp8_job& job, const fp8_row& row, uint32_t chunks, fp8_vectors& v, uint32_t* raw) {
  const int kind = job.x.kind;
  uint32_t most = 0, rest = 0, m[fp8_each];
#pragma unroll 1
  for (uint32_t chunk = 0;;) {
    most = most_of_two(most, counted_most(job, v, m, raw), kind == kind_f32);
    if (++chunk == chunks) break;
    load_row(job, row, chunk, v);
  }
#pragma unroll 1
  for (uint32_t i = uint32_t(thread_index()); i < row.rest; i += uint32_t(block_threads())) {
    const uint32_t mag = load_number(begin_of(job, row), kind, int64_t(row.vectors) * numbers_of(kind) + i) & 0x7fffffffu;
    if (!job.ignore_nan || mag < inf_bits) rest = larger_u32(rest, mag);
  }
  return larger_u32(most_bits(most, kind), rest);
}

// The scale of a row from what its threads have seen. Words of two rows take turns, so that one barrier is enough.
template <int Lanes> CQSA_DEVICE float scale_row(const fp8_job& job, const fp8_rows& r, const fp8_row& row, uint32_t most, int turn) {
  const fp8_side& side = job.side[0];
  uint32_t* const part = control().part + 16 * turn;
  most = most_of_lanes<Lanes>(most);
  if (thread_index() % Lanes == 0) part[thread_index() / Lanes] = most;
  barrier();
  most = most_of_lanes<Lanes>(thread_index() % Lanes < block_threads() / Lanes ? part[thread_index() % Lanes] : 0);
  const fp8::scale_pair pair = fp8::scale_of(plain_amax(most), rule_of(job, side));
  if (thread_index() == 0) store_scales(side, row.row, row.column / r.length, pair.scale, pair.scale_inv);
  return pair.scale;
}

// Codes of a row, its last piece first, since that is in registers.
CQSA_DEVICE void row_codes(const fp8_job& job, const fp8_row& row, uint32_t chunks, float scale, fp8_vectors& v) {
  const fp8_side& side = job.side[0];
  const uint32_t threads = uint32_t(block_threads());
#pragma unroll 1
  for (uint32_t chunk = chunks - 1;; --chunk) {
    fp8_codes c;
    encode_vectors(v, job.x.kind, scale, fast_of(side.format), c);
    store_vectors(side.codes.data + row.row * side.codes.stride[1] + row.column, job.x.kind == kind_f32, chunk * fp8_each * threads + uint32_t(thread_index()), threads, row.vectors, c);
    if (chunk == 0) return;
    load_row(job, row, chunk - 1, v);
  }
}

// This thread's vectors of a row where that has to be, and the elements that are in no vector.
CQSA_DEVICE void row_again(const fp8_job& job, const fp8_row& row, float scale, bool slow) {
  const uint32_t numbers = uint32_t(numbers_of(job.x.kind)), threads = uint32_t(block_threads()), mine = uint32_t(thread_index()), vectors = slow ? row.vectors : 0;
#pragma unroll 1
  for (uint32_t i = mine;; i += threads) {
    const bool tail = i >= vectors;
    const uint32_t n = !tail ? numbers : row.rest > mine ? (row.rest - mine - 1) / threads + 1 : 0;
    slow_run(job, scale, row.row, int64_t(row.column) + (tail ? int64_t(row.vectors) * numbers + mine : int64_t(i) * numbers), n, tail ? threads : 1);
    if (tail) return;
  }
}

template <int Lanes> CQSA_DEVICE uint32_t fp8_row_units(const fp8_job& job, const fp8_rows& r, float known_scale, fp8_row row, fp8_vectors& v) {
  const bool codes = job.side[0].codes.data != nullptr;
  uint32_t all = 0;
  int turn = 0;
#pragma unroll 1
  for (uint32_t unit = uint32_t(block_index_x()); unit < r.all;) {
    const uint32_t each = uint32_t(fp8_each * block_threads()), chunks = row.vectors <= each ? 1 : (row.vectors + each - 1) / each;
    uint32_t raw = 0;
    const uint32_t most = row_most(job, row, chunks, v, &raw);
    all = larger_u32(all, most);
    const float scale = r.known ? known_scale : scale_row<Lanes>(job, r, row, most, turn);
    if (codes) row_codes(job, row, chunks, scale, v);
    const bool slow = codes && (raw > strange_limit(job) || (is_strict(job) && is_too_large(job.side[0], raw, scale)));
    if (slow || (codes && row.rest)) row_again(job_again(job), row, scale, slow);
    unit += uint32_t(grid_size_x()), turn ^= 1;
    if (unit < r.all) row = row_of(job, r, unit), load_row(job, row, 0, v);
  }
  return all;
}

template <int Lanes, class P> CQSA_DEVICE void fp8_row_block(const P& p) {
  const fp8_job& job = p.jobs[0];
  const fp8_rows r = rows_of(p, job);
  fp8_row row{};
  fp8_vectors v;
  clear_vectors(v);
  if (block_index_x() < r.all) row = row_of(job, r, uint32_t(block_index_x())), load_row(job, row, 0, v);
  const fp8_head head = head_of<false, 1>(p, job);
  barrier();
  uint32_t most = 0;
  if (head.go) {
    most = fp8_row_units<Lanes>(job, r, head.scale[0], row, v);
    publish<false, 1>(p, job, head);
  }
  end_block<Lanes, false>(p, job, head.go, most);
}

}  // namespace cqsa::gpu
