// SPDX-License-Identifier: Apache-2.0
// The product engine for q in bf16 with k and v in types whose values are exact in bf16. See run-inl.h for what an engine is.
//
// q, k and v enter the products as they are; every scale is applied in f32: those of k to the logits, with softmax_scale, one
// for all of v to the sums, and those of single values of v to p. So p, rounded to bf16, is all that is ever rounded.
#pragma once

#include "pairs-inl.h"
#include "run-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cqsa::cpu {
namespace {
namespace HWY_NAMESPACE {

static inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// n elements of a row of q, k or v as bf16: where they are, or converted into `room`.
static const uint16_t* bf16_row(const cqsa_view& x, const char* from, int64_t n, const scratch& mem, uint16_t* room) {
  if (x.dtype == CQSA_DTYPE_BF16) {
    if (x.stride[3] == 1 && (uintptr_t(from) & 1) == 0) return (const uint16_t*)from;
    gather_elements(from, x.stride[3], 2, n, (char*)room);
    return room;
  }
  load_row(from, x.dtype, x.stride[3], n, mem.raw, mem.row);
  for (int64_t c = 0; c < n; ++c) {
    uint32_t bits;
    memcpy(&bits, mem.row + c, 4);
    room[c] = uint16_t(bits >> 16);
  }
  return room;
}

static inline bool is_wild(uint16_t x) { return (x & 0x7f80u) == 0x7f80u; }  // NaN or Inf

// A copy of a row without its NaN and Inf. True when there were any.
static bool tame(const uint16_t* from, int64_t n, uint16_t* to) {
  bool any = false;
  for (int64_t c = 0; c < n; ++c) {
    any |= is_wild(from[c]);
    to[c] = is_wild(from[c]) ? 0 : from[c];
  }
  return any;
}

// The scale of channels 32.. of a row, one for each group or one for all.
static float group_scale(const cqsa_view& scale, int32_t kind, int64_t b, int64_t kv_head, int64_t row, int64_t group,
                         const scalar_ops* ops) {
  if (kind != CQSA_SCALE_GROUP) return row_scale(scale, kind, b, kv_head, row);
  uint16_t code;
  memcpy(&code, at(scale, b, kv_head, row, group), 2);
  return ops->f16_to_f32(code);
}

struct engine {
  static int64_t groups_of(const cqsa_attention_leaf& leaf, int32_t kind, int64_t channels) {
    return kind == CQSA_SCALE_GROUP ? (channels + leaf.kv_group - 1) / leaf.kv_group : 1;
  }

  static void begin(unit_run& run) {
    const cqsa_attention_leaf& leaf = run.leaf;
    auto each = [](int32_t kind) { return kind == CQSA_SCALE_TOKEN || kind == CQSA_SCALE_GROUP; };
    run.k_each = each(leaf.scale_k);
    run.v_each = each(leaf.scale_v);
    run.k_gain = float(leaf.softmax_scale);
    if (!run.k_each) run.k_gain *= row_scale(leaf.k_scale, leaf.scale_k, 0, run.unit.kv_head, 0);
    run.v_gain = run.v_each ? 1.0f : row_scale(leaf.v_scale, leaf.scale_v, 0, run.unit.kv_head, 0);
    if (!__builtin_isfinite(run.v_gain)) {  // sums of rows without a key must stay 0
      run.v_each = true;
      run.v_gain = 1.0f;
    }
  }
  static void open() { open_products(); }
  static void close() { close_products(); }

  static void pack_queries(const unit_run& run) {
    const cqsa_attention_leaf& leaf = run.leaf;
    const work_unit& u = run.unit;
    const scratch& mem = run.mem;
    const int64_t depth = leaf.head_dim, depth2 = mem.depth2;
    memset(mem.q2, 0, size_t(run.padded * depth2) * 4);
    for_blocks(run.padded, [&](int64_t x, auto block) HWY_ATTR {
      constexpr int64_t width = decltype(block)::rows;
      for (int64_t y = 0; y < width && x + y < run.count; ++y) {
        const char* from = at(leaf.q, u.batch, lane_head(u, x + y), u.q_row + lane_query(u, x + y), 0);
        const uint16_t* row = bf16_row(leaf.q, from, depth, mem, mem.half);
        uint32_t* to = mem.q2 + x * depth2 + y;
        for (int64_t d = 0; d + 2 <= depth; d += 2) to[d / 2 * width] = uint32_t(row[d]) | uint32_t(row[d + 1]) << 16;
        if (depth % 2) to[depth / 2 * width] = row[depth - 1];
      }
    });
  }

