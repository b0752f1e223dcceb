// SPDX-License-Identifier: Apache-2.0
// What the vendor-neutral host code of the GPU backends (backends/gpu/*.cpp) needs from a plugin. Each plugin implements these
// functions once: CUDA over libcuda, HIP over libamdhip64, and the SIMT harness of the tests by running the kernels on the CPU.
//
// All device code of a plugin is loaded when a device is opened, whatever compiler made it, so that launch() finds a kernel by
// number and is safe in a stream that is being captured, also at the first call of a process.
#pragma once

#include "backends/cqsa_backend.h"

#include <cstddef>
#include <cstdint>

namespace cqsa::gpu {

// X(name, threads per block): every kernel of the portable tier. The names are those of the extern "C" functions.
#define CQSA_GPU_KERNELS(X)    \
  X(cqsa_attention_d64, 256)   \
  X(cqsa_attention_d128, 256)  \
  X(cqsa_attention_d256, 256)  \
  X(cqsa_attention_d512, 256)  \
  X(cqsa_attention_tail, 256)  \
  X(cqsa_merge, 256)           \
  X(cqsa_gather, 256)

enum class kernel_id : int32_t {
#define CQSA_GPU_KERNEL_ID(name, threads) name,
  CQSA_GPU_KERNELS(CQSA_GPU_KERNEL_ID)
#undef CQSA_GPU_KERNEL_ID
      count
};

// What a launch depends on. arch is 10 * major + minor on CUDA (90 for sm_90) and 0 elsewhere.
struct device_facts {
  int32_t lanes;          // threads that run in lockstep: 32 or 64
  int32_t compute_units;
  int32_t shared_bytes;   // most shared memory of a block, at least 64 KiB on everything since sm_70
  int32_t arch;
};

struct launch_shape {
  uint32_t grid[3];
  uint32_t threads;
  uint32_t shared_bytes;  // dynamic shared memory
};

// Every kernel takes one struct by value, at most this large.
constexpr size_t most_params_bytes = 4000;

// The device is what cqsa_backend_v1::device_open returned, the stream a native handle (nullptr: the default stream). Both
// functions return once the work is queued; a failure has its text in the plugin's last_error().
cqsa_status launch(void* device, kernel_id kernel, const launch_shape& shape, const void* params, size_t params_bytes, void* stream);
// Small host array -> device memory in stream order; the host memory has been read on return.
cqsa_status upload(void* device, void* to, const void* from, uint64_t bytes, void* stream);
const device_facts& facts_of(void* device);
// Keeps the text for last_error() and returns the status.
cqsa_status fail(cqsa_status status, const char* format, ...) __attribute__((format(printf, 2, 3)));

// backends/gpu/attention_leaf.cpp, merge_leaf.cpp: what a plugin puts into its cqsa_backend_v1.
extern const cqsa_attention_impl portable_attention;
cqsa_status portable_merge(void* device, const cqsa_merge_leaf* leaf, const cqsa_exec* exec, void* stream);

}  // namespace cqsa::gpu
