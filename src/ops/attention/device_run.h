// SPDX-License-Identifier: Apache-2.0
// What the schedules of a device run share: one attempt at the run, its groups, and leaf and tiles of a group.
#pragma once
#include "ops/attention/device_session.h"

namespace cqsa {

// A part of the problem that is still to be done: batch items, key heads, query rows (of every sequence, clipped to it).
struct device_region {
  int64_t item_begin, item_end, head_begin, head_end, row_begin, row_end;
};

// Batch items and key heads that are worked on together, and the one sequence's lengths (of all items where they are alike).
struct device_group {
  int64_t item, items, head, heads, q_head, q_heads;
  int64_t q_first, k_first;  // varlen: first rows of the segment in q and k
  int64_t seqlen_q, seqlen_k;
  const int32_t* pages;      // paged: ids of the sequence's pages in host memory
  int64_t page_stride;
};

// Query rows [q, q + rows) of a group.
struct query_tile {
  device_group group;
  int64_t q, rows;
};

struct device_run;

// Hears of every tile whose outputs are in the host's memory, in order.
class tile_listener {
 public:
  virtual cqsa_status finished(device_run& run, const query_tile& tile) = 0;

 protected:
  ~tile_listener() = default;
};

struct device_run {
  run_state& run;
  const cqsa_attention_leaf& whole;
  const attention_problem& problem;
  const cqsa_attention_impl* impl;
  schedule_choice choice;
  device_geometry g;
  mapped_pages pages{problem};  // before the session, whose threads read from its files
  device_session session;
  tile_listener* listener = nullptr;
  query_tile unfinished{};  // after a failure: where to go on; what comes before has left the device

  device_run(run_state& r, const cqsa_attention_leaf& leaf, const cqsa_attention_impl* i, const schedule_choice& c)
      : run(r), whole(leaf), problem(r.plan->problem), impl(i), choice(c), g(geometry_of(problem, c)),
        session(*r.plan->context, run.info) {}

  cqsa_status open(const budget& limit);
  // Values of the index arrays, of the host's own copy where they are on the device.
  int64_t first_row(const void* cu_seqlens, int64_t item) const;
  cqsa_status make_group(int64_t item, int64_t items, int64_t head, int64_t heads, device_group& out);

  // The leaf of a group, without data but for the small operands (slopes, sinks, whole scale tensors).
  cqsa_attention_leaf leaf_of(const device_group&) const;
  // Operands of a group: the caller's view, moved to the group's first item, head and row.
  cqsa_view q_of(const device_group&) const;
  cqsa_view keys_of(const cqsa_view& operand, const device_group&) const;   // k, v and scales
  cqsa_view plane_of(const cqsa_view& operand, const device_group&) const;  // mask and bias
  cqsa_view out_of(const cqsa_view& operand, const device_group&) const;    // out and lse

  cqsa_status launch(const cqsa_attention_leaf& leaf) { return session.launch(*impl, leaf); }
  // Query rows that are done, times batch items and key heads, are what progress counts.
  cqsa_status done(const device_group& group, int64_t rows) { return poll_run(run, rows * group.items * group.heads); }
  int64_t progress_total() const;
  // varlen: where the rows past the last segment begin, and their values in host memory.
  int64_t last_segment_end() const { return first_row(cu_seqlens_q_, whole.batch); }
  void clear_host_rows() const;

 private:
  cqsa_status copy_indices();
  cqsa_status check_indices() const;
  cqsa_status upload_small();

  const void *cu_seqlens_q_ = nullptr, *cu_seqlens_k_ = nullptr, *seqused_k_ = nullptr;  // readable by the host
  cqsa_view slopes_{}, sinks_{}, k_scale_{}, v_scale_{};
};

// The schedules. Both leave `unfinished` behind when they fail.
cqsa_status run_device_stream(device_run&, const device_region&);
cqsa_status run_device_cqs(device_run&, const device_region&);

// ---- views and tiles -------------------------------------------------------------------------------------------------------------

cqsa_view moved(cqsa_view view, int64_t axis0, int64_t axis1, int64_t axis2, int64_t axis3);
// Compact device memory as a view; an axis of size 1 gets stride 0, so that a broadcast one stays so.
cqsa_view compact_view(void* data, cqsa_dtype dtype, const int64_t (&extent)[4]);
// `place`: CQSA_MEMORY_* of the operand.
host_tile tile_of(const cqsa_view& operand, const int64_t (&extent)[4], int32_t place);
// A mask or a bias for `rows` queries and `keys` keys of a group: its tile in host memory, and a view of what was fetched of it.
host_tile plane_tile(const cqsa_view& plane, uint32_t broadcast, const device_group&, int64_t rows, int64_t keys, int32_t place);
cqsa_view plane_view(const cqsa_view& plane, uint32_t broadcast, const device_group&, int64_t rows, int64_t keys, void* data);
// Scales of a key, of which there are `bytes`; 0: none.
int64_t scale_groups(const cqsa_view& scale, int64_t bytes);
// An operand that no rectangle of the call reads.
cqsa_view unread_view(const cqsa_view& like, void* somewhere);

}  // namespace cqsa
