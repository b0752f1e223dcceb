// SPDX-License-Identifier: Apache-2.0
// The product engine that computes in f32: k and v of any type are read in place when they are f32, else converted for the
// tile. See run-inl.h for what an engine is.
#pragma once

#include "run-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cqsa::cpu {
namespace {
namespace HWY_NAMESPACE {

// One row of k or v in f32, scaled.
static void load_kv_row(const cqsa_view& x, const cqsa_view& scale, int32_t kind, int64_t group, int64_t b, int64_t g,
                        int64_t row, int64_t n, const scalar_ops* ops, char* raw, float* to) {
  load_row(at(x, b, g, row, 0), x.dtype, x.stride[3], n, raw, to);
  if (kind == CQSA_SCALE_NONE) return;
  if (kind != CQSA_SCALE_GROUP) {
    const float f = row_scale(scale, kind, b, g, row);
    for (int64_t c = 0; c < n; ++c) to[c] *= f;
    return;
  }
  for (int64_t c = 0; c < n; c += group) {
    uint16_t code;
    memcpy(&code, at(scale, b, g, row, c / group), 2);
    const float f = ops->f16_to_f32(code);
    const int64_t end = min64(n, c + group);
    for (int64_t i = c; i < end; ++i) to[i] *= f;
  }
}

struct engine {
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

  static bool in_place(const cqsa_attention_leaf& leaf, const cqsa_view& x) {
    return x.dtype == CQSA_DTYPE_F32 && x.stride[3] == 1 && !leaf.page_table && (uintptr_t(x.data) & 3) == 0;
  }

  static void begin(unit_run& run) {
    run.k_direct = in_place(run.leaf, run.leaf.k);
    // Values are read down their columns: with many rows that repay a copy, a stride that maps all keys to a few cache sets
    // costs more.
    run.v_direct = in_place(run.leaf, run.leaf.v) && run.padded <= 2 * lanes;
  }
  static void open() {}
  static void close() {}

  // Tile of keys first .. first + keys of a range, converted to f32 in the scratch unless it can be read where it is.
  static key_tile load_tile(const unit_run& run, const cqsa_rect& range, int64_t first, int64_t keys) {
    const cqsa_attention_leaf& leaf = run.leaf;
    const work_unit& u = run.unit;
    const scratch& mem = run.mem;
    const int64_t row0 = range.k_row + first;
    key_tile t{mem.k, mem.v, mem.ldk, mem.ldv, row0, range.k_pos + first, row0 + u.mask_col_shift, keys, false};
    if (run.k_direct) {
      t.k = (const float*)at(leaf.k, u.batch, u.kv_head, row0, 0);
      t.ldk = leaf.k.stride[2];
    }
    if (run.v_direct) {
      t.v = (const float*)at(leaf.v, u.batch, u.kv_head, row0, 0);
      t.ldv = leaf.v.stride[2];
    }
    if (run.k_direct && run.v_direct) return t;
    for (int64_t j = 0; j < keys; ++j) {
      int64_t b, row;
      const bool here = locate_key(run, row0 + j, &b, &row);
      if (leaf.page_table) mem.gone[j] = !here;
      if (!here) {
        t.has_gone = true;
        memset(mem.k + j * mem.ldk, 0, size_t(leaf.head_dim) * sizeof(float));
        memset(mem.v + j * mem.ldv, 0, size_t(leaf.head_dim_v) * sizeof(float));
        continue;
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

  template <int MR> static HWY_INLINE float scores(const unit_run& run, const key_tile& t, int64_t x) {
    const int64_t depth = run.leaf.head_dim;
    qk<f32_dot, MR>(run.mem.qt + x * depth, t.k, t.ldk, depth, t.keys, run.mem.s);
    return 1.0f;
  }

  template <int MR> static HWY_INLINE void add_values(const unit_run& run, const key_tile& t, int64_t x, float) {
    const scratch& mem = run.mem;
    const int64_t channels = run.leaf.head_dim_v;
    float* acc = mem.acc + x * channels;
    if (run.careful) {
      softmax<MR, true>(mem.s, t.keys, mem.m + x, mem.l + x, mem.alpha + x);
      pv_careful<MR>(mem.s, t.v, t.ldv, channels, t.keys, mem.alpha + x, acc);
    } else {
      softmax<MR, false>(mem.s, t.keys, mem.m + x, mem.l + x, mem.alpha + x);
      pv<f32_dot, MR>(mem.s, t.v, t.ldv, channels, t.keys, mem.alpha + x, 1.0f, acc);
    }
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace
}  // namespace cqsa::cpu
HWY_AFTER_NAMESPACE();
