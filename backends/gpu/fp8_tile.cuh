// SPDX-License-Identifier: Apache-2.0
// FP8 in tiles of 128 x 128: codes that lie transposed, or both ways from one reading of x; scales of the tensor, or of blocks that a tile
// holds, 1 x 128, 128 x 1 and 128 x 128. A thread has eight columns of eight neighbouring rows in registers; transposed, its codes pass
// through shared memory.
#pragma once

#include "fp8_head.cuh"

namespace cqsa::gpu {

struct alignas(16) fp8_tile {
  word_pair codes[fp8_tile_size * fp8_tile_size / 8];  // of a column, then rows; in units of eight, swizzled
  uint32_t parts[8][fp8_tile_size];                    // amaxes of columns, of sixteen rows each; two of 16 bits a word
  float column_scale[fp8_tile_size], row_scale[fp8_tile_size];
};
static_assert(sizeof(fp8_tile) <= fp8_tile_bytes);
CQSA_DEVICE fp8_tile& tile() { return *reinterpret_cast<fp8_tile*>(shared_memory() + fp8_control_bytes); }

// What depends on it is not worth registers elsewhere in the loop over the tiles.
CQSA_DEVICE int hidden_thread() { return thread_index() + hidden_zero(); }

// How a side gets its scales.
enum class tile_scales { none, known, row, column, block };

// A tile by its row and column of tiles; what a thread has of it begins at row(), column() of x.
struct tile_place {
  int32_t tile_row, tile_column;
  CQSA_DEVICE int64_t row() const { return int64_t(tile_row) * fp8_tile_size + hidden_thread() / 16 * 8; }
  CQSA_DEVICE int64_t column() const { return int64_t(tile_column) * fp8_tile_size + hidden_thread() % 16 * 8; }
  CQSA_DEVICE bool is_whole(const fp8_head& head, const fp8_job& job) const { return row() + 8 <= head.rows && column() + 8 <= job.columns; }
  // Of eight, how many are there.
  CQSA_DEVICE int rows(const fp8_head& head) const { return int(clamp_i64(head.rows - row(), 0, 8)); }
  CQSA_DEVICE int columns(const fp8_job& job) const { return int(clamp_i64(job.columns - column(), 0, 8)); }
};

// Eight columns of eight rows, as they are stored: of f32 or of 16 bits.
template <bool Halves> struct tile_square {
  static constexpr int words = Halves ? 4 : 8;
  uint32_t w[8 * words];
};

template <class P> CQSA_DEVICE tile_scales scales_of(const P& p, const fp8_job& job, const fp8_side& side) {
  if (!side.codes.data) return tile_scales::none;
  if (is_known(p, job, side)) return tile_scales::known;
  return side.block[0] == 1 ? tile_scales::row : side.block[1] == 1 ? tile_scales::column : tile_scales::block;
}

// The first n of eight neighbours, the others 0, wherever they stand: each moves in from the end. Rare, so not a line more than it needs.
template <bool Halves> CQSA_DEVICE void gather_row(const char* from, int n, uint32_t* w) {
  constexpr int words = tile_square<Halves>::words;
#pragma unroll 1
  for (int j = 0; j < 8; ++j) {
    const uint32_t x = j >= n ? 0 : Halves ? load_u16(from + 2 * j) : load_u32(from + 4 * j);
#pragma unroll
    for (int k = 0; k < words - 1; ++k) w[k] = Halves ? w[k] >> 16 | w[k + 1] << 16 : w[k + 1];
    w[words - 1] = Halves ? w[words - 1] >> 16 | x << 16 : x;
  }
}

template <bool Halves> CQSA_DEVICE void gather_tile(const fp8_job& job, const fp8_head& head, const tile_place& at, tile_square<Halves>& x) {
  constexpr int bytes = Halves ? 2 : 4, words = tile_square<Halves>::words;
  const char* from = job.x.data + bytes * (at.row() * job.x.stride[1] + at.column());
  const int rows = at.rows(head), columns = at.columns(job);
#pragma unroll
  for (int n = 0; n < 8 * words; ++n) x.w[n] = 0;
#pragma unroll 1
  for (int i = 0; i < 8; ++i, from += bytes * job.x.stride[1]) {
#pragma unroll
    for (int n = 0; n < 7 * words; ++n) x.w[n] = x.w[n + words];
    gather_row<Halves>(from, i < rows ? columns : 0, x.w + 7 * words);
  }
}
template <bool Halves> CQSA_DEVICE void load_tile(const fp8_job& job, const fp8_head& head, const tile_place& at, tile_square<Halves>& x) {
  constexpr int bytes = Halves ? 2 : 4, words = tile_square<Halves>::words;
  const char* const from = job.x.data + bytes * (at.row() * job.x.stride[1] + at.column());
  const int64_t step = bytes * job.x.stride[1];
  if (job.x.aligned && at.is_whole(head, job)) {
#pragma unroll
    for (int n = 0; n < 8 * words; n += 4) {
      const loaded16 q = load_once(from + n / words * step + 4 * (n % words));
#pragma unroll
      for (int k = 0; k < 4; ++k) x.w[n + k] = q.x[k];
    }
    return;
  }
  gather_tile<Halves>(job_again(job), head, at, x);
}

CQSA_DEVICE void turn_four(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
  const uint32_t low = pick_bytes(a, b, 0x5140u), low2 = pick_bytes(c, d, 0x5140u), high = pick_bytes(a, b, 0x7362u), high2 = pick_bytes(c, d, 0x7362u);
  a = pick_bytes(low, low2, 0x5410u), b = pick_bytes(low, low2, 0x7632u), c = pick_bytes(high, high2, 0x5410u), d = pick_bytes(high, high2, 0x7632u);
}

// ---- scales of blocks ---------------------------------------------------------------------------------------------------------

// Maxima of eight rows and of those of 16 neighbouring lanes, two rows of 16 bits a word: half of the words go to a neighbour each time, so
// that in the end a lane has the maximum of one row, of number lane / 2 % 8.
template <int Lanes, int N> CQSA_DEVICE uint32_t most_of_rows(uint32_t (&m)[N]) {
  constexpr bool f32 = N == 8;
#pragma unroll
  for (int n = N / 2, mask = 8; n > 0; n /= 2, mask /= 2) {
    const bool high = thread_index() & mask;
#pragma unroll
    for (int i = 0; i < n; ++i) m[i] = most_of_two(high ? m[i + n] : m[i], shuffle_xor<Lanes>(high ? m[i] : m[i + n], mask), f32);
  }
#pragma unroll
  for (int mask = f32 ? 1 : 2; mask > 0; mask /= 2) m[0] = most_of_two(m[0], shuffle_xor<Lanes>(m[0], mask), f32);
  return m[0];
}

// Each row of the tile is in 16 neighbouring threads.
template <int Lanes, bool Halves> CQSA_DEVICE void scale_rows(const fp8_job& job, const fp8_head& head, const fp8_side& side, const tile_place& at, const tile_square<Halves>& x) {
  constexpr int words = tile_square<Halves>::words;
  const int thread = hidden_thread(), row = thread / 2 % 8;
  uint32_t m[words];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t most = most_of_words(x.w + i * words, words, !Halves), one = Halves ? max_u16x2(most, most >> 16) : most;
    if (!Halves) m[i % words] = one;
    else m[i / 2] = i & 1 ? pick_bytes(m[i / 2], one, 0x5410u) : one;
  }
  uint32_t bits = most_of_rows<Lanes>(m);
  if (Halves) bits = most_bits(bits >> 16 * (row & 1) & 0xffffu, job.x.kind);
  const fp8::scale_pair pair = fp8::scale_of(plain_amax(bits), rule_of(job, side));
  if (thread & 1) return;
  tile().row_scale[thread / 16 * 8 + row] = pair.scale;
  if (row >= at.rows(head)) return;
  store_scales(side, at.row() + row, at.tile_column, pair.scale, pair.scale_inv);
}

