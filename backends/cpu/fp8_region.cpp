// SPDX-License-Identifier: Apache-2.0
// The regions of a quantization.
#include "fp8_region.h"

#include <algorithm>
#include <numeric>

namespace cqsa::cpu {
namespace {

constexpr int64_t region_elements = 1 << 16;  // of 2 or 4 bytes: they stay in a core's own caches

int64_t blocks(int64_t n, int64_t block) { return (n + block - 1) / block; }

int64_t common(int64_t a, int64_t b, int64_t all) {
  const int64_t gcd = std::gcd(a, b);
  return a / gcd > all / b ? all : std::min(all, a / gcd * b);
}

// ---- sizes ------------------------------------------------------------------------------------------------------------------

struct extent {
  int64_t rows, columns;
};

// What every region is a multiple of.
extent least_region(const fp8_pass& p) {
  extent least{1, 1};
  for (int s = 0; s < p.side_count; ++s) {
    const fp8_side_pass& side = p.sides[s];
    if (side.by_row) continue;
    least.rows = common(least.rows, side.grid->block[0], p.bottom - p.top);
    least.columns = common(least.columns, side.grid->block[1], p.job->columns);
  }
  return least;
}

// What every tile's width is a multiple of: blocks that a region has several of.
int64_t tile_step(const fp8_pass& p) {
  int64_t step = 1;
  for (int s = 0; s < p.side_count; ++s)
    if (!p.sides[s].by_row && p.sides[s].grid->block[1] < p.region_columns) step = common(step, p.sides[s].grid->block[1], p.job->columns);
  return step;
}

int64_t most_blocks(const fp8_pass& p) {
  int64_t most = 0;
  for (int s = 0; s < p.side_count; ++s)
    if (!p.sides[s].by_row)
      most = std::max(most, blocks(p.region_rows, p.sides[s].grid->block[0]) * blocks(p.region_columns, p.sides[s].grid->block[1]));
  return most;
}

bool halve(int64_t* size, int64_t step, int64_t floor) {
  const int64_t half = *size / 2 / step * step;
  if (half < step || half < floor) return false;
  *size = half;
  return true;
}

bool finds_blocks(const fp8_pass& p) {
  bool any = false;
  for (int s = 0; s < p.side_count; ++s) any = any || p.sides[s].found;
  return any;
}

bool is_transposing(const fp8_pass& p) { return p.side_count > 0 && p.sides[p.side_count - 1].transposed; }

void choose_region(fp8_pass* p, const extent& least, int64_t widest) {
  const int64_t rows = p->bottom - p->top, columns = p->job->columns;
  const int64_t wanted = is_transposing(*p) ? 2 * widest : region_elements;  // whole rows, if that may be: memory is read in order
  p->region_columns = least.columns > widest ? least.columns : std::max(least.columns, wanted / least.columns * least.columns);
  if (least.rows > 1) {
    // Regions that are too tall for any cache are wide at least: whole pages of a row.
    const int64_t narrowest = least.rows > 1024 ? 4096 : 512;
    const int64_t fitting = std::max<int64_t>(region_elements / least.rows, narrowest) / least.columns * least.columns;
    p->region_columns = std::max(least.columns, std::min(p->region_columns, fitting));
  }
  p->region_columns = std::min(p->region_columns, columns);
  // Where nothing is read twice, what counts are pages that are left and come back to.
  const int64_t elements = is_transposing(*p) && !finds_blocks(*p) ? 4 * region_elements : region_elements;
  p->region_rows = std::max(least.rows, elements / p->region_columns / least.rows * least.rows);
  p->region_rows = std::min(p->region_rows, rows);
  while (most_blocks(*p) > fp8_region_blocks && halve(&p->region_rows, least.rows, 1)) {}
  while (most_blocks(*p) > fp8_region_blocks && halve(&p->region_columns, least.columns, 1)) {}
}

// A few regions for each worker.
void spread(fp8_pass* p, const extent& least) {
  if (p->workers < 2) return;
  const int64_t few_rows = is_transposing(*p) ? 64 : 1, enough = (least.rows > 1024 ? 1 : 4) * p->workers;
  while (fp8_region_count(*p) < enough && p->region_rows * p->region_columns > 8192)
    if (!halve(&p->region_rows, least.rows, few_rows) && !halve(&p->region_columns, least.columns, 256)) return;
}

// ---- one region -------------------------------------------------------------------------------------------------------------

struct region {
  int64_t top, bottom, left, right;
};

struct worker {
  explicit worker(const fp8_pass& p) : pass(p) {}
  const fp8_pass& pass;
  fp8_line_scratch lines;
  // Of the blocks of a region: first amaxes, then scales.
  alignas(64) uint32_t blocks[2][fp8_region_blocks];
  alignas(64) uint8_t tile[fp8_tile_rows * fp8_tile_columns];
  alignas(64) uint8_t codes[fp8_line];
  uint32_t amax = 0;
  int64_t counts[3] = {0, 0, 0};
  int64_t slot = 0;
};

const void* start_of(const worker& w, int s, const region& at, int64_t i, int64_t j) {
  const cqsa_scale_grid& g = *w.pass.sides[s].grid;
  return w.blocks[s] + (i - at.top) / g.block[0] * blocks(at.right - at.left, g.block[1]) + (j - at.left) / g.block[1];
}

void find_amaxes(worker& w, const region& at) {
  const fp8_pass& p = w.pass;
  const bool finite = p.job->nan_policy == CQSA_FP8_NAN_IGNORE;
  const int64_t step = tile_step(p), width = std::max(step, fp8_line / step * step);
  for (int64_t i = at.top; i < at.bottom; ++i)
    for (int64_t j = at.left; j < at.right; j += width) {
      const int64_t n = std::min(width, at.right - j);
      const fp8_line_view x = fp8_fetch(*p.target, *p.job, i, j, n, &w.lines);
      for (int s = 0; s < p.side_count; ++s) {
        if (!p.sides[s].found) continue;
        auto* const most = static_cast<uint32_t*>(const_cast<void*>(start_of(w, s, at, i, j)));
        p.target->largest(x.data, x.type, n, std::min(n, p.sides[s].grid->block[1]), finite, most);
      }
    }
}

fp8::scale_pair scale_of_block(const worker& w, const fp8_side_pass& side, uint32_t bits, int64_t r, int64_t c) {
  if (side.found) return fp8::scale_of(amax_of(bits), job_rule(*w.pass.job, *side.side));
  return given_scale(*w.pass.job, *side.side, r, c);
}

// Amaxes of a region's blocks to scales, here and in the outputs.
void make_scales(worker& w, int s, const region& at) {
  const fp8_side_pass& side = w.pass.sides[s];
  const cqsa_scale_grid& g = *side.grid;
  const int64_t rows = blocks(at.bottom - at.top, g.block[0]), columns = blocks(at.right - at.left, g.block[1]);
  for (int64_t n = 0; n < rows * columns; ++n) {
    const int64_t r = at.top / g.block[0] + n / columns, c = at.left / g.block[1] + n % columns;
    uint32_t& bits = w.blocks[s][n];
    if (side.found) w.amax = std::max(w.amax, bits);
    if (!side.side) {
      store_scale(g, r, c, amax_of(bits));
      continue;
    }
    const fp8::scale_pair pair = scale_of_block(w, side, bits, r, c);
    store_scale(side.side->scale, r, c, pair.scale);
    store_scale(side.side->scale_inv, r, c, pair.scale_inv);
    bits = fp8::bits_of(pair.scale);
  }
}

void prepare_scales(worker& w, const region& at) {
  const fp8_pass& p = w.pass;
  bool any = false;
  for (int s = 0; s < p.side_count; ++s) {
    if (p.sides[s].by_row) continue;
    const cqsa_scale_grid& g = *p.sides[s].grid;
    std::fill_n(w.blocks[s], blocks(at.bottom - at.top, g.block[0]) * blocks(at.right - at.left, g.block[1]), 0u);
    any = any || p.sides[s].found;
  }
  if (any) find_amaxes(w, at);
  for (int s = 0; s < p.side_count; ++s)
    if (!p.sides[s].by_row) make_scales(w, s, at);
}

// ---- lines ------------------------------------------------------------------------------------------------------------------

struct line {
  int64_t i, j, n;
  fp8_line_view x;
};

struct line_scales {
  const float* scales;
  int64_t group;
};

// The group of row i; rows come in order most of the time.
int64_t slot_of(worker& w, int64_t i) {
  const fp8_pass& p = w.pass;
  if (!p.groups.data) return 0;
  if (i < p.groups.begin(p.group0 + w.slot)) w.slot = 0;
  while (w.slot + 1 < p.group_count && i >= p.groups.end(p.group0 + w.slot)) ++w.slot;
  return w.slot;
}

line_scales scales_of(worker& w, int s, const region& at, const line& l) {
  const fp8_side_pass& side = w.pass.sides[s];
  if (side.by_row) return {side.slots + (side.per_group ? slot_of(w, l.i) : 0), l.n};
  return {static_cast<const float*>(start_of(w, s, at, l.i, l.j)), std::min(l.n, side.grid->block[1])};
}

float number(const line& l, int64_t k) {
  return l.x.type == CQSA_DTYPE_F32 ? static_cast<const float*>(l.x.data)[k] : bf16_to_f32(static_cast<const uint16_t*>(l.x.data)[k]);
}

int64_t read_i64(const int64_t* from) { return load_as<int64_t>(reinterpret_cast<const char*>(from)); }

// Random words of consecutive elements, four at a time.
struct random_source {
  uint64_t seed, offset, known = UINT64_MAX;
  fp8::random_words words{};
  uint32_t at(uint64_t e) {
    if (e / 4 != known) known = e / 4, words = fp8::philox(seed, offset + known);
    return words.word[e % 4];
  }
};

void encode_at_random(const worker& w, const line& l, const line_scales& by, const fp8_coding& how, uint8_t* to) {
  const cqsa_fp8_job& job = *w.pass.job;
  random_source source{uint64_t(read_i64(job.rng)), uint64_t(read_i64(job.rng + job.rng_stride))};
  const uint64_t e = uint64_t(l.i) * uint64_t(job.columns) + uint64_t(l.j);
  for (int64_t k = 0; k < l.n; ++k)
    to[k] = code_at_random(number(l, k) * by.scales[k / by.group], how.format, how.saturate, source.at(e + uint64_t(k)));
}

void count_elements(worker& w, const line& l, const line_scales& by, cqsa_dtype format) {
  const cqsa_fp8_job& job = *w.pass.job;
  random_source source{};
  if (job.rng) source = {uint64_t(read_i64(job.rng)), uint64_t(read_i64(job.rng + job.rng_stride))};
  const uint64_t e = uint64_t(l.i) * uint64_t(job.columns) + uint64_t(l.j);
  for (int64_t k = 0; k < l.n; ++k) {
    const float x = number(l, k);
    w.counts[0] += x != x;
    w.counts[1] += std::isinf(x);
    if (!fp8::is_finite(x) || !fp8::is_format(format)) continue;
    const float y = x * by.scales[k / by.group];
    w.counts[2] += job.rng ? fp8::magnitude_at_random(y, format, source.at(e + uint64_t(k))) > largest_code(format) : overflows(y, format);
  }
}

// Most lines have nothing to count.
void count_line(worker& w, const line& l, const line_scales& by, cqsa_dtype format) {
  uint32_t most = 0;
  w.pass.target->largest(l.x.data, l.x.type, l.n, l.n, false, &most);
  float scale = 0;
  for (int64_t n = 0; n * by.group < l.n; ++n) scale = std::max(scale, by.scales[n]);
  const float y = fp8::float_of(most) * scale;
  if (!fp8::is_finite(fp8::float_of(most)) || (fp8::is_format(format) && !(y <= fp8::largest_of(format)))) count_elements(w, l, by, format);
}

// The first side finds the amax of the line, where that is wanted.
void encode_line(worker& w, const line& l, const line_scales& by, int s, bool streams, uint8_t* to) {
  const fp8_pass& p = w.pass;
  const fp8_side_pass& side = p.sides[s];
  const bool finite = p.job->nan_policy == CQSA_FP8_NAN_IGNORE;
  const fp8_coding how{side.side->codes.dtype, !(p.job->flags & CQSA_FP8_NO_SATURATE), streams, finite};
  uint32_t* const most = p.finds_amax && s == 0 ? &w.amax : nullptr;
  if (!p.job->rng) return p.target->encode(l.x.data, l.x.type, l.n, by.group, by.scales, &how, to, most);
  encode_at_random(w, l, by, how, to);
  if (most) p.target->largest(l.x.data, l.x.type, l.n, l.n, finite, most);
}

bool same_codes(const fp8_pass& p, const line_scales& a, const line_scales& b) {
  return p.sides[0].by_row && p.sides[1].by_row && *a.scales == *b.scales && p.sides[0].side->codes.dtype == p.sides[1].side->codes.dtype;
}

void write_row(worker& w, const line& l, const line_scales& by) {
  const cqsa_matrix& out = w.pass.sides[0].side->codes;
  auto* const to = reinterpret_cast<uint8_t*>(matrix_address(out, w.pass.job->rows, l.i, l.j));
  if (out.stride[2] == 1) return encode_line(w, l, by, 0, w.pass.streams && w.pass.side_count == 1, to);
  encode_line(w, l, by, 0, false, w.codes);
  for (int64_t k = 0; k < l.n; ++k) to[k * out.stride[2]] = w.codes[k];
}

// A line into its outputs; transposed codes wait in `to`.
void write_line(worker& w, const region& at, const line& l, uint8_t* to) {
  const fp8_pass& p = w.pass;
  line_scales by[2] = {};
  for (int s = 0; s < p.side_count; ++s) {
    by[s] = scales_of(w, s, at, l);
    const fp8_side_pass& side = p.sides[s];
    if (side.counted) count_line(w, l, by[s], side.side ? side.side->codes.dtype : CQSA_DTYPE_NONE);
    if (!side.side) continue;
    if (!side.transposed) write_row(w, l, by[s]);
    else if (s == 1 && p.sides[0].side->codes.stride[2] == 1 && same_codes(p, by[0], by[1]))
      std::memcpy(to, matrix_address(p.sides[0].side->codes, p.job->rows, l.i, l.j), size_t(l.n));
    else encode_line(w, l, by[s], s, false, to);
  }
}

// ---- tiles ------------------------------------------------------------------------------------------------------------------

void write_transposed(worker& w, const region& tile) {
  const fp8_pass& p = w.pass;
  const cqsa_matrix& out = p.sides[p.side_count - 1].side->codes;
  const int64_t rows = tile.bottom - tile.top, columns = tile.right - tile.left;
  auto* const to = reinterpret_cast<uint8_t*>(matrix_address(out, p.job->rows, tile.top, tile.left));
  if (out.stride[1] == 1 && (p.job->batch == 1 || out.stride[0] == p.job->rows))
    return p.target->transpose(w.tile, fp8_tile_columns, rows, columns, p.streams, to, out.stride[2]);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j)
      *matrix_address(out, p.job->rows, tile.top + i, tile.left + j) = static_cast<char>(w.tile[i * fp8_tile_columns + j]);
}

// The tile to the right comes next; its rows are too short for the hardware to see that.
void look_ahead(const fp8_line_view& x, int64_t n) {
  const char* const next = static_cast<const char*>(x.data) + n * bytes_of(x.type);
  for (int64_t at = 0; at < n * bytes_of(x.type); at += 64) __builtin_prefetch(next + at);
}

void write_tile(worker& w, const region& at, const region& tile) {
  const fp8_pass& p = w.pass;
  const bool finite = p.job->nan_policy == CQSA_FP8_NAN_IGNORE, encodes = p.side_count > 0 && p.sides[0].side, turns = is_transposing(p);
  for (int64_t i = tile.top; i < tile.bottom; ++i) {
    line l{i, tile.left, tile.right - tile.left, {}};
    l.x = fp8_fetch(*p.target, *p.job, i, l.j, l.n, &w.lines);
    if (turns && l.x.data != w.lines.x) look_ahead(l.x, l.n);
    if (p.finds_amax && !encodes) p.target->largest(l.x.data, l.x.type, l.n, l.n, finite, &w.amax);
    write_line(w, at, l, w.tile + (i - tile.top) * fp8_tile_columns);
  }
  if (turns) write_transposed(w, tile);
}

bool has_tiles(const fp8_pass& p) {
  bool any = p.finds_amax;
  for (int s = 0; s < p.side_count; ++s) any = any || p.sides[s].side || p.sides[s].counted;
  return any;
}

void work_on_region(worker& w, const region& at) {
  const fp8_pass& p = w.pass;
  prepare_scales(w, at);
  if (!has_tiles(p)) return;
  const int64_t step = is_transposing(p) ? fp8_tile_rows : 1;
  for (int64_t i = at.top; i < at.bottom; i += step)
    for (int64_t j = at.left; j < at.right; j += p.tile_columns)
      write_tile(w, at, {i, std::min(i + step, at.bottom), j, std::min(j + p.tile_columns, at.right)});
}

}  // namespace

