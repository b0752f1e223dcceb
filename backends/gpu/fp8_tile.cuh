// SPDX-License-Identifier: Apache-2.0
// FP8 in tiles of 128 x 128: codes that lie transposed, or both ways from one reading of x; scales of the tensor, or of blocks that a tile
// holds, 1 x 128, 128 x 1 and 128 x 128. A thread has eight columns of eight neighbouring rows in registers; transposed, its codes pass
// through shared memory.
#pragma once

#include "fp8_head.cuh"

namespace cqsa::gpu {

struct alignas(16) fp8_tile {
  word_pair codes[fp8_tile_size * fp8_tile_size / 8];  // of a column, then rows; in units of eight, swizzled
  uint32_t parts[16][fp8_tile_size];                   // amaxes of columns, of eight rows each
  float column_scale[fp8_tile_size], row_scale[fp8_tile_size];
  uint32_t slow;
};
static_assert(sizeof(fp8_tile) <= fp8_tile_bytes);

// How a side gets its scales.
enum class tile_scales { none, known, row, column, block };

struct tile_place {
  int64_t row, column;  // of x, this thread's first
  int64_t tile_row, tile_column;
  int rows, columns;    // that are there, 0..8
};

CQSA_DEVICE tile_scales scales_of(const fp8_params& p, const fp8_job& job, const fp8_side& side) {
  if (!side.codes.data) return tile_scales::none;
  if (is_known(p, job, side)) return tile_scales::known;
  return side.block[0] == 1 ? tile_scales::row : side.block[1] == 1 ? tile_scales::column : tile_scales::block;
}

template <int Kind> CQSA_DEVICE void load_tile(const fp8_job& job, const tile_place& at, raw8<Kind> (&x)[8]) {
  constexpr int bytes = Kind == kind_f32 ? 4 : 2;
  const char* const from = job.x.data + bytes * (at.row * job.x.stride[1] + at.column);
  const int64_t step = bytes * job.x.stride[1];
  if (job.x.aligned && at.rows == 8 && at.columns == 8) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = load_raw8<Kind>(from + i * step, true);
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = zero_raw8<Kind>();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (i >= at.rows || j >= at.columns) continue;
      if constexpr (Kind == kind_f32) x[i].w[j] = load_u32(from + i * step + 4 * j);
      else x[i].w[j / 2] |= load_u16(from + i * step + 2 * j) << 16 * (j & 1);
    }
  }
}

// NaN and infinities as 0: their codes are made the slow way.
template <int Kind> CQSA_DEVICE void drop_strange(raw8<Kind>& x) {
#pragma unroll
  for (uint32_t& w : x.w) {
    if (Kind == kind_f32) {
      if ((w & 0x7fffffffu) >= inf_bits) w = 0;
      continue;
    }
    constexpr uint32_t inf = Kind == kind_bf16 ? 0x7f80u : 0x7c00u;
    if ((w & 0x7fffu) >= inf) w &= 0xffff0000u;
    if ((w >> 16 & 0x7fffu) >= inf) w &= 0xffffu;
  }
}

template <int Kind> CQSA_DEVICE codes8 encode8(const raw8<Kind>& x, float scale, bool wide) {
  return wide ? encode8<Kind, true>(x, scale) : encode8<Kind, false>(x, scale);
}
template <int Kind> CQSA_DEVICE codes8 encode8(const raw8<Kind>& x, const float (&scale)[8], bool wide) {
  float y[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = product_f32(number8<Kind>(x, i), scale[i]);
  if (wide) return {{encode_four<true>(y[0], y[1], y[2], y[3]), encode_four<true>(y[4], y[5], y[6], y[7])}};
  return {{encode_four<false>(y[0], y[1], y[2], y[3]), encode_four<false>(y[4], y[5], y[6], y[7])}};
}

CQSA_DEVICE void turn_four(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
  const uint32_t low = pick_bytes(a, b, 0x5140u), low2 = pick_bytes(c, d, 0x5140u), high = pick_bytes(a, b, 0x7362u), high2 = pick_bytes(c, d, 0x7362u);
  a = pick_bytes(low, low2, 0x5410u), b = pick_bytes(low, low2, 0x7632u), c = pick_bytes(high, high2, 0x5410u), d = pick_bytes(high, high2, 0x7632u);
}

// ---- scales of blocks ---------------------------------------------------------------------------------------------------------

// Each row of the tile is in 16 neighbouring threads.
template <int Lanes, int Kind> CQSA_DEVICE void scale_rows(const fp8_job& job, const fp8_side& side, const tile_place& at, const raw8<Kind> (&x)[8], fp8_tile& t) {
  const int first = thread_index() / 16 * 8;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t most = most_of_lanes<Lanes>(most_bits<Kind>(most_of<Kind>(x[i])), 16);
    const fp8::scale_pair pair = fp8::scale_of(plain_amax(most), rule_of(job, side));
    if (thread_index() % 16 != 0) continue;
    t.row_scale[first + i] = pair.scale;
    if (i >= at.rows || at.columns < 1) continue;
    store_scale(side.scale, at.row + i, at.tile_column, side.columns, pair.scale);
    store_scale(side.scale_inv, at.row + i, at.tile_column, side.columns, pair.scale_inv);
  }
}

