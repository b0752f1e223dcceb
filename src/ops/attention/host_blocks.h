// SPDX-License-Identifier: Apache-2.0
// Runs of a host backend in blocks: some rows of some heads of one batch item at a time. For operands in mapped files, whose
// pages are let go behind the block, and for runs with a checkpoint, where a block is what is finished or not.
#pragma once
#include "ops/attention/host_run.h"

namespace cqsa {

// Stream over mapped operands: blocks of choice.tile_q rows, windows of choice.tile_k keys.
bool in_windows(const attention_problem&, const schedule_choice&);

// The most keys that `rows` neighbouring rows see, when windows begin at multiples of `step`.
int64_t most_keys_of_rows(const attention_problem&, int64_t rows, int64_t step);

// Some block has more than one window.
bool has_several_windows(const attention_problem&, const schedule_choice&);

// Leaf calls of in_windows() runs (varlen: at most).
int64_t window_tasks(const attention_problem&, const schedule_choice&);

cqsa_status run_blocks(run_state& run, const cqsa_attention_leaf& whole, const host_layout& layout);

}  // namespace cqsa
