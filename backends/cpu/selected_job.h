// SPDX-License-Identifier: Apache-2.0
// What passes between the part of the CPU's attention over selected cells that is compiled once (selected_plan.cpp) and the part
// that is compiled once per instruction set (selected_<target>.cpp). Plain data and declarations only, as in attention_job.h.
#pragma once

#include "attention_job.h"

namespace cqsa::cpu {

// One piece of work: the query heads first_head .. first_head + rows of one key head, for one query.
struct selected_unit {
  int64_t query, kv_head, first_head, rows;
};

inline constexpr int selected_tile = 32;  // cells worked on at a time: a multiple of every target's lanes

// The scratch of one worker. Rows of f32 are padded with zeros to whole vectors of any target.
struct selected_scratch {
  float* q;          // [row][ldk], scaled
  float* tile;       // [cell][ldk] keys, then [cell][ldv] values
  float* s;          // [row][selected_tile]: logits, then probabilities
  float* acc;        // [row][ldv]
  float* m;          // per row: largest logit so far
  float* l;          // per row: sum of exp(s - m)
  float* alpha;      // per row: exp(old m - new m)
  float* scales;     // [cell][group]
  uint16_t* codes;   // .. as they are stored
  float* line;       // a row of anything
  char* raw;         // a row of anything as it is stored
  int64_t ldk, ldv;
};

struct selected_target {
  void (*run_unit)(const cqsa_selected_leaf* leaf, const selected_unit* unit, const selected_scratch* mem, const scalar_ops* ops);
};

extern const selected_target selected_baseline;
#if defined(CQSA_CPU_X86)
extern const selected_target selected_avx2;
extern const selected_target selected_avx512;
#endif

// selected_reference.cpp
extern const cqsa_selected_impl selected_reference_impl;
// selected_plan.cpp: cpu_avx512, cpu_avx2, cpu_baseline, cpu_reference
extern const cqsa_selected_impl* selected_impls(int32_t* count);

}  // namespace cqsa::cpu
