// SPDX-License-Identifier: Apache-2.0
// The mixture of experts by portable kernels.
#include "moe.h"
#include "moe_fill.h"

#include <cstdio>

namespace cqsa::gpu {
namespace {

cqsa_status probe(void*, const cqsa_moe_leaf* leaf, char* reason, uint64_t size) {
  const char* text = why_no_moe(*leaf);
  if (text && reason && size) std::snprintf(reason, size, "%s", text);
  return text ? CQSA_ERROR_UNSUPPORTED : CQSA_OK;
}

uint64_t workspace(const cqsa_moe_leaf* leaf, int64_t) {
  moe_memory unused{};
  return moe_carve(*leaf, moe_plan_of(*leaf, 0), nullptr, &unused);
}

cqsa_status launch_leaf(void* device, const cqsa_moe_leaf* leaf, void* memory, uint64_t bytes, const cqsa_exec*, void* stream) {
  return moe_run(device, *leaf, moe_plan_of(*leaf, 0), memory, bytes, stream, moe_portable_products);
}

}  // namespace

extern const cqsa_moe_impl portable_moe = {"gpu_portable", "any GPU; every format, size and stride", probe, workspace, launch_leaf};

}  // namespace cqsa::gpu
