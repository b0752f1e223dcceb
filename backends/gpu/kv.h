// SPDX-License-Identifier: Apache-2.0
// What a plugin puts into its cqsa_backend_v1 for key-value caches; kv_leaf.cpp. One launch each, without memory.
#pragma once

#include "backends/cqsa_backend.h"

namespace cqsa::gpu {

cqsa_status portable_kv_append(void* device, const cqsa_kv_leaf* leaf, const cqsa_exec* exec, void* stream);
cqsa_status portable_kv_gather(void* device, const cqsa_kv_leaf* leaf, const cqsa_exec* exec, void* stream);
cqsa_status portable_hadamard(void* device, const cqsa_hadamard_leaf* leaf, const cqsa_exec* exec, void* stream);

}  // namespace cqsa::gpu