  static void load_factors(const unit_run& run, int64_t j, int64_t b, int64_t row) {
    const cqsa_attention_leaf& leaf = run.leaf;
    const scratch& mem = run.mem;
    const int64_t g = run.unit.kv_head;
    if (run.k_each)
      for (int64_t n = 0; n < groups_of(leaf, leaf.scale_k, leaf.head_dim); ++n)
        mem.k_factor[n * mem.factor_step + j] = run.k_gain * group_scale(leaf.k_scale, leaf.scale_k, b, g, row, n, run.ops);
    if (run.v_each)
      for (int64_t n = 0; n < groups_of(leaf, leaf.scale_v, leaf.head_dim_v); ++n)
        mem.v_factor[n * mem.factor_step + j] = group_scale(leaf.v_scale, leaf.scale_v, b, g, row, n, run.ops);
  }

  // Key j of a tile whose first one is in row row0: k into the tile, v into *v_row (NULL on page -1). True: on page -1.
  static bool load_key(const unit_run& run, int64_t row0, int64_t j, uint16_t* room, const uint16_t** v_row) {
    const cqsa_attention_leaf& leaf = run.leaf;
    const scratch& mem = run.mem;
    const int64_t g = run.unit.kv_head, depth = leaf.head_dim;
    uint16_t* to = (uint16_t*)(mem.k2 + j * mem.ldk);
    int64_t b, row;
    const bool here = locate_key(run, row0 + j, &b, &row);
    if (leaf.page_table) mem.gone[j] = !here;
    mem.wild[j] = 0;
    *v_row = nullptr;
    memset(to + depth, 0, size_t(2 * mem.depth2 - depth) * 2);
    if (!here) {
      memset(to, 0, size_t(depth) * 2);
      return true;
    }
    const uint16_t* from = bf16_row(leaf.k, at(leaf.k, b, g, row, 0), depth, mem, to);
    if (from != to) memcpy(to, from, size_t(depth) * 2);
    *v_row = bf16_row(leaf.v, at(leaf.v, b, g, row, 0), leaf.head_dim_v, mem, room);
    if (run.careful) {
      mem.wild[j] = tame(*v_row, leaf.head_dim_v, room);
      *v_row = room;
    }
    if (run.k_each || run.v_each) load_factors(run, j, b, row);
    return false;
  }

  // v is packed up to a whole step of pairs: beyond the last key p is 0, and v must be a number.
  static key_tile load_tile(const unit_run& run, const cqsa_rect& range, int64_t first, int64_t keys) {
    const scratch& mem = run.mem;
    const int64_t row0 = range.k_row + first, dv = run.leaf.head_dim_v, whole = round_up(keys, 2 * pair_step);
    key_tile t{nullptr, nullptr, 0, 0, row0, range.k_pos + first, row0 + run.unit.mask_col_shift, keys, false};
    if (run.k_each || run.v_each) clear_factors(run);
    for (int64_t j = 0; j < whole; j += 2) {
      const uint16_t *a = nullptr, *b = nullptr;
      if (j < keys) t.has_gone |= load_key(run, row0, j, mem.half, &a);
      if (j + 1 < keys) t.has_gone |= load_key(run, row0, j + 1, mem.half + mem.half_step, &b);
#if defined(CQSA_TILES)
      uint32_t* to = mem.stage + j / 2 % 16 * mem.stage_step;
#else
      uint32_t* to = mem.v2 + j / 2 * mem.ldv;
#endif
      if (!a) {
        memset(mem.half, 0, size_t(dv) * 2);
        a = mem.half;
      }
      join_rows(a, b, dv, to);
#if defined(CQSA_TILES)
      if (j % 32 == 30)
        for (int64_t c = 0; c < dv; c += 16) turn_16(mem.stage + c, mem.stage_step, mem.v2 + c * mem.ldv + j / 32 * 16, mem.ldv);
#endif
    }
    return t;
  }

  // Keys on page -1 have no scales.
  static void clear_factors(const unit_run& run) {
    const cqsa_attention_leaf& leaf = run.leaf;
    const scratch& mem = run.mem;
    memset(mem.k_factor, 0, size_t(mem.factor_step * groups_of(leaf, leaf.scale_k, leaf.head_dim)) * 4);
    memset(mem.v_factor, 0, size_t(mem.factor_step * groups_of(leaf, leaf.scale_v, leaf.head_dim_v)) * 4);
  }

