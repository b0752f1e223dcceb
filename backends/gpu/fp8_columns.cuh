// SPDX-License-Identifier: Apache-2.0
// FP8, row-major, with a scale of this launch for each column, or for each column of a block of rows: a thread block has a strip of columns, 128
// bytes of each row, and reads it twice, the second time from its end, which the cache may still have.
#pragma once

#include "fp8_vector.cuh"

namespace cqsa::gpu {

constexpr int columns_each = 4;   // rows of a thread that are on their way
constexpr int columns_lanes = 8;  // neighbours that have a row

struct alignas(16) fp8_columns {
  word4x parts[32][columns_lanes];  // of each team of lanes: maxima of a vector, two of 16 bits a word
  float scale[columns_lanes * 8];
};
static_assert(sizeof(fp8_columns) <= fp8_columns_bytes);
CQSA_DEVICE fp8_columns& columns() { return *reinterpret_cast<fp8_columns*>(shared_memory() + fp8_control_bytes); }

// A strip: rows begin to end, this thread's vector of each of its rows.
struct fp8_strip {
  uint32_t begin, end;
  int64_t column;
  bool there;
};
CQSA_DEVICE fp8_strip strip_of(const fp8_job& job, uint32_t unit) {
  const fp8_side& side = job.side[0];
  const uint32_t numbers = uint32_t(numbers_of(job.x.kind)), strips = (uint32_t(job.columns) + columns_lanes * numbers - 1) / (columns_lanes * numbers), r = unit / strips;
  fp8_strip s;
  s.column = int64_t(unit - r * strips) * columns_lanes * numbers + thread_index() % columns_lanes * numbers;
  s.begin = r * uint32_t(side.block[0]), s.end = uint32_t(min_i64(job.rows, s.begin + side.block[0]));
  s.there = s.column < job.columns;
  return s;
}

// Rows first, first + step, .. of a strip; one that is not there is the last.
CQSA_DEVICE void load_rows(const fp8_job& job, const fp8_strip& s, uint32_t first, uint32_t step, loaded16 (&x)[columns_each]) {
  const int bytes = 16 / numbers_of(job.x.kind);
  const char* const from = job.x.data + s.column * bytes;
#pragma unroll
  for (uint32_t u = 0; u < uint32_t(columns_each); ++u) {
    x[u] = {{0, 0, 0, 0}};
    const uint32_t row = first + u * step < s.end ? first + u * step : s.end - 1;
    if (s.there) x[u] = load_once(from + row * (job.x.stride[1] * bytes));
  }
}

// The maxima of this thread's columns.
CQSA_DEVICE void columns_most(const fp8_job& job, const fp8_strip& s, uint32_t (&most)[4]) {
  const uint32_t step = uint32_t(block_threads() / columns_lanes);
  const bool f32 = job.x.kind == kind_f32;
#pragma unroll 1
  for (uint32_t row = s.begin + uint32_t(thread_index() / columns_lanes); row < s.end; row += columns_each * step) {
    loaded16 x[columns_each];
    load_rows(job, s, row, step, x);
    if (job.ignore_nan)
#pragma unroll
      for (int u = 0; u < columns_each; ++u) drop_strange(x[u].x, 4, job.x.kind);
#pragma unroll
    for (int u = 0; u < columns_each; ++u)
#pragma unroll
      for (int n = 0; n < 4; ++n) most[n] = most_of_two(most[n], x[u].x[n] & (f32 ? 0x7fffffffu : 0x7fff7fffu), f32);
  }
}

// Of the strip, from the maxima of all threads; the scales are in shared memory then. Barriers inside.
template <int Lanes> CQSA_DEVICE void columns_scales(const fp8_job& job, const fp8_strip& s, uint32_t (&most)[4]) {
  const fp8_side& side = job.side[0];
  const int kind = job.x.kind, mine = thread_index(), numbers = numbers_of(kind);
#pragma unroll
  for (int n = 0; n < 4; ++n)
#pragma unroll 1
    for (int mask = columns_lanes; mask < Lanes; mask *= 2) most[n] = most_of_two(most[n], shuffle_xor<Lanes>(most[n], mask), kind == kind_f32);
  if (mine % Lanes < columns_lanes) columns().parts[mine / Lanes][mine % Lanes] = {{most[0], most[1], most[2], most[3]}};
  barrier();
  const int64_t column = s.column - mine % columns_lanes * numbers + mine;
  if (mine < columns_lanes * numbers && column < job.columns) {
    uint32_t all = 0;
#pragma unroll 1
    for (int n = 0; n < block_threads() / Lanes; ++n) all = most_of_two(all, columns().parts[n][mine / numbers].x[mine % numbers * 4 / numbers], kind == kind_f32);
    if (kind != kind_f32) all = all >> 16 * (mine & 1) & 0xffffu;
    const fp8::scale_pair pair = fp8::scale_of(plain_amax(most_bits(all, kind)), rule_of(job, side));
    columns().scale[mine] = pair.scale;
    store_scales(side, s.begin / uint32_t(side.block[0]), column, pair.scale, pair.scale_inv);
  }
  barrier();
}

// Codes of some vectors, and the largest magnitude of each before it was made one.
template <int Kind, bool Wide> CQSA_DEVICE void encode_columns(const loaded16 (&x)[columns_each], const float (&by)[8], const fp8_fast& f, word_pair (&c)[columns_each], float (&most)[columns_each]) {
#pragma unroll
  for (int u = 0; u < columns_each; ++u) {
    float y[8] = {};
    most[u] = 0;
#pragma unroll
    for (int i = 0; i < per_vector<Kind>; ++i) y[i] = product_f32(number_of<Kind>(x[u].x, i), by[i]), most[u] = max_f32(most[u], float_of(bits_of(y[i]) & 0x7fffffffu));
    c[u] = {{encode_four<Wide>(y[0], y[1], y[2], y[3], f), Kind == kind_f32 ? 0 : encode_four<Wide>(y[4], y[5], y[6], y[7], f)}};
  }
}
template <int Kind> CQSA_DEVICE void encode_columns(const loaded16 (&x)[columns_each], const float (&by)[8], const fp8_fast& f, word_pair (&c)[columns_each], float (&most)[columns_each]) {
  if (has_fp8 && f.wide) encode_columns<Kind, true>(x, by, f, c, most);
  else encode_columns<Kind, false>(x, by, f, c, most);
}

// Rows of a strip from its end.
CQSA_DEVICE void columns_codes(const fp8_job& job, const fp8_strip& s) {
  const fp8_side& side = job.side[0];
  const int kind = job.x.kind, numbers = numbers_of(kind), mine = thread_index() % columns_lanes * numbers;
  const uint32_t step = uint32_t(block_threads() / columns_lanes), rows = s.end - s.begin;
  float by[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) by[j] = j < numbers ? columns().scale[mine + j] : 0;
#pragma unroll 1
  for (uint32_t back = uint32_t(thread_index() / columns_lanes); back < rows && s.there; back += columns_each * step) {
    loaded16 x[columns_each];
    const uint32_t first = s.end - 1 - back;  // downwards; what is below the begin is not stored
    const fp8_fast f = fast_of(job_again(job).side[0].format);
    uint32_t slow = 0;
    load_rows(job, {s.begin, s.end, s.column, s.there}, first, 0 - step, x);
    word_pair c[columns_each];
    float most[columns_each];
    if (kind == kind_bf16) encode_columns<kind_bf16>(x, by, f, c, most);
    else if (kind == kind_f16) encode_columns<kind_f16>(x, by, f, c, most);
    else encode_columns<kind_f32>(x, by, f, c, most);
#pragma unroll
    for (uint32_t u = 0; u < uint32_t(columns_each); ++u) {
      if (back + u * step >= rows) continue;
      const bool strange = most_bits(most_of_vector(x[u], kind == kind_f32), kind) > strange_limit(job);
      slow |= uint32_t(strange || (is_strict(job) && most[u] > largest_quick(side.format))) << u;
      char* const to = side.codes.data + (first - u * step) * side.codes.stride[1] + s.column;
      if (kind == kind_f32) *reinterpret_cast<uint32_t*>(to) = c[u].x[0];
      else *reinterpret_cast<word_pair*>(to) = c[u];
    }
#pragma unroll 1
    for (uint32_t u = 0; slow; ++u, slow >>= 1)
#pragma unroll 1
      for (int j = 0; j < numbers && (slow & 1); ++j) slow_run(job_again(job), columns().scale[mine + j], first - u * step, s.column + j, 1, 1);
  }
}

template <int Lanes, class P> CQSA_DEVICE void fp8_columns_block(const P& p) {
  const fp8_job& job = p.jobs[0];
  const fp8_head head = head_of<false, 1>(p, job);
  barrier();
  uint32_t all = 0;
  if (head.go) {
    const uint32_t wide = uint32_t(columns_lanes * numbers_of(job.x.kind)), units = uint32_t(job.side[0].rows) * ((uint32_t(job.columns) + wide - 1) / wide);
#pragma unroll 1
    for (uint32_t unit = uint32_t(block_index_x()); unit < units; unit += uint32_t(grid_size_x())) {
      const fp8_strip s = strip_of(job, unit);
      uint32_t most[4] = {0, 0, 0, 0};
      columns_most(job, s, most);
      all = most_of_two(all, most_of_words(most, 4, job.x.kind == kind_f32), job.x.kind == kind_f32);
      columns_scales<Lanes>(job, s, most);
      columns_codes(job, s);
    }
    all = most_bits(all, job.x.kind);
    publish<false, 1>(p, job, head);
  }
  end_block<Lanes, false>(p, job, head.go, all);
}

}  // namespace cqsa::gpu
