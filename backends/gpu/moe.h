// SPDX-License-Identifier: Apache-2.0
// What a plugin puts into its cqsa_backend_v1 for mixtures of experts; moe_leaf.cpp, moe_parts_leaf.cpp.
#pragma once

#include "backends/cqsa_backend.h"

namespace cqsa::gpu {

extern const cqsa_moe_impl portable_moe;
cqsa_status portable_moe_route(void* device, const cqsa_moe_route_leaf* leaf, const cqsa_exec* exec, void* stream);
cqsa_status portable_moe_group(void* device, const cqsa_moe_group_leaf* leaf, const cqsa_exec* exec, void* stream);
cqsa_status portable_moe_quantize(void* device, const cqsa_moe_quantize_leaf* leaf, const cqsa_exec* exec, void* stream);
cqsa_status portable_moe_combine(void* device, const cqsa_moe_combine_leaf* leaf, const cqsa_exec* exec, void* stream);

}  // namespace cqsa::gpu
