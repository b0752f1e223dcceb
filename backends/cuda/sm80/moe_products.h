// SPDX-License-Identifier: Apache-2.0
// What the mixture of experts of sm_80 and that of Hopper share on the host.
#pragma once

#include <initializer_list>

#include "backends/gpu/moe_fill.h"

namespace cqsa::gpu {

const char* why_no_halves(const cqsa_moe_leaf& leaf);
// The order of halves for weights of these formats: 1 where all are Q2_0 (moe_order.cuh).
int32_t moe_order_of(std::initializer_list<const cqsa_moe_set*> sets);
// Few tokens, by codes, of weights that are all Q2_0.
bool takes_few_of_q2(const cqsa_moe_leaf& leaf, const moe_plan& plan);
cqsa_status sm80_moe_products(const moe_call& call, const moe_layer& layer);

}  // namespace cqsa::gpu
