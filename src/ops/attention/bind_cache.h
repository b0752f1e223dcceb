// SPDX-License-Identifier: Apache-2.0
// A run with the operands of an earlier one of its plan, but for their addresses, needs none of their checks again but those that
// addresses decide. Each thread keeps its last few; only on backends with memory of their own, with every operand in it.
#pragma once
#include "ops/attention/plan.h"

namespace cqsa {

// False: the operands differ in more than addresses, or their addresses (that of a workspace too) want a closer look.
bool bind_again(const cqsa_plan&, const cqsa_attention_args&, cqsa_attention_leaf& leaf_out);

// `leaf` is what the operands were bound to, without complaint.
void remember_binding(const cqsa_plan&, const cqsa_attention_args&, const cqsa_attention_leaf& leaf);

}  // namespace cqsa
