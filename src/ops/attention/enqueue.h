// SPDX-License-Identifier: Apache-2.0
// Enqueue mode: one leaf call on operands that are all on the device goes to the caller's stream, and nobody waits for it.
#pragma once
#include "ops/attention/plan.h"

namespace cqsa {

// Whether the stream can be used with this context at all, and whether it is being captured into a graph. The first thing that
// every call asks; never touches the stream.
cqsa_status query_stream(const cqsa_context&, void* stream, bool& capturing_out);

// What the driver says of addresses. One allocation is one kind of memory, so it is asked once for all operands in it: frameworks
// cut their tensors out of few large ones. For the time of a call: by the next one the memory may have been given back, and the
// address be something else.
class pointer_answers {
 public:
  cqsa_status ask(const cqsa_context&, uintptr_t address, const char* name, cqsa_pointer_info& out);
  // Whether an earlier answer says so; false: nothing is known.
  bool on_device(const cqsa_context&, uintptr_t address) const;

 private:
  static constexpr int most = 4;
  cqsa_pointer_info known_[most];
  int count_ = 0;
};

// Whether the pointer is the kind of memory that its tensor says. Not asked on host backends.
cqsa_status check_pointer(const cqsa_context&, const cqsa_tensor&, const char* name, pointer_answers&);
cqsa_status check_pointers(const cqsa_context&, const cqsa_attention_args&);

// DIRECT with every operand on the device.
bool enqueues(const cqsa_plan&);

// CQSA_ERROR_CAPTURE_UNSAFE when a run cannot become part of a graph: it waits, or it has to allocate.
cqsa_status check_capture(const cqsa_plan&, const cqsa_attention_args&);

// Queues the run on run.stream. Where memory is wanted and cannot be had it falls back to a smaller plan, which blocks. Writes
// what the launch needs into the leaf, in place: copying it takes as long as all its checks.
cqsa_status run_enqueued(run_state&, cqsa_attention_leaf& whole);

}  // namespace cqsa
