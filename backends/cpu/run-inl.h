// SPDX-License-Identifier: Apache-2.0
// What a work unit has in hand, shared by the part that is the same for all kernels (unit-inl.h) and by the product engines
// (engine_f32-inl.h, engine_pairs-inl.h).
//
// An engine is a struct of static functions:
//   begin                 what holds for the whole unit
//   open, close           around products: processor state that the thread must not keep
//   pack_queries          q into mem, lanes over rows
//   load_tile             a tile of keys and values, ready to be multiplied
//   scores<MR>            logits of a block with a tile; returns a factor they still lack
//   add_values<MR>        softmax of the block and the sums over values
#pragma once

#include "convert-inl.h"
#include "kernel-inl.h"

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
  // The f32 engine's:
  bool k_direct;   // k is read in place
  bool v_direct;
  // The pairs engine's:
  bool k_each, v_each;   // a factor of its own for each key, in mem.k_factor and mem.v_factor
  float k_gain, v_gain;  // otherwise one for all: softmax_scale and the scale of k; the scale of v
};

// A tile of keys of one range, ready to be multiplied.
struct key_tile {
  const float* k;   // f32 engine
  const float* v;
  int64_t ldk, ldv;
  int64_t row;      // of its first key in k and v
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

// Multiplies the logits of a block, n vectors, by the factor they still lack.
static void scale_logits(float* s, int64_t n, float factor) {
  if (factor == 1.0f) return;
  const vf f = set(factor);
  for (int64_t i = 0; i < n; ++i) store(mul(load(s + i * lanes), f), s + i * lanes);
}

// Where a key of a unit's batch item really lies: batch item or page, and row in it. False on page -1.
static inline bool locate_key(const unit_run& run, int64_t key, int64_t* item, int64_t* row) {
  const cqsa_attention_leaf& leaf = run.leaf;
  *item = run.unit.batch;
  *row = key;
  if (!leaf.page_table) return true;
  int32_t page;  // the table may stand at any address
  memcpy(&page, leaf.page_table + *item * leaf.page_table_stride[0] + key / leaf.page_size * leaf.page_table_stride[1],
         sizeof page);
  *item = page;
  *row = key % leaf.page_size;
  return page >= 0;
}

}  // namespace HWY_NAMESPACE
}  // namespace
}  // namespace cqsa::cpu
HWY_AFTER_NAMESPACE();
