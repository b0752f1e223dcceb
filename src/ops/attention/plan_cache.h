// SPDX-License-Identifier: Apache-2.0
// The last few plans that a thread's one-shot calls made on a device. Only plans that depend on nothing but the params and the
// rates known of the machine: one leaf call on what is on the device already.
#pragma once
#include "ops/attention/plan.h"

namespace cqsa {

// False: not here. `params` are as copied from the caller, with zero in bytes that he did not give. A copy, since a callback of
// the run may make other plans.
bool find_cached_plan(const cqsa_context&, const cqsa_attention_params& params, cqsa_plan& plan_out);

void cache_plan(const cqsa_context&, const cqsa_attention_params& params, const cqsa_plan&);

}  // namespace cqsa
