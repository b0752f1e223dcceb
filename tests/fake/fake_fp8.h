// SPDX-License-Identifier: Apache-2.0
// FP8 on the fake device: addresses checked and translated, workspaces looked at when a leaf runs, and all of it computed by the CPU
// backend. What a device finds out too late to refuse (a ring, a workspace, a static scale) goes into counters[3].
#pragma once
#include <functional>
#include <string>

#include "backends/cqsa_backend.h"

namespace fake {

using work_fn = std::function<void()>;

// "" with the work in work_out, or what is wrong with the call.
std::string prepare_fp8(const cqsa_fp8_quantize_leaf& leaf, void* workspace, uint64_t bytes, work_fn& work_out);
std::string prepare_fp8(const cqsa_fp8_dequantize_leaf& leaf, work_fn& work_out);
std::string prepare_fp8(const cqsa_fp8_scale_leaf& leaf, work_fn& work_out);
std::string prepare_fp8(const cqsa_fp8_transpose_leaf& leaf, work_fn& work_out);
std::string prepare_fp8(const cqsa_fp8_ring_leaf& leaf, work_fn& work_out);
std::string prepare_fp8(const cqsa_fp8_gemm_leaf& leaf, void* workspace, uint64_t bytes, work_fn& work_out);
std::string prepare_fp8_workspace(void* workspace, uint64_t bytes, work_fn& work_out);

// A header, and for each job that reduces over the whole tensor 64 bytes.
uint64_t fp8_workspace_of(const cqsa_fp8_quantize_leaf* leaf, int64_t workers);
// 256 bytes from k = 64 on.
uint64_t fp8_gemm_workspace_of(const cqsa_fp8_gemm_leaf* leaf, int64_t workers);
// Like a vendor's: k is a multiple of 16, data is aligned.
cqsa_status fp8_vendor_probe(void* device, const cqsa_fp8_gemm_leaf* leaf, char* reason, uint64_t size);
cqsa_status fp8_own_probe(void* device, const cqsa_fp8_gemm_leaf* leaf, char* reason, uint64_t size);

}  // namespace fake
