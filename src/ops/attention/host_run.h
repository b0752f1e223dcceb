// SPDX-License-Identifier: Apache-2.0
// What the runs of a host backend share: the memory of a run, one leaf call, and views of a part of the problem.
#pragma once
#include "ops/attention/decompose.h"
#include "ops/attention/plan.h"

namespace cqsa {

// What a host run keeps in its arena.
struct host_layout {
  void* header;
  float *acc, *m, *l;  // CQS: state of all rows of a group; windows of mapped operands: of the resident rows
  cqs_block* blocks;
  cqsa_rect* rects;
  void* leaf;
  uint64_t leaf_bytes;
};

// One leaf call on the context's threads. counts: the leaf's tiles are the run's tiles.
cqsa_status launch_host(run_state& run, const cqsa_attention_leaf& leaf, const host_layout& layout, bool counts);

// The part of the problem that belongs to batch item `batch` and the key heads from `head` on. Views only: what describes the
// lengths of sequences stays as it is.
cqsa_attention_leaf group_leaf(const cqsa_attention_leaf& whole, const schedule_choice& choice, int64_t batch, int64_t head,
                               int64_t heads);

}  // namespace cqsa
