// SPDX-License-Identifier: Apache-2.0
// Attention over selected cells: the heads that share a key head walk over its list together, a tile of cells at a time. The rows of
// the cells are gathered and decoded to f32 once per tile, for all of these heads.
//
// Lanes are channels, so that one head keeps them as busy as many: the logits are sums of lanes, folded for a whole vector of them at
// once. Hidden cells never enter a tile, so what they hold cannot matter.
#pragma once

#include "convert-inl.h"
#include "selected_job.h"

#include <math.h>

HWY_BEFORE_NAMESPACE();
namespace cqsa::cpu {
namespace {
namespace HWY_NAMESPACE {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int value_sums = 24;  // accumulators of 32 registers
#else
constexpr int value_sums = 12;  // .. of 16
#endif

struct selected_run {
  const cqsa_selected_leaf& leaf;
  const selected_unit& unit;
  const selected_scratch& mem;
  const scalar_ops* ops;
};

// ---- the list ---------------------------------------------------------------------------------------------------------------

struct cell_tile {
  int64_t page[selected_tile], row[selected_tile];
  int keys;
};

static inline int32_t load_i32(const int32_t* p) {
  int32_t x;
  memcpy(&x, p, sizeof x);  // any alignment
  return x;
}

// Walks down the list of a query and finds the cells that are there, as cqsa.h defines it.
struct list_walk {
  const cqsa_selected_leaf& leaf;
  int64_t query, next, count;
  int64_t before;

  static list_walk begin(const cqsa_selected_leaf& leaf, int64_t query) {
    const int64_t count = load_i32(leaf.counts + query * leaf.counts_stride);
    return {leaf, query, 0, max64(0, min64(count, leaf.capacity)), -1};
  }

  void fill(cell_tile& t) {
    t.keys = 0;
    for (; next < count && t.keys < selected_tile; ++next) {
      const int32_t cell = load_i32(leaf.cells + query * leaf.cells_stride[0] + next * leaf.cells_stride[1]);
      const bool in_order = cell >= 0 && cell > before;
      before = cell;
      if (in_order) add(uint32_t(cell), t);
    }
  }