void fp8_raise(std::atomic<uint32_t>& to, uint32_t bits) {
  uint32_t seen = to.load(std::memory_order_relaxed);
  while (bits > seen && !to.compare_exchange_weak(seen, bits, std::memory_order_relaxed)) {}
}

bool fp8_plan_pass(fp8_pass* p) {
  const int64_t widest = is_transposing(*p) ? fp8_tile_columns : fp8_line;
  const extent least = least_region(*p);
  choose_region(p, least, widest);
  spread(p, least);
  const int64_t step = tile_step(*p);
  p->tile_columns = std::min(std::max(step, widest / step * step), std::max<int64_t>(p->region_columns, 1));
  p->tile_columns = std::min(p->tile_columns, step > widest ? p->tile_columns : widest);
  const bool both = p->side_count == 2 && !p->sides[0].by_row && !p->sides[1].by_row;
  return !both || (step <= widest && most_blocks(*p) <= fp8_region_blocks && p->region_rows * p->region_columns <= 4 * region_elements);
}

int64_t fp8_region_count(const fp8_pass& p) { return blocks(p.bottom - p.top, p.region_rows) * blocks(p.job->columns, p.region_columns); }

void fp8_work_on_regions(const fp8_pass& p, fp8_results* results) {
  worker w(p);
  const int64_t across = blocks(p.job->columns, p.region_columns), count = fp8_region_count(p);
  for (int64_t n; (n = results->next.fetch_add(1, std::memory_order_relaxed)) < count;) {
    const int64_t at = p.backwards ? count - 1 - n : n, i = p.top + at / across * p.region_rows, j = at % across * p.region_columns;
    work_on_region(w, {i, std::min(i + p.region_rows, p.bottom), j, std::min(j + p.region_columns, p.job->columns)});
  }
  p.target->finish();
  fp8_raise(results->amax, w.amax);
  for (int n = 0; n < 3; ++n) results->counts[n].fetch_add(w.counts[n], std::memory_order_relaxed);
}