// Barriers inside.
template <int Lanes, bool Halves> CQSA_DEVICE void scale_columns(const fp8_job& job, const fp8_side& side, const tile_place& at, const tile_square<Halves>& x) {
  constexpr int words = tile_square<Halves>::words;
  const int mine = hidden_thread();
  uint32_t most[words];
#pragma unroll
  for (int n = 0; n < words; ++n) {
    most[n] = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) most[n] = most_of_two(most[n], x.w[i * words + n] & (Halves ? 0x7fff7fffu : 0x7fffffffu), !Halves);
    most[n] = most_of_two(most[n], shuffle_xor<Lanes>(most[n], 16), !Halves);
  }
  if (!(mine & 16))
#pragma unroll
    for (int n = 0; n < words; n += 4) *reinterpret_cast<word4x*>(&tile().parts[mine / 32][mine % 16 * words + n]) = {{most[n], most[n + 1], most[n + 2], most[n + 3]}};
  barrier();
  if (mine < fp8_tile_size) {
    uint32_t all = 0;
#pragma unroll
    for (int n = 0; n < 8; ++n) all = most_of_two(all, tile().parts[n][Halves ? mine / 2 : mine], !Halves);
    if (Halves) all = most_bits(all >> 16 * (mine & 1) & 0xffffu, job.x.kind);
    const fp8::scale_pair pair = fp8::scale_of(plain_amax(all), rule_of(job, side));
    tile().column_scale[mine] = pair.scale;
    const int64_t column = int64_t(at.tile_column) * fp8_tile_size + mine;
    if (column < job.columns) store_scales(side, at.tile_row, column, pair.scale, pair.scale_inv);
  }
  barrier();
}

