// SPDX-License-Identifier: Apache-2.0
// The weights of one projection: every expert's matrix checked, then as a leaf sees them.
#pragma once
#include "ops/fp8/operands.h"

namespace cqsa::moe {

// Memory that the call writes: no matrix may share any of it.
struct byte_range {
  uintptr_t low, high;
  const char* name;
};
struct written {
  byte_range ranges[3];
  int count = 0;
  void add(const byte_range& range) { ranges[count++] = range; }
  void add(const cqsa_tensor* t, const char* name);  // an output, checked; nullptr: none
};

// Sizes, formats and numbers of a projection; not where its memory is.
cqsa_status read_set(const cqsa_context& context, const cqsa_moe_weights* caller, const char* name, cqsa_moe_set& out);

// Memory of every matrix that is there: of the device, and apart from what is written.
cqsa_status check_memory(fp8::operand_list& list, const cqsa_moe_set& set, const char* name, const written& outputs);

// Whether an expert has data; on a host backend.
bool has_data(const cqsa_moe_set& set, int64_t expert);

}  // namespace cqsa::moe