// ---- reading ----------------------------------------------------------------------------------------------------------------

namespace {

void decode_scales(const fp8_target& target, const cqsa_fp8_job& job, int64_t i, int64_t j, int64_t n, float* x) {
  const cqsa_scale_grid& g = job.x_scale_inv;
  for (int64_t k = 0; k < n;) {
    const int64_t end = std::min(n, (j + k) / g.block[1] * g.block[1] + g.block[1] - j);
    target.multiply(x + k, load_scale(g, i / g.block[0], (j + k) / g.block[1]), end - k);
    k = end;
  }
}

}  // namespace

const float* fp8_fetch_f32(const fp8_target& target, const cqsa_fp8_job& job, int64_t i, int64_t j, int64_t n, fp8_line_scratch* mem) {
  target.load(matrix_address(job.x, job.rows, i, j), job.x.dtype, job.x.stride[2], n, mem->raw, mem->x);
  if (job.x_scale_inv.data) decode_scales(target, job, i, j, n, mem->x);
  if (!job.up.data) return mem->x;
  target.load(matrix_address(job.up, job.rows, i, j), job.up.dtype, job.up.stride[2], n, mem->raw, mem->up);
  target.silu(mem->x, mem->up, n);
  return mem->x;
}

fp8_line_view fp8_fetch(const fp8_target& target, const cqsa_fp8_job& job, int64_t i, int64_t j, int64_t n, fp8_line_scratch* mem) {
  const bool plain = job.x.dtype == CQSA_DTYPE_F32 || job.x.dtype == CQSA_DTYPE_BF16;
  if (plain && job.x.stride[2] == 1 && !job.up.data) {
    const char* const at = matrix_address(job.x, job.rows, i, j);
    if (reinterpret_cast<uintptr_t>(at) % uintptr_t(bytes_of(job.x.dtype)) == 0) return {at, job.x.dtype};
  }
  return {fp8_fetch_f32(target, job, i, j, n, mem), CQSA_DTYPE_F32};
}

}  // namespace cqsa::cpu
