// SPDX-License-Identifier: Apache-2.0
// FP8 on the CPU: what its files have in common.
#pragma once

#include "attention_job.h"

namespace cqsa::cpu {

// fp8_reference.cpp: one element after the other, by the text of cqsa.h. What the fast code is compared with.
bool fp8_is_skipped(const cqsa_fp8_job& job);
cqsa_status fp8_check_jobs(const cqsa_fp8_quantize_leaf* leaf);  // rings and static scales that are there to be read
void fp8_publish(const cqsa_fp8_job& job, uint32_t amax_bits, const int64_t counts[3]);  // amax, counters, ring
void fp8_quantize_job_reference(const cqsa_fp8_job& job);
cqsa_status fp8_quantize_reference(const cqsa_fp8_quantize_leaf* leaf);
cqsa_status fp8_dequantize_reference(const cqsa_fp8_dequantize_leaf* leaf);
cqsa_status fp8_transpose_reference(const cqsa_fp8_transpose_leaf* leaf);
extern const cqsa_fp8_gemm_impl fp8_gemm_reference_impl;

// fp8_rings.cpp
bool fp8_ring_is_sound(const cqsa_fp8_ring& ring);
void fp8_ring_take(const cqsa_fp8_ring& ring, float amax);
void fp8_ring_stage(const cqsa_fp8_ring& ring, float amax);
cqsa_status fp8_rings(void* device, const cqsa_fp8_ring_leaf* leaf, const cqsa_exec* exec, void* stream);
cqsa_status fp8_scale(void* device, const cqsa_fp8_scale_leaf* leaf, const cqsa_exec* exec, void* stream);
cqsa_status fp8_workspace_init(void* device, void* workspace, uint64_t bytes, void* stream);

// The rest of what the backend's struct has.
uint64_t fp8_quantize_workspace(const cqsa_fp8_quantize_leaf* leaf, int64_t workers);
cqsa_status fp8_quantize(void* device, const cqsa_fp8_quantize_leaf* leaf, void* workspace, uint64_t bytes, const cqsa_exec* exec, void* stream);
cqsa_status fp8_dequantize(void* device, const cqsa_fp8_dequantize_leaf* leaf, const cqsa_exec* exec, void* stream);
cqsa_status fp8_transpose(void* device, const cqsa_fp8_transpose_leaf* leaf, const cqsa_exec* exec, void* stream);
const cqsa_fp8_gemm_impl* fp8_gemm_impls(int32_t* count);

}  // namespace cqsa::cpu
