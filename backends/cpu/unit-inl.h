// SPDX-License-Identifier: Apache-2.0
// One work unit: pack its queries, walk over its key tiles, finish its rows.
#pragma once

#include "convert-inl.h"
#include "kernel-inl.h"

#include <math.h>

HWY_BEFORE_NAMESPACE();
namespace cqsa::cpu {
namespace {
namespace HWY_NAMESPACE {

struct unit_run {
  const cqsa_attention_leaf& leaf;
  const work_unit& unit;
  const scratch& mem;
  const scalar_ops* ops;
  int64_t count;   // lanes in use
  int64_t padded;  // .. rounded up to whole vectors
  bool careful;    // v may hold NaN or Inf under hidden keys
  bool k_direct;   // k is read in place
  bool v_direct;
};

// A tile of keys of one range, ready to be multiplied.
struct key_tile {
  const float* k;
  const float* v;
  int64_t ldk, ldv;
  int64_t pos;      // global position of its first key
  int64_t mask_col;
  int64_t keys;
  bool has_gone;    // some keys are on page -1
};

static inline int64_t lane_head(const work_unit& u, int64_t x) { return u.head + (u.heads == 1 ? 0 : x % u.heads); }
static inline int64_t lane_query(const work_unit& u, int64_t x) { return u.heads == 1 ? x : x / u.heads; }

template <int N> struct vectors {
  static constexpr int count = N;
  static constexpr int rows = N * lanes;
};

// Calls f(first lane, vectors<N>) for each block: the widest kernels first, narrower ones for the rest.
template <class F> HWY_INLINE void for_blocks(int64_t padded, const F& f) {
  int64_t x = 0;
  for (; x + block_rows <= padded; x += block_rows) f(x, vectors<block_vectors>());
  if constexpr (block_vectors > 2)
    if (x + 2 * lanes <= padded) {
      f(x, vectors<2>());
      x += 2 * lanes;
    }
  if (x < padded) f(x, vectors<1>());
}

// Visible key positions lo <= j < hi of query position i, before clipping to a range.
static inline void visible_range(const cqsa_attention_leaf& leaf, int64_t i, int64_t off, int64_t* lo, int64_t* hi) {
  const int64_t far = int64_t(1) << 60;
  const int64_t p = i + off;
  *lo = leaf.window_left < 0 ? -far : p - min64(leaf.window_left, far);
  *hi = leaf.window_right < 0 ? far : p + min64(leaf.window_right, far) + 1;
  if (leaf.causal != CQSA_CAUSAL_NONE) *hi = min64(*hi, p + 1);
}

// One query, scaled and transposed into column y of a block.
static void pack_query(const unit_run& run, int64_t x, int64_t width, float* to) {
  const cqsa_attention_leaf& leaf = run.leaf;
  const work_unit& u = run.unit;
  const float scale = float(leaf.softmax_scale);
  const int64_t depth = leaf.head_dim;
  if (x >= run.count) {
    for (int64_t d = 0; d < depth; ++d) to[d * width] = 0.0f;
    return;
  }
  const char* from = at(leaf.q, u.batch, lane_head(u, x), u.q_row + lane_query(u, x), 0);
  load_row(from, leaf.q.dtype, leaf.q.stride[3], depth, run.mem.raw, run.mem.row);
  for (int64_t d = 0; d < depth; ++d) to[d * width] = run.mem.row[d] * scale;
}

static void pack_queries(const unit_run& run) {
  for_blocks(run.padded, [&](int64_t x, auto block) HWY_ATTR {
    constexpr int width = decltype(block)::rows;
    for (int64_t y = 0; y < width; ++y) pack_query(run, x + y, width, run.mem.qt + x * run.leaf.head_dim + y);
  });
}

static inline int64_t state_index(const unit_run& run, int64_t x) {
  const work_unit& u = run.unit;
  return (u.batch * run.leaf.num_heads + lane_head(u, x)) * run.leaf.state_rows + u.state_row + lane_query(u, x);
}

static void begin_rows(const unit_run& run) {
  const cqsa_attention_leaf& leaf = run.leaf;
  const work_unit& u = run.unit;
  const scratch& mem = run.mem;
  const bool from_state = (leaf.flags & CQSA_LEAF_STATE_IN) != 0;
  const int64_t dv = leaf.head_dim_v;
  memset(mem.acc, 0, size_t(run.padded * dv) * sizeof(float));
  for (int64_t x = 0; x < run.padded; ++x) {
    // Lanes without a row do as the last row does, and nobody looks.
    const int64_t y = min64(x, run.count - 1);
    visible_range(leaf, u.q_pos + lane_query(u, y), u.off, &mem.lo[x], &mem.hi[x]);
    mem.slope[x] = leaf.slopes.data ? load_f32(at(leaf.slopes, u.batch, lane_head(u, y), 0, 0)) : 0.0f;
    const bool real = from_state && x < run.count;
    mem.m[x] = real ? leaf.state_m[state_index(run, x)] : -__builtin_inff();
    mem.l[x] = real ? leaf.state_l[state_index(run, x)] : 0.0f;
  }
  if (!from_state) return;
  for_blocks(run.padded, [&](int64_t x, auto block) HWY_ATTR {
    constexpr int64_t width = decltype(block)::rows;
    for (int64_t y = 0; y < width && x + y < run.count; ++y) {
      const float* from = leaf.state_acc + state_index(run, x + y) * dv;
      float* to = mem.acc + x * dv + y;
      for (int64_t c = 0; c < dv; ++c) to[c * width] = from[c];
    }
  });
}

// Tile of keys first .. first + keys of a range, converted to f32 in the scratch unless it can be read where it is.
static key_tile load_tile(const unit_run& run, const cqsa_rect& range, int64_t first, int64_t keys) {
  const cqsa_attention_leaf& leaf = run.leaf;
  const work_unit& u = run.unit;
  const scratch& mem = run.mem;
  key_tile t{mem.k, mem.v, mem.ldk, mem.ldv, range.k_pos + first, range.k_row + first + u.mask_col_shift, keys, false};
  if (run.k_direct) {
    t.k = (const float*)at(leaf.k, u.batch, u.kv_head, range.k_row + first, 0);
    t.ldk = leaf.k.stride[2];
  }
  if (run.v_direct) {
    t.v = (const float*)at(leaf.v, u.batch, u.kv_head, range.k_row + first, 0);
    t.ldv = leaf.v.stride[2];
  }
  if (run.k_direct && run.v_direct) return t;
  for (int64_t j = 0; j < keys; ++j) {
    int64_t b = u.batch, row = range.k_row + first + j;
    if (leaf.page_table) {
      int32_t page;  // the table may stand at any address
      memcpy(&page, leaf.page_table + u.batch * leaf.page_table_stride[0] + row / leaf.page_size * leaf.page_table_stride[1], sizeof page);
      b = page;
      row %= leaf.page_size;
      mem.gone[j] = b < 0;
      if (b < 0) {
        t.has_gone = true;
        memset(mem.k + j * mem.ldk, 0, size_t(leaf.head_dim) * sizeof(float));
        memset(mem.v + j * mem.ldv, 0, size_t(leaf.head_dim_v) * sizeof(float));
        continue;
      }
    }
    if (!run.k_direct)
      load_kv_row(leaf.k, leaf.k_scale, leaf.scale_k, leaf.kv_group, b, u.kv_head, row, leaf.head_dim, run.ops, mem.raw,
                  mem.k + j * mem.ldk);
    if (!run.v_direct)
      load_kv_row(leaf.v, leaf.v_scale, leaf.scale_v, leaf.kv_group, b, u.kv_head, row, leaf.head_dim_v, run.ops, mem.raw,
                  mem.v + j * mem.ldv);
  }
  return t;
}

// Adds bias or applies the mask for a block of MR vectors from lane x on. A row that is the same for the whole block is
// read once and broadcast.
template <int MR>
static void apply_bias(const unit_run& run, const key_tile& t, int64_t x, float* s) {
  const cqsa_view& bias = run.leaf.bias;
  const work_unit& u = run.unit;
  const int64_t width = MR * lanes;
  const int64_t n = min64(width, run.count - x);
  const bool same = bias.stride[2] == 0 && (u.heads == 1 || bias.stride[1] == 0);
  for (int64_t y = 0; y < (same ? 1 : n); ++y) {
    const char* from = at(bias, u.batch, lane_head(u, x + y), u.mask_row + lane_query(u, x + y), t.mask_col);
    load_row(from, bias.dtype, bias.stride[3], t.keys, run.mem.raw, run.mem.row);
    if (!same)
      for (int64_t j = 0; j < t.keys; ++j) s[j * width + y] += run.mem.row[j];
    else
      for (int64_t j = 0; j < t.keys; ++j)
        for (int r = 0; r < MR; ++r) {
          float* p = s + j * width + r * lanes;
          store(add(load(p), set(run.mem.row[j])), p);
        }
  }
}

template <int MR>
static void apply_mask(const unit_run& run, const key_tile& t, int64_t x, float* s) {
  const cqsa_view& m = run.leaf.mask;
  const work_unit& u = run.unit;
  const int64_t width = MR * lanes;
  const int64_t n = min64(width, run.count - x);
  const vf none = set(-__builtin_inff());
  const bool same = m.stride[2] == 0 && (u.heads == 1 || m.stride[1] == 0);
  for (int64_t y = 0; y < (same ? 1 : n); ++y) {
    const char* from = at(m, u.batch, lane_head(u, x + y), u.mask_row + lane_query(u, x + y), t.mask_col);
    const int64_t step = m.stride[3];
    if (!same)
      for (int64_t j = 0; j < t.keys; ++j) s[j * width + y] = from[j * step] ? s[j * width + y] : -__builtin_inff();
    else
      for (int64_t j = 0; j < t.keys; ++j)
        for (int r = 0; r < MR && !from[j * step]; ++r) store(none, s + j * width + r * lanes);
  }
}

// Softcap, bias, ALiBi, mask, causal rule, window and missing pages on the logits of a block.
template <int MR>
static void fix_logits(const unit_run& run, const key_tile& t, int64_t x, bool ragged, float* s) {
  const cqsa_attention_leaf& leaf = run.leaf;
  const scratch& mem = run.mem;
  const int64_t width = MR * lanes;
  const vf none = set(-__builtin_inff());
  if (leaf.softcap > 0) {
    const vf cap = set(float(leaf.softcap)), inv = set(float(1.0 / leaf.softcap));
    for (int64_t j = 0; j < t.keys * MR; ++j) store(mul(cap, tanh(mul(load(s + j * lanes), inv))), s + j * lanes);
  }
  if (leaf.bias.data) apply_bias<MR>(run, t, x, s);
  if (leaf.slopes.data)
    for (int64_t j = 0; j < t.keys; ++j)
      for (int r = 0; r < MR; ++r) {
        float* p = s + j * width + r * lanes;
        const vf far = vabs(sub(load(mem.dist + x + r * lanes), set(float(j))));
        store(fnma(load(mem.slope + x + r * lanes), far, load(p)), p);
      }
  if (leaf.mask.data) apply_mask<MR>(run, t, x, s);
  if (ragged)
    for (int64_t j = 0; j < t.keys; ++j)
      for (int r = 0; r < MR; ++r) {
        float* p = s + j * width + r * lanes;
        const mask seen = between(loadi(mem.lo_rel + x + r * lanes), seti(int32_t(j)), loadi(mem.hi_rel + x + r * lanes));
        store(select(seen, load(p), none), p);
      }
  if (t.has_gone)
    for (int64_t j = 0; j < t.keys; ++j)
      for (int r = 0; r < MR && mem.gone[j]; ++r) store(none, s + j * width + r * lanes);
}

// What the rows of a block see of a tile.
struct sight {
  int64_t end;  // keys from here on are hidden from every row; 0: nothing to do
  bool ragged;  // some row does not see some key below end
};

static sight look(const unit_run& run, const key_tile& t, int64_t x, int64_t width) {
  const scratch& mem = run.mem;
  sight out{0, false};
  int64_t low = 0, high = t.keys;
  for (int64_t y = x; y < x + width; ++y) {
    const int64_t lo = max64(0, min64(t.keys, mem.lo[y] - t.pos));
    const int64_t hi = max64(lo, min64(t.keys, mem.hi[y] - t.pos));
    mem.lo_rel[y] = int32_t(lo);
    mem.hi_rel[y] = int32_t(hi);
    if (hi > lo) out.end = max64(out.end, hi);
    low = max64(low, lo);
    high = min64(high, hi);
  }
  out.ragged = low > 0 || high < out.end;
  return out;
}

template <int MR>
static void block_tile(const unit_run& run, key_tile t, int64_t x) {
  const scratch& mem = run.mem;
  const cqsa_attention_leaf& leaf = run.leaf;
  const sight see = look(run, t, x, MR * lanes);
  if (see.end == 0) return;
  t.keys = see.end;
  float* s = mem.s;
  qk<MR>(mem.qt + x * leaf.head_dim, t.k, t.ldk, leaf.head_dim, t.keys, s);
  if (leaf.slopes.data)
    for (int64_t y = x; y < x + MR * lanes; ++y)
      mem.dist[y] = float(run.unit.q_pos + lane_query(run.unit, min64(y, run.count - 1)) + run.unit.off - t.pos);
  if (see.ragged || t.has_gone || leaf.softcap > 0 || leaf.bias.data || leaf.slopes.data || leaf.mask.data)
    fix_logits<MR>(run, t, x, see.ragged, s);
  float* acc = mem.acc + x * leaf.head_dim_v;
  if (run.careful) {
    softmax<MR, true>(s, t.keys, mem.m + x, mem.l + x, mem.alpha + x);
    pv_careful<MR>(s, t.v, t.ldv, leaf.head_dim_v, t.keys, mem.alpha + x, acc);
  } else {
    softmax<MR, false>(s, t.keys, mem.m + x, mem.l + x, mem.alpha + x);
    pv<MR>(s, t.v, t.ldv, leaf.head_dim_v, t.keys, mem.alpha + x, acc);
  }
}

// All key tiles. Tile borders are at multiples of tile_k from the range's first key, whoever looks at them.
static int32_t walk_keys(const unit_run& run, const cqsa_exec* exec) {
  const cqsa_attention_leaf& leaf = run.leaf;
  int64_t low = run.mem.lo[0], high = run.mem.hi[0], tiles = 0;
  for (int64_t x = 1; x < run.count; ++x) {
    low = min64(low, run.mem.lo[x]);
    high = max64(high, run.mem.hi[x]);
  }
  for (int64_t n = 0; n < run.unit.num_ranges; ++n) {
    const cqsa_rect& range = run.unit.ranges[n];
    const int64_t end = min64(range.k_len, high - range.k_pos);
    int64_t first = max64(0, low - range.k_pos) / leaf.tile_k * leaf.tile_k;
    for (; first < end; first += leaf.tile_k) {
      // Rows past `end` are not even read: their bytes may be anything, and may not be there.
      const key_tile t = load_tile(run, range, first, min64(leaf.tile_k, end - first));
      for_blocks(run.padded, [&](int64_t x, auto block) HWY_ATTR { block_tile<decltype(block)::count>(run, t, x); });
      if ((++tiles & 63) == 0 && exec && exec->poll && exec->poll(exec->user, 0)) return 1;
    }
  }
  return 0;
}

// A NaN in some row's sum may have come from a hidden value: 0 * NaN. Then the unit is computed again, carefully. Inf is
// reported as well (0 * Inf is NaN), which only costs time.
static bool has_nan(const unit_run& run) {
  bool found = false;
  for_blocks(run.padded, [&](int64_t x, auto block) HWY_ATTR {
    constexpr int count = decltype(block)::count;
    const float* acc = run.mem.acc + x * run.leaf.head_dim_v;
    for (int r = 0; r < count; ++r) {
      vf sum = zero();
      for (int64_t c = 0; c < run.leaf.head_dim_v; ++c) sum = fma(load(acc + (c * count + r) * lanes), zero(), sum);
      float lane[lanes];
      storeu(sum, lane);
      for (int i = 0; i < lanes; ++i) found |= lane[i] != lane[i] && x + r * lanes + i < run.count;
    }
  });
  return found;
}

// Turns (m, l) of a lane into what its sums are divided by (alpha), and writes its lse. Returns the factor of the sums.
static float close_row(const unit_run& run, int64_t x) {
  const cqsa_attention_leaf& leaf = run.leaf;
  const work_unit& u = run.unit;
  const float m = run.mem.m[x];
  double top = m, sum = run.mem.l[x], factor = 1.0;
  const bool empty = run.mem.l[x] == 0.0f && m == -__builtin_inff();
  if (empty) factor = 0.0;
  if (leaf.sinks.data) {
    const double sink = load_f32(at(leaf.sinks, 0, lane_head(u, x), 0, 0));
    if (empty) {
      top = sink;
      sum = 1.0;
    } else if (sink != -__builtin_inf()) {
      top = sink > top ? sink : top;
      factor = ::exp(double(m) - top);
      sum = sum * factor + ::exp(sink - top);
    }
  }
  const bool nothing = top == -__builtin_inf() && !(sum != sum);
  if (leaf.lse.data) {
    const float lse = nothing ? -__builtin_inff() : float(top + ::log(sum));
    memcpy((char*)(uintptr_t)at(leaf.lse, u.batch, lane_head(u, x), u.q_row + lane_query(u, x), 0), &lse, 4);
  }
  run.mem.alpha[x] = empty || nothing ? 1.0f : float(sum);
  return float(factor);
}

static void finish_rows(const unit_run& run) {
  const cqsa_attention_leaf& leaf = run.leaf;
  const work_unit& u = run.unit;
  const int64_t dv = leaf.head_dim_v;
  for_blocks(run.padded, [&](int64_t x, auto block) HWY_ATTR {
    constexpr int64_t width = decltype(block)::rows;
    for (int64_t y = 0; y < width && x + y < run.count; ++y) {
      const float factor = close_row(run, x + y), divisor = run.mem.alpha[x + y];
      const float* from = run.mem.acc + x * dv + y;
      float* row = run.mem.row;
      for (int64_t c = 0; c < dv; ++c) row[c] = from[c * width];
      for (int64_t c = 0; c < dv; ++c) row[c] = row[c] * factor / divisor;
      char* to = (char*)(uintptr_t)at(leaf.out, u.batch, lane_head(u, x + y), u.q_row + lane_query(u, x + y), 0);
      store_row(row, leaf.out.dtype, leaf.out.stride[3], dv, run.ops, run.mem.raw, to);
    }
  });
}

static void save_state(const unit_run& run) {
  const cqsa_attention_leaf& leaf = run.leaf;
  const int64_t dv = leaf.head_dim_v;
  for_blocks(run.padded, [&](int64_t x, auto block) HWY_ATTR {
    constexpr int64_t width = decltype(block)::rows;
    for (int64_t y = 0; y < width && x + y < run.count; ++y) {
      const int64_t row = state_index(run, x + y);
      const float* from = run.mem.acc + x * dv + y;
      float* to = leaf.state_acc + row * dv;
      for (int64_t c = 0; c < dv; ++c) to[c] = from[c * width];
      leaf.state_m[row] = run.mem.m[x + y];
      leaf.state_l[row] = run.mem.l[x + y];
    }
  });
}

static bool in_place(const cqsa_attention_leaf& leaf, const cqsa_view& x) {
  return x.dtype == CQSA_DTYPE_F32 && x.stride[3] == 1 && !leaf.page_table && (uintptr_t(x.data) & 3) == 0;
}

static int32_t run_unit(const cqsa_attention_leaf* leaf, const work_unit* unit, const scratch* mem, const scalar_ops* ops,
                        const cqsa_exec* exec) {
  unit_run run{*leaf, *unit, *mem, ops, unit->q_len * unit->heads, 0, false, false, false};
  run.padded = (run.count + lanes - 1) / lanes * lanes;
  run.k_direct = in_place(*leaf, leaf->k);
  // Values are read down their columns: with many rows that repay a copy, a stride that maps all keys to a few cache sets
  // costs more.
  run.v_direct = in_place(*leaf, leaf->v) && run.padded <= 2 * lanes;
  pack_queries(run);
  for (int attempt = 0; attempt < 2; ++attempt) {
    run.careful = attempt == 1;
    begin_rows(run);
    if (walk_keys(run, exec)) return 1;
    if (!has_nan(run)) break;
  }
  if (leaf->flags & CQSA_LEAF_STATE_OUT) save_state(run);
  else finish_rows(run);
  return 0;
}

static void exp_array(const float* in, float* out, int64_t n) {
  for (int64_t i = 0; i + lanes <= n; i += lanes) storeu(exp(loadu(in + i)), out + i);
}

static void tanh_array(const float* in, float* out, int64_t n) {
  for (int64_t i = 0; i + lanes <= n; i += lanes) storeu(tanh(loadu(in + i)), out + i);
}

}  // namespace HWY_NAMESPACE
}  // namespace
}  // namespace cqsa::cpu
HWY_AFTER_NAMESPACE();