// Barriers inside.
template <int Kind> CQSA_DEVICE void scale_columns(const fp8_job& job, const fp8_side& side, const tile_place& at, const raw8<Kind> (&x)[8], fp8_tile& t) {
  const int first = thread_index() % 16 * 8, mine = thread_index();
  raw8<Kind> most = zero_raw8<Kind>();
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int n = 0; n < int(sizeof most.w / 4); ++n)
      most.w[n] = Kind == kind_f32 ? larger_u32(most.w[n], x[i].w[n] & 0x7fffffffu) : max_u16x2(most.w[n], x[i].w[n] & 0x7fff7fffu);
#pragma unroll
  for (int j = 0; j < 8; ++j)
    t.parts[thread_index() / 16][first + j] = Kind == kind_f16 ? f16_to_bits(most.w[j / 2] >> 16 * (j & 1) & 0xffffu) : bits_of(number8<Kind>(most, j));
  barrier();
  if (mine < fp8_tile_size) {
    uint32_t all = 0;
    for (int n = 0; n < 16; ++n) all = larger_u32(all, t.parts[n][mine]);
    const fp8::scale_pair pair = fp8::scale_of(plain_amax(all), rule_of(job, side));
    t.column_scale[mine] = pair.scale;
    const int64_t column = at.tile_column * fp8_tile_size + mine;
    if (column < job.columns) store_scale(side.scale, at.tile_row, column, side.columns, pair.scale), store_scale(side.scale_inv, at.tile_row, column, side.columns, pair.scale_inv);
  }
  barrier();
}

template <int Lanes> CQSA_DEVICE float scale_whole(const fp8_job& job, const fp8_side& side, const tile_place& at, uint32_t most) {
  const fp8::scale_pair pair = fp8::scale_of(plain_amax(most_of_block<Lanes>(most)), rule_of(job, side));
  if (thread_index() == 0) store_scale(side.scale, at.tile_row, at.tile_column, side.columns, pair.scale), store_scale(side.scale_inv, at.tile_row, at.tile_column, side.columns, pair.scale_inv);
  return pair.scale;
}

// ---- the slow way -------------------------------------------------------------------------------------------------------------

// This thread's elements again, one at a time, over the codes that the fast way has written.
CQSA_DEVICE void slow_square(const fp8_job& job, const tile_place& at, const tile_scales (&how)[2], const float (&scale)[2], const fp8_tile& t) {
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const fp8_side& side = job.side[s];
    fp8_counts counts{};
    if (how[s] == tile_scales::none) continue;
    const fp8_encoder encoder{side.format, job.saturate, 0, 0, 0};
#pragma unroll 1
    for (int n = 0; n < at.rows * 8; ++n) {
      const int i = n / 8, j = n % 8;
      if (j >= at.columns) continue;
      const uint32_t x = load_number(job.x.data, job.x.kind, (at.row + i) * job.x.stride[1] + at.column + j);
      const float by = how[s] == tile_scales::row ? t.row_scale[thread_index() / 16 * 8 + i] : how[s] == tile_scales::column ? t.column_scale[thread_index() % 16 * 8 + j] : scale[s];
      side.codes.data[(at.row + i) * side.codes.stride[1] + (at.column + j) * side.codes.stride[2]] = char(encode_number(x, by, encoder, 0, &counts));
    }
    if (s == job.first_side) take_counts(counts);
  }
}

