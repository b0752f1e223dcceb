// SPDX-License-Identifier: Apache-2.0
// What a run on a device with its own memory allocates, as one function per kind of memory that counts and carves with the
// same code, and what it will move. device_footprint() runs it on nothing, run_device() on the memory itself.
#pragma once
#include "ops/attention/decompose.h"
#include "ops/attention/plan.h"
#include "ops/attention/positions.h"
#include "workspace.h"

namespace cqsa {

// The choice made concrete. Not for one leaf call on operands that are all on the device: that is enqueued, and moves nothing.
struct device_geometry {
  bool cqs;
  bool carries;           // stream: a row's state passes from one leaf call to the next
  bool q_in, kv_in;       // q (with mask, bias and the small operands), k and v (with their scales) come from host memory
  bool out_back;          // out and lse go to host memory
  bool by_item;           // batch items have lengths or places of their own: one item per group
  int64_t items, heads;   // of a full group: batch items, key heads
  int64_t q_heads;
  int64_t rows, keys;     // of a query tile and a key window; CQS: longest list of rows of a task
  int64_t finish_rows;    // CQS: rows that are finished, and leave, at a time
  int64_t buffers;        // windows (CQS: tasks) in flight
  int64_t q_slots, out_slots;
  int64_t rects;          // most rectangles of one leaf call
  cqs_shape shape;

  bool gathers_q() const { return q_in && !resident; }
  bool gathers_kv() const { return kv_in && !resident; }
  bool resident, acc_on_host;  // CQS, as in schedule_choice
};
device_geometry geometry_of(const attention_problem&, const schedule_choice&);

// CQS: mask, bias, q and k do not count rows the same way (some by position, some by place in the task's list), so that every
// block is a leaf call of its own, with views that begin at the block.
bool calls_per_block(const attention_problem&, const device_geometry&);
// The task's blocks of which at least one key is visible to at least one query.
int64_t visible_blocks(const cqs_shape&, const key_band&, int64_t task, cqs_block* blocks_out);
int64_t task_rows(const cqs_segment* segments, int64_t num_segments);

// The largest single transfer of one direction, and the longest line, below which it cannot be cut.
struct transfer_bound {
  uint64_t largest = 0, line = 0;
};

// Stream: keys of a window. CQS: operands of a task (resident ones are the same in all windows) and, with the accumulator on the
// host, the task's partial state.
struct device_window {
  void *q, *k, *v, *k_scale, *v_scale, *mask, *bias;
  float *acc, *m, *l;
};

struct device_layout {
  void* header = nullptr;  // the first bytes of every workspace; also a valid address for operands that are never read
  void *slopes = nullptr, *sinks = nullptr, *k_scale = nullptr, *v_scale = nullptr;  // whole small operands
  void* q[2] = {};         // stream
  device_window windows[3] = {};
  void *out[2] = {}, *lse[2] = {};
  float *acc = nullptr, *m = nullptr, *l = nullptr;
  void* leaf = nullptr;
  uint64_t leaf_bytes = 0;
  transfer_bound in, back;

  void carve(const attention_problem&, const cqsa_attention_impl*, const schedule_choice&, const device_geometry&, arena&);

 private:
  struct carver;
};

struct staging_layout {
  char *in = nullptr, *back = nullptr;
  uint64_t in_stride = 0, back_stride = 0;  // bytes from slot to slot
  void carve(const staging_choice&, arena&);
};

// Pages of mapped operands that are resident at a time: a piece for each thread of each direction.
uint64_t resident_bytes_of_staging(const attention_problem&, const staging_choice&);

struct device_host_layout {
  cqsa_rect* rects = nullptr;
  cqs_segment* segments[2] = {};  // of the task that is issued, and of the one whose state comes back
  cqs_block* blocks[2] = {};
  float *acc = nullptr, *m = nullptr, *l = nullptr;          // CQS: the accumulator of a group
  float *old_factor = nullptr, *new_factor = nullptr;        // .. and what a merge does to each of the task's rows
  void *cu_seqlens_q = nullptr, *cu_seqlens_k = nullptr, *seqused_k = nullptr;  // copies of device-resident ones
  int32_t* pages = nullptr;                                  // copy of one sequence's page ids
  void carve(const attention_problem&, const device_geometry&, arena&);
};

// Size of a mask or bias along an axis, of which `size` elements are wanted.
inline int64_t broadcast_extent(uint32_t bits, uint32_t axis, int64_t size) { return bits & axis ? 1 : size; }

}  // namespace cqsa
