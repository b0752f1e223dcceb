// SPDX-License-Identifier: Apache-2.0
// The last few plans that a thread's one-shot calls made on a device. Only plans that depend on nothing but the params and the
// rates known of the machine: one leaf call on what is on the device already.
#pragma once
#include "ops/attention/plan.h"

namespace cqsa {

// As copied from the caller, with zero in bytes that he did not give, and with what the tensors say.
struct one_shot_params {
  cqsa_attention_params stated, complete;
};

// A plan for complete params. False: not here. A copy, since a callback of the run may make other plans.
bool find_cached_plan(const cqsa_context&, const one_shot_params&, cqsa_plan& plan_out);

// By the params as stated: tensors that differ from those of an earlier run in addresses only say the same. Binds them too.
bool find_repeated(const cqsa_context&, const cqsa_attention_params& stated, const cqsa_attention_args&, cqsa_plan& plan_out,
                   cqsa_attention_leaf& leaf_out);

void cache_plan(const cqsa_context&, const one_shot_params&, const cqsa_plan&);

}  // namespace cqsa