CQSA_DEVICE float scale_whole(const fp8_job& job, const fp8_side& side, const tile_place& at, uint32_t most) {
  const fp8::scale_pair pair = fp8::scale_of(plain_amax(most), rule_of(job, side));
  if (thread_index() == 0) store_scales(side, at.tile_row, at.tile_column, pair.scale, pair.scale_inv);
  return pair.scale;
}

// What a launch does with its tiles, and one thread's part of the one at hand.
struct tile_job {
  tile_scales how[2];
  float scale[2];
  bool any_block;
};
CQSA_DEVICE const float* row_scales() { return tile().row_scale + hidden_thread() / 16 * 8; }
CQSA_DEVICE const float* column_scales() { return tile().column_scale + hidden_thread() % 16 * 8; }

template <int Lanes, bool Halves>
CQSA_DEVICE void find_scales(const fp8_job& job, const fp8_head& head, tile_job& g, const tile_place& at, const tile_square<Halves>& x, uint32_t most) {
  if (g.any_block) most = most_of_block<Lanes>(most);
#pragma unroll 1
  for (int s = 0; s < 2 && g.any_block; ++s) {
    if ((s ? g.how[1] : g.how[0]) != tile_scales::block) continue;
    const float scale = scale_whole(job, job.side[s], at, most);
    if (s) g.scale[1] = scale;
    else g.scale[0] = scale;
  }
  if (g.how[0] == tile_scales::row) scale_rows<Lanes, Halves>(job, head, job.side[0], at, x);
  if (g.how[1] == tile_scales::column) scale_columns<Lanes, Halves>(job, job.side[1], at, x);
  lanes_barrier<Lanes>();  // scales of rows: those who need them are in one team
}

// ---- the slow way -------------------------------------------------------------------------------------------------------------

// Where a code stands in shared memory until it is stored: row i, column j of this thread's. Eight rows of a column are a unit. Unit u of a
// column of group g is at u ^ g, so that neither 16 columns apart by 8 nor the rows of one column meet in a bank.
CQSA_DEVICE int turned_unit(int thread, int j) {
  const int group = thread % 16, unit = thread / 16;
  return (group * 8 + j) * 16 + (unit ^ (CQSA_MUTANT(35) ? group & 7 : group));
}

