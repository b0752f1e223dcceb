// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "context.h"
#include "error.h"

namespace cqsa {

// cqsa_kv_append, cqsa_kv_gather and cqsa_hadamard: checks, then one leaf call.
enum class kv_direction { append, gather };
cqsa_status kv_rows(const cqsa_context& context, const cqsa_kv_args* args, kv_direction direction, void* stream);
cqsa_status hadamard(const cqsa_context& context, const cqsa_tensor* x, const cqsa_tensor* out, void* stream);

}  // namespace cqsa
