// SPDX-License-Identifier: Apache-2.0
// One work unit: pack its queries, walk over its key tiles, finish its rows.
#pragma once

#if defined(CQSA_PAIRS)
#include "engine_pairs-inl.h"
#else
#include "engine_f32-inl.h"
#endif

#include <math.h>

HWY_BEFORE_NAMESPACE();
namespace cqsa::cpu {
namespace {
namespace HWY_NAMESPACE {

// Visible key positions lo <= j < hi of query position i, before clipping to a range.
static inline void visible_range(const cqsa_attention_leaf& leaf, int64_t i, int64_t off, int64_t* lo, int64_t* hi) {
  const int64_t far = int64_t(1) << 60;
  const int64_t p = i + off;
  *lo = leaf.window_left < 0 ? -far : p - min64(leaf.window_left, far);
  *hi = leaf.window_right < 0 ? far : p + min64(leaf.window_right, far) + 1;
  if (leaf.causal != CQSA_CAUSAL_NONE) *hi = min64(*hi, p + 1);
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
  float factor = engine::scores<MR>(run, t, x);
  if (leaf.slopes.data)
    for (int64_t y = x; y < x + MR * lanes; ++y)
      mem.dist[y] = float(run.unit.q_pos + lane_query(run.unit, min64(y, run.count - 1)) + run.unit.off - t.pos);
  if (see.ragged || t.has_gone || leaf.softcap > 0 || leaf.bias.data || leaf.slopes.data || leaf.mask.data) {
    scale_logits(s, t.keys * MR, factor);
    factor = 1.0f;
    fix_logits<MR>(run, t, x, see.ragged, s);
  }
  engine::add_values<MR>(run, t, x, factor);
}

// The caller's function may do anything, another attention on this thread included.
static bool poll(const cqsa_exec* exec) {
  engine::close();
  const bool stop = exec->poll(exec->user, 0) != 0;
  engine::open();
  return stop;
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
      const key_tile t = engine::load_tile(run, range, first, min64(leaf.tile_k, end - first));
      for_blocks(run.padded, [&](int64_t x, auto block) HWY_ATTR { block_tile<decltype(block)::count>(run, t, x); });
      if ((++tiles & 63) == 0 && exec && exec->poll && poll(exec)) return 1;
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

// The unnormalised rows of a unit. Non-zero when told to stop.
static int32_t compute_unit(unit_run& run, const cqsa_exec* exec) {
  engine::pack_queries(run);
  for (int attempt = 0; attempt < 2; ++attempt) {
    run.careful = attempt == 1;
    begin_rows(run);
    if (walk_keys(run, exec)) return 1;
    if (!has_nan(run)) break;
  }
  return 0;
}

static int32_t run_unit(const cqsa_attention_leaf* leaf, const work_unit* unit, const scratch* mem, const scalar_ops* ops,
                        const cqsa_exec* exec) {
  unit_run run{*leaf, *unit, *mem, ops, unit->q_len * unit->heads, 0, false, false, false, false, false, 1.0f, 1.0f};
  run.padded = (run.count + lanes - 1) / lanes * lanes;
  engine::begin(run);
  engine::open();
  const int32_t stopped = compute_unit(run, exec);
  engine::close();
  if (stopped) return stopped;
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