// This thread's elements again, one at a time, over the codes that the fast way has written.
CQSA_DEVICE void slow_square(const fp8_job& job, const fp8_head& head, const tile_place& at, const tile_job& g) {
  const int rows = at.rows(head), columns = at.columns(job);
#pragma unroll 1
  for (int s = 0; s < 2; ++s) {
    const fp8_side& side = job.side[s];
    const tile_scales how = s ? g.how[1] : g.how[0];
    fp8_counts counts{};
    if (how == tile_scales::none) continue;
    const fp8_encoder encoder{side.format, job.saturate, 0, 0, 0};
#pragma unroll 1
    for (int n = 0; n < rows * 8; ++n) {
      const int i = n / 8, j = n % 8;
      if (j >= columns) continue;
      const uint32_t x = load_number(job.x.data, job.x.kind, (at.row() + i) * job.x.stride[1] + at.column() + j);
      const float by = how == tile_scales::row ? row_scales()[i] : how == tile_scales::column ? column_scales()[j] : s ? g.scale[1] : g.scale[0];
      char* const to = s ? reinterpret_cast<char*>(&tile().codes[turned_unit(thread_index(), j)]) + i : side.codes.data + (at.row() + i) * side.codes.stride[1] + at.column() + j;
      *to = char(encode_number(x, by, encoder, 0, &counts));
    }
    if (s == job.first_side) take_counts(counts);
  }
}

// Whether a magnitude of these rows and columns is too large for codes, or not finite.
CQSA_DEVICE bool is_slow(const fp8_job& job, const tile_job& g, uint32_t most) {
  const bool strict = job.counters || !job.saturate;
  if (most > (job.ignore_nan || strict ? inf_bits - 1 : inf_bits)) return true;
  if (!strict) return false;
#pragma unroll 1
  for (int s = 0; s < 2; ++s) {
    const tile_scales how = s ? g.how[1] : g.how[0];
    float by = s ? g.scale[1] : g.scale[0];
    if (how == tile_scales::none) continue;
    const bool rows = how == tile_scales::row;
#pragma unroll 1
    for (int i = 0; i < 8 && (rows || how == tile_scales::column); ++i) by = max_f32(i ? by : 0.0f, rows ? row_scales()[i] : column_scales()[i]);
    if (product_f32(float_of(most), by) > fp8::largest_of(job.side[s].format) * 1.0078125f) return true;
  }
  return false;
}

// ---- codes ------------------------------------------------------------------------------------------------------------------

struct square_codes {
  word_pair row[8];
};
// With a scale for each row, or for each column.
template <int Kind, bool Wide, bool Rows> CQSA_DEVICE void encode_square_as(const uint32_t* w, const float (&scale)[8], const fp8_fast& f, bool bf16, square_codes& c) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if constexpr (Rows) c.row[i] = encode8<Kind, Wide>(w + i * (Kind == kind_f32 ? 8 : 4), scale[i], f, bf16);
    else c.row[i] = encode8<Kind, Wide>(w + i * (Kind == kind_f32 ? 8 : 4), scale, f, bf16);
  }
}
template <int Kind, bool Rows> CQSA_DEVICE void encode_square_kind(const uint32_t* w, const float (&scale)[8], const fp8_fast& f, bool bf16, square_codes& c) {
  if (has_fp8 && f.wide) encode_square_as<Kind, true, Rows>(w, scale, f, bf16, c);
  else encode_square_as<Kind, false, Rows>(w, scale, f, bf16, c);
}
template <bool Halves, bool Rows> CQSA_DEVICE void encode_square(const tile_square<Halves>& x, int kind, bool each, const float* scales, float scale, int32_t format, square_codes& c) {
  float by[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) by[i] = each ? scales[i] : scale;
  const bool bf16 = kind == kind_bf16;
  if constexpr (!Halves) encode_square_kind<kind_f32, Rows>(x.w, by, fast_of(format), bf16, c);
  else if constexpr (!has_fp8) encode_square_kind<kind_half, Rows>(x.w, by, fast_of(format), bf16, c);
  else if (bf16) encode_square_kind<kind_bf16, Rows>(x.w, by, fast_of(format), bf16, c);
  else encode_square_kind<kind_f16, Rows>(x.w, by, fast_of(format), bf16, c);
}

