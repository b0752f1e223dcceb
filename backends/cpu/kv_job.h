// SPDX-License-Identifier: Apache-2.0
// What passes between the part of the caches that is compiled once (kv.cpp: cells, threads) and the part that is compiled once
// per instruction set (kv_<target>.cpp: one row). Only plain data and declarations, as in attention_job.h.
#pragma once

#include "attention_job.h"

namespace cqsa::cpu {

constexpr int64_t kv_most_channels = 4096;  // of a row that is rotated; other rows are cut into pieces of this

// The scratch of one worker, on its stack.
struct kv_scratch {
  alignas(64) float row[kv_most_channels];
  alignas(64) char raw[4 * kv_most_channels];
  const scalar_ops* ops;
};

// One row, to and from addresses of its first elements; the strides between its elements are the leaf's.
struct kv_target {
  void (*append)(const cqsa_kv_leaf* leaf, const char* x, char* pool, char* scale, kv_scratch* mem);
  void (*gather)(const cqsa_kv_leaf* leaf, const char* pool, const char* scale, char* x, kv_scratch* mem);
  void (*hadamard)(const cqsa_hadamard_leaf* leaf, const char* x, char* out, kv_scratch* mem);
};

extern const kv_target kv_baseline;
#if defined(CQSA_CPU_X86)
extern const kv_target kv_avx2;
#endif

// kv.cpp. The best that this CPU has; for tests, which compare the instruction sets.
const kv_target& kv_best();
cqsa_status kv_append_on(const kv_target& target, const cqsa_kv_leaf* leaf, const cqsa_exec* exec);
cqsa_status kv_gather_on(const kv_target& target, const cqsa_kv_leaf* leaf, const cqsa_exec* exec);
cqsa_status hadamard_on(const kv_target& target, const cqsa_hadamard_leaf* leaf, const cqsa_exec* exec);
// .. what the backend's struct has
cqsa_status kv_append(void* device, const cqsa_kv_leaf* leaf, const cqsa_exec* exec, void* stream);
cqsa_status kv_gather(void* device, const cqsa_kv_leaf* leaf, const cqsa_exec* exec, void* stream);
cqsa_status hadamard(void* device, const cqsa_hadamard_leaf* leaf, const cqsa_exec* exec, void* stream);

}  // namespace cqsa::cpu