  void add(uint32_t cell, cell_tile& t) const {
    const bool small = leaf.page_size <= INT32_MAX;  // of 32 bits, the division takes half the time
    const uint32_t entry = small ? cell / uint32_t(leaf.page_size) : 0;
    if (int64_t(entry) >= leaf.pages) return;
    const int64_t page = load_i32(leaf.page_table + query * leaf.page_table_stride[0] + entry * leaf.page_table_stride[1]);
    if (page < 0 || page >= leaf.num_pages) return;
    t.page[t.keys] = page;
    t.row[t.keys++] = cell - int64_t(entry) * (small ? leaf.page_size : 0);
  }
};

// ---- rows of cells ----------------------------------------------------------------------------------------------------------

static inline void from_i8_scaled(const int8_t* HWY_RESTRICT from, int64_t n, float f, float* HWY_RESTRICT to) {
  for (int64_t i = 0; i < n; ++i) to[i] = float(from[i]) * f;
}

// The scales of a tile to mem.scales.
static void load_scales(const selected_run& run, const cqsa_view& scale, const cell_tile& t, int64_t groups) {
  const selected_scratch& mem = run.mem;
  for (int j = 0; j < t.keys; ++j)
    gather_elements(at(scale, t.page[j], run.unit.kv_head, t.row[j], 0), scale.stride[3], 2, groups, (char*)(mem.codes + j * groups));
  from_f16(mem.codes, t.keys * groups, mem.scales);
}

// One row of int8 codes, scaled.
static void load_codes(const selected_run& run, const char* from, int64_t stride, int64_t channels, const float* scales, float* to) {
  const int64_t group = run.leaf.kv_group;
  if (stride != 1) {
    gather_elements(from, stride, 1, channels, run.mem.raw);
    from = run.mem.raw;
  }
  for (int64_t c = 0, x = 0; c < channels; c += group, ++x)
    from_i8_scaled((const int8_t*)from + c, min64(group, channels - c), scales[x], to + c);
}

// The rows of the next tile lie anywhere, where no hardware guesses them. One at a time, between other work: a core can wait for a
// few lines only.
static HWY_INLINE void prefetch(const char* row, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(row + b);
}

// The rows of a tile in f32, [cell][ld] in mem.tile, padded with zeros. after: the tile that comes next.
static void load_cells(const selected_run& run, const cqsa_view& x, const cqsa_view& scale, const cell_tile& t, const cell_tile& after,
                       int64_t channels, int64_t ld) {
  const selected_scratch& mem = run.mem;
  const int64_t groups = run.leaf.kv_group > 0 ? (channels + run.leaf.kv_group - 1) / run.leaf.kv_group : 0;
  const int64_t padded = (channels + lanes - 1) / lanes * lanes;
  const int64_t bytes = x.stride[3] == 1 ? channels * element_bytes(x.dtype) : 0;
  if (groups > 0) load_scales(run, scale, t, groups);
  for (int j = 0; j < t.keys; ++j) {
    const char* from = at(x, t.page[j], run.unit.kv_head, t.row[j], 0);
    float* to = mem.tile + j * ld;
    if (j < after.keys) prefetch(at(x, after.page[j], run.unit.kv_head, after.row[j], 0), bytes);
    if (j < after.keys && groups > 0) prefetch(at(scale, after.page[j], run.unit.kv_head, after.row[j], 0), 1);
    if (groups > 0) load_codes(run, from, x.stride[3], channels, mem.scales + j * groups, to);
    else load_row(from, x.dtype, x.stride[3], channels, mem.raw, to);
    for (int64_t c = channels; c < padded; ++c) to[c] = 0.0f;
  }
}

// ---- logits -----------------------------------------------------------------------------------------------------------------

// The sums of neighbouring lanes: those of a, then those of b.
static HWY_INLINE vf add_neighbours(vf a, vf b) {
#if defined(CQSA_PLAIN_VECTORS)
  return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
#else
  return hn::Add(hn::ConcatEven(df, b, a), hn::ConcatOdd(df, b, a));
#endif
}

// Lane i of the result is the sum of all lanes of v[i], for as many vectors as there are lanes.
template <int N>
static HWY_INLINE vf fold(const vf* v) {
  if constexpr (N == 1) {
    return v[0];
  } else {
    vf half[N / 2];
#pragma GCC unroll 8
    for (int i = 0; i < N / 2; ++i) half[i] = add_neighbours(v[2 * i], v[2 * i + 1]);
    return fold<N / 2>(half);
  }
}

// s[row][key] for RB rows and as many keys as fill a vector with them.
template <int RB>
static HWY_INLINE void scores_block(const float* q, int64_t ldq, const float* k, int64_t ldk, int64_t depth, float* s) {
  constexpr int KB = lanes / RB;
  vf sum[lanes];
#pragma GCC unroll 16
  for (int i = 0; i < lanes; ++i) sum[i] = zero();
  for (int64_t d = 0; d < depth; d += lanes) {
    vf x[RB];
#pragma GCC unroll 4
    for (int r = 0; r < RB; ++r) x[r] = load(q + r * ldq + d);
#pragma GCC unroll 16
    for (int j = 0; j < KB; ++j) {
      const vf y = load(k + j * ldk + d);
#pragma GCC unroll 4
      for (int r = 0; r < RB; ++r) sum[r * KB + j] = fma(x[r], y, sum[r * KB + j]);
    }
  }
  float all[lanes];
  storeu(fold<lanes>(sum), all);
#pragma GCC unroll 4
  for (int r = 0; r < RB; ++r) memcpy(s + r * selected_tile, all + r * KB, KB * sizeof(float));
}

template <int RB>
static HWY_NOINLINE void scores_rows(const selected_run& run, int64_t row, int64_t keys) {
  const selected_scratch& mem = run.mem;
  for (int64_t j = 0; j < keys; j += lanes / RB)
    scores_block<RB>(mem.q + row * mem.ldk, mem.ldk, mem.tile + j * mem.ldk, mem.ldk, run.leaf.head_dim, mem.s + row * selected_tile + j);
}

// Logits of the whole tile. Rows of the tile past the last key hold anything finite or not: their logits are overwritten.
static void scores(const selected_run& run, int64_t keys) {
  const int64_t rows = run.unit.rows;
  int64_t r = 0;
  if constexpr (lanes >= 16)
    for (; r + 4 <= rows; r += 4) scores_rows<4>(run, r, keys);
  for (; r + 2 <= rows; r += 2) scores_rows<2>(run, r, keys);
  if (r < rows) scores_rows<1>(run, r, keys);
  for (r = 0; r < rows; ++r)
    for (int64_t j = keys; j < selected_tile; ++j) run.mem.s[r * selected_tile + j] = -__builtin_inff();
}

// ---- softmax ----------------------------------------------------------------------------------------------------------------

static inline float top_of(vf v) {
  float all[lanes];
  storeu(v, all);
  float top = all[0];
  for (int i = 1; i < lanes; ++i) top = all[i] > top ? all[i] : top;
  return top;
}

static HWY_INLINE float sum_of(vf v) {
  float all[lanes];
  storeu(v, all);
#pragma GCC unroll 4
  for (int width = lanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) all[i] += all[i + width];
  return all[0];
}

// From logits to probabilities in place; m, l and alpha of the row follow.
static void softmax_row(const selected_scratch& mem, int64_t r) {
  float* s = mem.s + r * selected_tile;
  vf high = load(s);
  for (int j = lanes; j < selected_tile; j += lanes) high = vmax(high, load(s + j));
  const float old = mem.m[r], tile_top = top_of(high), top = tile_top > old ? tile_top : old;
  const float reference = top == -__builtin_inff() ? 0.0f : top;  // whatever it is, exp(-inf) is 0
  vf sum = zero();
  for (int j = 0; j < selected_tile; j += lanes) {
    const vf p = exp(sub(load(s + j), set(reference)));
    store(p, s + j);
    sum = add(sum, p);
  }
  float scale[lanes];
  storeu(exp(set(old - reference)), scale);
  mem.m[r] = top;
  mem.alpha[r] = scale[0];
  mem.l[r] = mem.l[r] * scale[0] + sum_of(sum);
}

// ---- values -----------------------------------------------------------------------------------------------------------------

// acc[row][channel] = acc * alpha + sum over the tile of p[row][cell] * v[cell][channel], RB rows and CB vectors of channels. The tile
// is summed by itself first, so that the error grows with the number of tiles.
template <int RB, int CB>
static HWY_INLINE void values_block(const float* HWY_RESTRICT p, const float* HWY_RESTRICT v, int64_t ldv, int64_t keys,
                                    const float* HWY_RESTRICT alpha, float* HWY_RESTRICT acc) {
  vf sum[RB][CB];
#pragma GCC unroll 12
  for (int r = 0; r < RB; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < CB; ++c) sum[r][c] = zero();
  for (int64_t j = 0; j < keys; ++j) {
    vf x[CB];
#pragma GCC unroll 8
    for (int c = 0; c < CB; ++c) x[c] = load(v + j * ldv + c * lanes);
#pragma GCC unroll 12
    for (int r = 0; r < RB; ++r) {
      const vf w = set(p[r * selected_tile + j]);
#pragma GCC unroll 8
      for (int c = 0; c < CB; ++c) sum[r][c] = fma(w, x[c], sum[r][c]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < RB; ++r) {
    const vf a = set(alpha[r]);
#pragma GCC unroll 8
    for (int c = 0; c < CB; ++c) {
      float* to = acc + r * ldv + c * lanes;
      store(fma(load(to), a, sum[r][c]), to);
    }
  }
}

template <int RB>
static HWY_NOINLINE void values_rows(const selected_run& run, int64_t row, int64_t keys) {
  const selected_scratch& mem = run.mem;
  constexpr int CB = value_sums / RB > 8 ? 8 : value_sums / RB;
  const float* p = mem.s + row * selected_tile;
  float* acc = mem.acc + row * mem.ldv;
  const int64_t channels = (run.leaf.head_dim_v + lanes - 1) / lanes * lanes;
  int64_t c = 0;
  for (; c + CB * lanes <= channels; c += CB * lanes) values_block<RB, CB>(p, mem.tile + c, mem.ldv, keys, mem.alpha + row, acc + c);
  for (; c < channels; c += lanes) values_block<RB, 1>(p, mem.tile + c, mem.ldv, keys, mem.alpha + row, acc + c);
}

static void add_values(const selected_run& run, int64_t keys) {
  const int64_t rows = run.unit.rows;
  int64_t r = 0;
  if constexpr (value_sums >= 24)
    for (; r + 12 <= rows; r += 12) values_rows<12>(run, r, keys);
  for (; r + 6 <= rows; r += 6) values_rows<6>(run, r, keys);
  if (r + 4 <= rows) values_rows<4>(run, r, keys), r += 4;
  if (r + 2 <= rows) values_rows<2>(run, r, keys), r += 2;
  if (r < rows) values_rows<1>(run, r, keys);
}

// ---- the unit ---------------------------------------------------------------------------------------------------------------

static void begin_unit(const selected_run& run) {
  const selected_scratch& mem = run.mem;
  const cqsa_selected_leaf& leaf = run.leaf;
  const float scale = float(leaf.softmax_scale);
  memset(mem.acc, 0, size_t(run.unit.rows * mem.ldv) * sizeof(float));
  for (int64_t r = 0; r < run.unit.rows; ++r) {
    float* to = mem.q + r * mem.ldk;
    load_row(at(leaf.q, 0, run.unit.first_head + r, run.unit.query, 0), leaf.q.dtype, leaf.q.stride[3], leaf.head_dim, mem.raw, to);
    for (int64_t c = 0; c < leaf.head_dim; ++c) to[c] *= scale;
    for (int64_t c = leaf.head_dim; c < mem.ldk; ++c) to[c] = 0.0f;
    mem.m[r] = -__builtin_inff();
    mem.l[r] = 0.0f;
  }
}

static void finish_row(const selected_run& run, int64_t r) {
  const cqsa_selected_leaf& leaf = run.leaf;
  const selected_scratch& mem = run.mem;
  const int64_t head = run.unit.first_head + r;
  const bool empty = mem.l[r] == 0.0f;
  for (int64_t c = 0; c < leaf.head_dim_v; ++c) mem.line[c] = empty ? 0.0f : mem.acc[r * mem.ldv + c] / mem.l[r];
  char* to = (char*)(uintptr_t)at(leaf.out, 0, head, run.unit.query, 0);
  store_row(mem.line, leaf.out.dtype, leaf.out.stride[3], leaf.head_dim_v, run.ops, mem.raw, to);
  if (!leaf.lse.data) return;
  const float lse = empty ? -__builtin_inff() : float(double(mem.m[r]) + ::log(double(mem.l[r])));
  memcpy((char*)(uintptr_t)at(leaf.lse, 0, head, run.unit.query, 0), &lse, 4);
}

static void run_selected(const cqsa_selected_leaf* leaf, const selected_unit* unit, const selected_scratch* mem, const scalar_ops* ops) {
  const selected_run run{*leaf, *unit, *mem, ops};
  cell_tile tiles[2];
  list_walk walk = list_walk::begin(*leaf, unit->query);
  begin_unit(run);
  walk.fill(tiles[0]);
  for (int n = 0; tiles[n].keys > 0; n ^= 1) {
    const int64_t keys = tiles[n].keys;
    walk.fill(tiles[n ^ 1]);
    load_cells(run, leaf->k, leaf->k_scale, tiles[n], tiles[n ^ 1], leaf->head_dim, mem->ldk);
    scores(run, keys);
    for (int64_t r = 0; r < unit->rows; ++r) softmax_row(*mem, r);
    load_cells(run, leaf->v, leaf->v_scale, tiles[n], tiles[n ^ 1], leaf->head_dim_v, mem->ldv);
    add_values(run, keys);
  }
  for (int64_t r = 0; r < unit->rows; ++r) finish_row(run, r);
}

}  // namespace HWY_NAMESPACE
}  // namespace
}  // namespace cqsa::cpu
HWY_AFTER_NAMESPACE();
