// SPDX-License-Identifier: Apache-2.0
// What a plugin puts into its cqsa_backend_v1 for FP8 but for the product; fp8_leaf.cpp, fp8_small_leaf.cpp.
#pragma once

#include "backends/cqsa_backend.h"

namespace cqsa::gpu {

uint64_t portable_fp8_quantize_workspace(const cqsa_fp8_quantize_leaf* leaf, int64_t workers);
cqsa_status portable_fp8_quantize(void* device, const cqsa_fp8_quantize_leaf* leaf, void* workspace, uint64_t bytes, const cqsa_exec* exec, void* stream);
cqsa_status portable_fp8_workspace_init(void* device, void* workspace, uint64_t bytes, void* stream);
cqsa_status portable_fp8_dequantize(void* device, const cqsa_fp8_dequantize_leaf* leaf, const cqsa_exec* exec, void* stream);
cqsa_status portable_fp8_scale(void* device, const cqsa_fp8_scale_leaf* leaf, const cqsa_exec* exec, void* stream);
cqsa_status portable_fp8_transpose(void* device, const cqsa_fp8_transpose_leaf* leaf, const cqsa_exec* exec, void* stream);
cqsa_status portable_fp8_rings(void* device, const cqsa_fp8_ring_leaf* leaf, const cqsa_exec* exec, void* stream);

}  // namespace cqsa::gpu