// Whether a magnitude of these rows and columns is too large for codes, or not finite.
CQSA_DEVICE bool is_slow(const fp8_job& job, const tile_scales (&how)[2], const float (&scale)[2], uint32_t most, const fp8_tile& t) {
  const bool strict = job.counters || !job.saturate;
  if (most > (job.ignore_nan || strict ? inf_bits - 1 : inf_bits)) return true;
  if (!strict) return false;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    float by = scale[s];
    if (how[s] == tile_scales::none) continue;
    for (int i = 0; i < 8 && (how[s] == tile_scales::row || how[s] == tile_scales::column); ++i)
      by = max_f32(i ? by : 0.0f, how[s] == tile_scales::row ? t.row_scale[thread_index() / 16 * 8 + i] : t.column_scale[thread_index() % 16 * 8 + i]);
    if (product_f32(float_of(most), by) > fp8::largest_of(job.side[s].format)) return true;
  }
  return false;
}

// ---- codes ------------------------------------------------------------------------------------------------------------------

// Through shared memory: a column's rows stand together there, eight of them a unit. Unit u of a column of group g is at u ^ g, so that
// neither 16 columns apart by 8 nor the rows of one column meet in a bank.
CQSA_DEVICE void put_turned(codes8 (&c)[8], fp8_tile& t) {
  const int group = thread_index() % 16, unit = thread_index() / 16;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    turn_four(c[0].x[h], c[1].x[h], c[2].x[h], c[3].x[h]);
    turn_four(c[4].x[h], c[5].x[h], c[6].x[h], c[7].x[h]);
#pragma unroll
    for (int j = 0; j < 4; ++j) t.codes[(group * 8 + 4 * h + j) * 16 + (unit ^ (CQSA_MUTANT(35) ? group & 7 : group))] = {{c[j].x[h], c[4 + j].x[h]}};
  }
}

CQSA_DEVICE void store_turned(const fp8_side& side, int64_t row0, int64_t column0, int64_t rows, int64_t columns, const fp8_tile& t) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int n = thread_index() + k * 256, column = n / 8, chunk = n % 8, group = column / 8;
    const int64_t row = row0 + chunk * 16, count = rows - row;
    if (column0 + column >= columns || count <= 0) continue;
    const word4x both = *reinterpret_cast<const word4x*>(&t.codes[column * 16 + ((2 * chunk ^ group) & ~1)]);
    const bool swap = group & 1;
    const word4x out = {{swap ? both.x[2] : both.x[0], swap ? both.x[3] : both.x[1], swap ? both.x[0] : both.x[2], swap ? both.x[1] : both.x[3]}};
    char* const to = side.codes.data + (column0 + column) * side.codes.stride[2] + row;
    if (count >= 16 && side.codes.aligned) {
      *reinterpret_cast<word4x*>(to) = out;
      continue;
    }
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (i < count) to[i] = char(out.x[i / 4] >> 8 * (i & 3));
  }
}

CQSA_DEVICE tile_place place_of_tile(const fp8_job& job, int64_t rows, int64_t unit) {
  constexpr int64_t band = 8;  // tiles that are under way together are about square: long pieces of rows both ways
  const int64_t high = (rows + fp8_tile_size - 1) / fp8_tile_size, wide = (job.columns + fp8_tile_size - 1) / fp8_tile_size;
  const int64_t first = unit / (band * wide) * band, tall = min_i64(band, high - first), rest = unit - first * wide;
  tile_place at;
  at.tile_column = rest / tall, at.tile_row = first + rest - at.tile_column * tall;
  at.row = at.tile_row * fp8_tile_size + thread_index() / 16 * 8, at.column = at.tile_column * fp8_tile_size + thread_index() % 16 * 8;
  at.rows = int(clamp_i64(rows - at.row, 0, 8)), at.columns = int(clamp_i64(job.columns - at.column, 0, 8));
  return at;
}