  template <int MR> static float scores(const unit_run& run, const key_tile& t, int64_t x) {
    const cqsa_attention_leaf& leaf = run.leaf;
    const scratch& mem = run.mem;
    const uint32_t* q = mem.q2 + x * mem.depth2;
    if (!run.k_each) {
      qk_pairs<MR>(q, mem.k2, mem.ldk, mem.depth2, t.keys, mem.s);
      return run.k_gain;
    }
    const int64_t groups = groups_of(leaf, leaf.scale_k, leaf.head_dim), each = leaf.kv_group / 2;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t d = g * each, depth2 = groups == 1 ? mem.depth2 : min64(each, mem.depth2 - d);
      float* part = g ? (float*)mem.p2 : mem.s;
      qk_pairs<MR>(q + d * MR * lanes, mem.k2 + d, mem.ldk, depth2, t.keys, part);
      add_scores<MR>(part, t.keys, mem.k_factor + g * mem.factor_step, g == 0, mem.s);
    }
    return 1.0f;
  }

  // Sums over values by groups of channels with scales of their own; p is in s, in f32.
  template <int MR, bool careful> static void add_groups(const unit_run& run, const key_tile& t, int64_t x, int64_t pairs) {
    const cqsa_attention_leaf& leaf = run.leaf;
    const scratch& mem = run.mem;
    const int64_t dv = leaf.head_dim_v, groups = groups_of(leaf, leaf.scale_v, dv);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t c = groups == 1 ? 0 : g * leaf.kv_group, n = groups == 1 ? dv : min64(leaf.kv_group, dv - c);
      if (g == 0 || run.v_each)
        pack_p<MR, careful>(mem.s, t.keys, pairs, run.v_each ? mem.v_factor + g * mem.factor_step : nullptr, mem.p2);
#if defined(CQSA_TILES)
      const uint32_t* v = mem.v2 + c * mem.ldv;
#else
      const uint32_t* v = mem.v2 + c;
#endif
      pv_pairs<MR>(mem.p2, v, mem.ldv, n, pairs, mem.alpha + x, run.v_gain, mem.part, mem.acc + x * dv + c * MR * lanes);
    }
    if (careful) add_wild<MR>(run, t, x);
  }

  // What tame() took out, for the rows that see its key; p of the others is -0.
  template <int MR> static void add_wild(const unit_run& run, const key_tile& t, int64_t x) {
    const cqsa_attention_leaf& leaf = run.leaf;
    const scratch& mem = run.mem;
    const int64_t dv = leaf.head_dim_v;
    for (int64_t j = 0; j < t.keys; ++j) {
      int64_t b, row;
      if (!mem.wild[j] || !locate_key(run, t.row + j, &b, &row)) continue;
      const uint16_t* v = bf16_row(leaf.v, at(leaf.v, b, run.unit.kv_head, row, 0), dv, mem, mem.half);
      for (int64_t c = 0; c < dv; ++c) {
        if (!is_wild(v[c])) continue;
        const int64_t g = leaf.scale_v == CQSA_SCALE_GROUP ? c / leaf.kv_group : 0;
        const uint32_t bits = uint32_t(v[c]) << 16;
        float value;
        memcpy(&value, &bits, 4);
        value *= run.v_each ? mem.v_factor[g * mem.factor_step + j] : run.v_gain;
        for (int r = 0; r < MR; ++r) {
          const vf p = load(mem.s + (j * MR + r) * lanes);
          float* to = mem.acc + x * dv + (c * MR + r) * lanes;
          store(select(same_bits(p, INT32_MIN), load(to), fma(p, set(value), load(to))), to);
        }
      }
    }
  }

  template <int MR> static void add_values(const unit_run& run, const key_tile& t, int64_t x, float factor) {
    const scratch& mem = run.mem;
    const int64_t dv = run.leaf.head_dim_v, pairs = round_up((t.keys + 1) / 2, pair_step);
    if (!run.careful && !run.v_each && factor > 0) {
      softmax_pairs<MR>(mem.s, t.keys, pairs, factor, mem.m + x, mem.l + x, mem.alpha + x);
      pv_pairs<MR>((const uint32_t*)mem.s, mem.v2, mem.ldv, dv, pairs, mem.alpha + x, run.v_gain, mem.part, mem.acc + x * dv);
      return;
    }
    scale_logits(mem.s, t.keys * MR, factor);
    if (run.careful) {
      softmax<MR, true, weight_exp>(mem.s, t.keys, mem.m + x, mem.l + x, mem.alpha + x);
      add_groups<MR, true>(run, t, x, pairs);
    } else {
      softmax<MR, false, weight_exp>(mem.s, t.keys, mem.m + x, mem.l + x, mem.alpha + x);
      add_groups<MR, false>(run, t, x, pairs);
    }
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace
}  // namespace cqsa::cpu
HWY_AFTER_NAMESPACE();
