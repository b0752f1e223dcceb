// SPDX-License-Identifier: Apache-2.0
// What passes between the part of the CPU attention that is compiled once (attention_plan.cpp: probing, tiles, workspace,
// work units, threads) and the part that is compiled once per instruction set (attention_<target>.cpp: one work unit).
//
// Only plain data and declarations: these files are compiled with different flags and must share no inline function.
#pragma once

#include "backends/cqsa_backend.h"

namespace cqsa::cpu {

// One piece of work: some rows of one query head (or of several heads of one key head) against all their keys.
// Lane x of the unit is query x / heads and head head + x % heads.
struct work_unit {
  int64_t batch, head, heads, kv_head;
  int64_t q_len;            // queries; the unit has q_len * heads lanes
  int64_t q_pos, q_row;     // of its first query: global position, row in q, out and lse
  int64_t mask_row;         // .. row in mask and bias
  int64_t state_row;
  int64_t off;              // causality and window compare j with i + off
  int64_t mask_col_shift;   // column in mask and bias = row in k + shift
  const cqsa_rect* ranges;  // key ranges of these queries
  int64_t num_ranges;
  cqsa_rect whole;          // the range itself where the leaf names none
};

// The scratch of one worker. tile_q is a multiple of the target's lanes here.
struct scratch {
  float* qt;        // [block of rows][head_dim][row]: q, scaled and transposed
  float* acc;       // [block of rows][head_dim_v][row]
  float* s;         // [key][row of one block]: logits, then probabilities
  float* k;         // [key][ldk], tile of keys in f32
  float* v;         // [key][ldv]
  float* m;         // per lane: largest logit so far
  float* l;         // per lane: sum of exp(s - m)
  float* alpha;     // per lane: exp(old m - new m); at the end the divisor
  float* slope;     // per lane
  int64_t* lo;      // per lane: visible key positions, lo <= j < hi
  int64_t* hi;
  int32_t* lo_rel;  // .. within the key tile
  int32_t* hi_rel;
  float* dist;      // per lane: i + off - position of the tile's first key
  float* row;       // a row of anything in f32
  char* raw;        // a row of anything as it is stored
  uint8_t* gone;    // per key of a tile: on page -1
  int64_t ldk, ldv;

  // Only where products are of pairs of bf16, instead of qt, k and v. Layouts in pairs-inl.h; counts in dwords.
  uint32_t* q2;
  uint32_t* k2;
  uint32_t* v2;
  uint32_t* p2;       // probabilities as pairs, or a second tile of logits
  uint32_t* stage;    // 16 rows of pairs of values, to be turned around (tiles)
  float* part;        // two times four tiles of sums (tiles)
  float* k_factor;    // [group][key]
  float* v_factor;
  uint16_t* half;     // two rows of anything in bf16
  uint8_t* wild;      // per key of a tile: v has NaN or Inf
  int64_t depth2, stage_step, factor_step, half_step;
};

// Scalar conversions, compiled for the baseline.
struct scalar_ops {
  float (*f16_to_f32)(uint16_t);
  uint16_t (*f32_to_f16)(float);
};

// What the products are made of: it decides the scratch.
enum class products { f32, pairs, tiles };

// How to compute a unit on some instruction set. `block` is the largest number of rows worked on at a time.
struct kernel_target {
  int lanes;
  int block;
  products kind;
  int64_t max_tile_q;
  // Non-zero when told to stop by poll.
  int32_t (*run_unit)(const cqsa_attention_leaf* leaf, const work_unit* unit, const scratch* mem, const scalar_ops* ops,
                      const cqsa_exec* exec);
  void (*exp)(const float* in, float* out, int64_t n);   // for tests
  void (*tanh)(const float* in, float* out, int64_t n);  // for tests
};

extern const kernel_target target_baseline;
#if defined(CQSA_CPU_X86)
extern const kernel_target target_avx2;
extern const kernel_target target_avx512;
extern const kernel_target target_avx512_bf16;
extern const kernel_target target_amx;
#endif

// reference.cpp
extern const cqsa_attention_impl reference_impl;
// attention_plan.cpp: cpu_amx, cpu_avx512_bf16, cpu_avx512, cpu_avx2, cpu_baseline, cpu_reference
extern const cqsa_attention_impl* attention_impls(int32_t* count);
// .. what the entries of a target are made of
cqsa_status probe_leaf(const kernel_target& target, const cqsa_attention_leaf* leaf, char* reason, uint64_t size);
int32_t tiles_of(const kernel_target& target, const cqsa_attention_leaf* leaf, cqsa_leaf_tile* out, int32_t capacity);
uint64_t workspace_of(const kernel_target& target, const cqsa_attention_leaf* leaf, int64_t workers);
int64_t units_of(const kernel_target& target, const cqsa_attention_leaf* leaf);
cqsa_status launch_on(const kernel_target& target, const cqsa_attention_leaf* leaf, void* workspace, uint64_t bytes,
                      const cqsa_exec* exec);
// merge.cpp
cqsa_status merge(void* device, const cqsa_merge_leaf* leaf, const cqsa_exec* exec, void* stream);
// cpu_backend.cpp
cqsa_status fail(cqsa_status status, const char* text);

}  // namespace cqsa::cpu
