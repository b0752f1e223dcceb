// SPDX-License-Identifier: Apache-2.0
// The parts of a mixture of experts that are operations of their own, cqsa.h section 17: checks, then one leaf call each.
#pragma once
#include "context.h"
#include "error.h"

namespace cqsa::moe {

cqsa_status route(const cqsa_context&, const cqsa_moe_route_args* args, void* stream);
cqsa_status group(const cqsa_context&, const cqsa_moe_group_args* args, void* stream);
cqsa_status quantize_activations(const cqsa_context&, const cqsa_tensor* x, const cqsa_tensor* codes, const cqsa_tensor* scales, void* stream);
cqsa_status combine(const cqsa_context&, const cqsa_moe_combine_args* args, void* stream);

}  // namespace cqsa::moe