// The first n of some bytes, which move on to the front of the words.
template <int N> CQSA_DEVICE void store_bytes(char* to, uint32_t (&w)[N], int n) {
#pragma unroll 1
  for (int i = 0; i < n; ++i) {
    to[i] = char(w[0]);
#pragma unroll
    for (int k = 0; k < N; ++k) w[k] = w[k] >> 8 | (k + 1 < N ? w[k + 1] << 24 : 0);
  }
}
CQSA_DEVICE void scatter_rows(const fp8_job& job, const fp8_head& head, const tile_place& at, square_codes& c) {
  const fp8_side& side = job.side[0];
  const int rows = at.rows(head), columns = at.columns(job);
  char* to = side.codes.data + at.row() * side.codes.stride[1] + at.column();
#pragma unroll 1
  for (int i = 0; i < rows; ++i, to += side.codes.stride[1]) {
    uint32_t w[2] = {c.row[0].x[0], c.row[0].x[1]};
    store_bytes(to, w, columns);
#pragma unroll
    for (int k = 0; k < 7; ++k) c.row[k] = c.row[k + 1];
  }
}
CQSA_DEVICE void store_rows(const fp8_job& job, const fp8_head& head, const tile_place& at, square_codes& c) {
  const fp8_side& side = job.side[0];
  char* const to = side.codes.data + at.row() * side.codes.stride[1] + at.column();
  if (side.codes.aligned && at.is_whole(head, job)) {
#pragma unroll
    for (int i = 0; i < 8; ++i) store_once8(to + i * side.codes.stride[1], c.row[i].x[0], c.row[i].x[1]);
    return;
  }
  scatter_rows(job_again(job), head, at, c);
}

// Through shared memory: a column's rows stand together there.
CQSA_DEVICE void put_turned(square_codes& c, word_pair* to) {
  const int thread = hidden_thread();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    turn_four(c.row[0].x[h], c.row[1].x[h], c.row[2].x[h], c.row[3].x[h]);
    turn_four(c.row[4].x[h], c.row[5].x[h], c.row[6].x[h], c.row[7].x[h]);
#pragma unroll
    for (int j = 0; j < 4; ++j) to[turned_unit(thread, 4 * h + j)] = {{c.row[j].x[h], c.row[4 + j].x[h]}};
  }
}

// Sixteen rows of a column out of shared memory, number n of those of the tile.
CQSA_DEVICE word4x take_turned(const word_pair* from, int n) {
  const int column = n / 8, chunk = n % 8, group = column / 8;
  const word4x both = *reinterpret_cast<const word4x*>(&from[column * 16 + ((2 * chunk ^ group) & ~1)]);
  const bool swap = group & 1;
  return {{swap ? both.x[2] : both.x[0], swap ? both.x[3] : both.x[1], swap ? both.x[0] : both.x[2], swap ? both.x[1] : both.x[3]}};
}
// All columns of a tile that begins at (row0, column0), `step` bytes apart at `data`.
CQSA_DEVICE void store_turned(char* data, int64_t step, bool aligned, int64_t row0, int64_t column0, int64_t rows, int64_t columns, const word_pair* from) {
  const int thread = hidden_thread();
  char* to = data + column0 * step + row0;
  if (aligned && row0 + fp8_tile_size <= rows && column0 + fp8_tile_size <= columns) {
    to += thread / 8 * step + thread % 8 * 16;
#pragma unroll
    for (int k = 0; k < 4; ++k, to += 32 * step) *reinterpret_cast<word4x*>(to) = take_turned(from, thread + k * 256);
    return;
  }
#pragma unroll 1
  for (int n = thread; n < fp8_tile_size * 8; n += block_threads()) {
    word4x out = take_turned(from, n);
    const int64_t count = clamp_i64(rows - row0 - n % 8 * 16, 0, 16);
    if (column0 + n / 8 >= columns) return;
    if (count == 16 && aligned) *reinterpret_cast<word4x*>(to + n / 8 * step + n % 8 * 16) = out;
    else store_bytes(to + n / 8 * step + n % 8 * 16, out.x, int(count));
  }
}

CQSA_DEVICE uint32_t tiles_along(int64_t n) { return uint32_t((n + fp8_tile_size - 1) / fp8_tile_size); }
CQSA_DEVICE tile_place place_of_tile(const fp8_job& job, uint32_t unit) {
  constexpr uint32_t band = 8;  // tiles that are under way together are about square: long pieces of rows both ways
  const uint32_t high = tiles_along(job.rows), wide = tiles_along(job.columns);
  if (job.backward) unit = high * wide - 1 - unit;
  const uint32_t first = unit / (band * wide) * band, tall = high - first < band ? high - first : band, rest = unit - first * wide;
  const uint32_t column = rest / tall;
  return {int32_t(first + rest - column * tall), int32_t(column)};
}