template <int Lanes, int Kind> CQSA_DEVICE uint32_t tile_codes(const fp8_job& job, const fp8_head& head, const tile_scales (&how)[2], const tile_place& at) {
  fp8_tile& t = *reinterpret_cast<fp8_tile*>(shared_memory() + fp8_control_bytes);
  const bool wide[2] = {job.side[0].format == CQSA_DTYPE_E5M2, job.side[1].format == CQSA_DTYPE_E5M2};
  raw8<Kind> x[8];
  load_tile<Kind>(job, at, x);
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) most = most_of_two<Kind>(most, most_of<Kind>(x[i]));
  const uint32_t raw = most_bits<Kind>(most);
  most = raw;
  if (job.ignore_nan && raw >= inf_bits) {
    most = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) drop_strange<Kind>(x[i]), most = larger_u32(most, most_bits<Kind>(most_of<Kind>(x[i])));
  }
  float scale[2] = {head.scale[0], head.scale[1]};
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    if (how[s] == tile_scales::row) scale_rows<Lanes, Kind>(job, job.side[s], at, x, t);
    else if (how[s] == tile_scales::column) scale_columns<Kind>(job, job.side[s], at, x, t);
    else if (how[s] == tile_scales::block) scale[s] = scale_whole<Lanes>(job, job.side[s], at, most);
  }
  lanes_barrier<Lanes>();  // scales of rows: those who need them are in one team
  const bool slow = is_slow(job, how, scale, raw, t);
  if (slow) t.slow = 1;
  codes8 codes[8];
  if (how[0] != tile_scales::none) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      codes[i] = encode8<Kind>(x[i], how[0] == tile_scales::row ? t.row_scale[thread_index() / 16 * 8 + i] : scale[0], wide[0]);
      if (i < at.rows && at.columns > 0)
        store_codes(job.side[0].codes.data + (at.row + i) * job.side[0].codes.stride[1] + at.column, codes[i], at.columns, job.side[0].codes.aligned != 0);
    }
  }
  if (how[1] != tile_scales::none) {
    const bool same = how[0] == tile_scales::known && how[1] == tile_scales::known && wide[0] == wide[1] && scale[0] == scale[1];
    if (how[1] == tile_scales::column) {
      float by[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) by[j] = t.column_scale[thread_index() % 16 * 8 + j];
#pragma unroll
      for (int i = 0; i < 8; ++i) codes[i] = encode8<Kind>(x[i], by, wide[1]);
    } else if (!same) {
#pragma unroll
      for (int i = 0; i < 8; ++i) codes[i] = encode8<Kind>(x[i], scale[1], wide[1]);
    }
    put_turned(codes, t);
  }
  barrier();
  if (how[1] != tile_scales::none)
    store_turned(job.side[1], at.tile_row * fp8_tile_size, at.tile_column * fp8_tile_size, head.rows, job.columns, t);
  const bool any = t.slow != 0;
  barrier();
  if (any) {
    if (slow) slow_square(job, at, how, scale, t);
    barrier();
    if (thread_index() == 0) t.slow = 0;
    barrier();
  }
  return most;
}

template <int Lanes, bool Halves> CQSA_DEVICE void fp8_tile_block(const fp8_params& p) {
  const fp8_job& job = job_of<false>(p);
  const fp8_head head = head_of(p, job);
  uint32_t most = 0;
  if (head.go) {
    fp8_tile& t = *reinterpret_cast<fp8_tile*>(shared_memory() + fp8_control_bytes);
    if (thread_index() == 0) t.slow = 0;
    barrier();
    const tile_scales how[2] = {scales_of(p, job, job.side[0]), scales_of(p, job, job.side[1])};
    const int64_t tiles = ((head.rows + fp8_tile_size - 1) / fp8_tile_size) * ((job.columns + fp8_tile_size - 1) / fp8_tile_size);
#pragma unroll 1
    for (int64_t unit = block_index_x(); unit < tiles; unit += grid_size_x()) {
      const tile_place at = place_of_tile(job, head.rows, job.backward ? tiles - 1 - unit : unit);
      if constexpr (!Halves) most = larger_u32(most, tile_codes<Lanes, kind_f32>(job, head, how, at));
      else if (job.x.kind == kind_bf16) most = larger_u32(most, tile_codes<Lanes, kind_bf16>(job, head, how, at));
      else most = larger_u32(most, tile_codes<Lanes, kind_f16>(job, head, how, at));
    }
    publish(p, job, head);
  }
  end_block<Lanes, false>(p, job, head.go, most);
}

}  // namespace cqsa::gpu