// Codes that are in shared memory when all have come here.
CQSA_DEVICE void end_tile(const fp8_job& job, const fp8_head& head, const tile_place& at) {
  const fp8_side& side = job.side[1];
  barrier();
  store_turned(side.codes.data, side.codes.stride[2], side.codes.aligned != 0, int64_t(at.tile_row) * fp8_tile_size, int64_t(at.tile_column) * fp8_tile_size, head.rows, job.columns, tile().codes);
}

// Codes of a tile, rows stored; those to be turned are left in c.
template <bool Halves> CQSA_DEVICE void tile_codes(const fp8_job& job, const fp8_head& head, const tile_job& g, const tile_place& at, const tile_square<Halves>& x, square_codes& c) {
  const fp8_side &row = job.side[0], &turned = job.side[1];
  if (g.how[0] != tile_scales::none) {
    encode_square<Halves, true>(x, job.x.kind, g.how[0] == tile_scales::row, row_scales(), g.scale[0], row.format, c);
    store_rows(job, head, at, c);
  }
  if (g.how[1] == tile_scales::none) return;
  encode_square<Halves, false>(x, job.x.kind, g.how[1] == tile_scales::column, column_scales(), g.scale[1], turned.format, c);
}

template <bool Halves> CQSA_DEVICE uint32_t square_most(const fp8_job& job, tile_square<Halves>& x, uint32_t* raw) {
  constexpr int words = 8 * tile_square<Halves>::words;
  uint32_t most = most_of_words(x.w, words, !Halves);
  *raw = most_bits(most, job.x.kind);
  if (job.ignore_nan && *raw >= inf_bits) drop_strange(x.w, words, job.x.kind), most = most_of_words(x.w, words, !Halves);
  return most_bits(most, job.x.kind);
}

// The numbers of a tile are on their way while the codes of the tile before go from shared memory to where they belong.
template <int Lanes, bool Halves> CQSA_DEVICE uint32_t tile_loop(const fp8_job& job, const fp8_head& head, tile_job& g) {
  const uint32_t tiles = tiles_along(job.rows) * tiles_along(job.columns);
  const bool turned = g.how[1] != tile_scales::none;
  uint32_t unit = uint32_t(block_index_x()), all = 0;
  tile_place at{};
#pragma unroll 1
  for (bool begun = false;; begun = true, unit += uint32_t(grid_size_x())) {
    tile_square<Halves> x;
    const tile_place before = at;
    if (unit < tiles) at = place_of_tile(job_again(job), unit), load_tile<Halves>(job, head, at, x);
    if (turned && begun) end_tile(job, head, before);
    if (unit >= tiles) return all;
    uint32_t raw;
    const uint32_t most = square_most<Halves>(job, x, &raw);
    all = larger_u32(all, most);
    find_scales<Lanes, Halves>(job, head, g, at, x, most);
    square_codes c;
    tile_codes<Halves>(job, head, g, at, x, c);
    if (turned) {
      barrier();  // all have stored the tile before
      put_turned(c, tile().codes);
    }
    if (is_slow(job, g, raw)) slow_square(job_again(job), head, at, g);
  }
}

template <int Lanes, bool Halves, class P> CQSA_DEVICE void fp8_tile_block(const P& p) {
  const fp8_job& job = p.jobs[0];
  const fp8_head head = head_of(p, job);
  barrier();
  uint32_t most = 0;
  if (head.go) {
    tile_job g{{scales_of(p, job, job.side[0]), scales_of(p, job, job.side[1])}, {head.scale[0], head.scale[1]}, false};
    g.any_block = g.how[0] == tile_scales::block || g.how[1] == tile_scales::block;
    most = tile_loop<Lanes, Halves>(job, head, g);
    publish(p, job, head);
  }
  end_block<Lanes, false>(p, job, head.go, most);
}

}  // namespace cqsa::gpu
