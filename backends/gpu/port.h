// SPDX-License-Identifier: Apache-2.0
// What the vendor-neutral host code of the GPU backends (backends/gpu/*.cpp) needs from a plugin. Each plugin implements these
// functions once: CUDA over libcuda, HIP over libamdhip64, and the SIMT harness of the tests by running the kernels on the CPU.
//
// All device code that is for a device is loaded when it is opened, whatever compiler made it, so that launch() finds a kernel by
// number and is safe in a stream that is being captured, also at the first call of a process.
#pragma once

#include "backends/cqsa_backend.h"
#include "backends/cuda/kernels.h"
#include "backends/cuda/sm90/tensor_map.h"
#include "kernels.h"

#include <cstddef>
#include <cstdint>

namespace cqsa::gpu {

// Every kernel of every tier, the portable ones first.
#define CQSA_ALL_KERNELS(X) CQSA_GPU_KERNELS(X) CQSA_CUDA_KERNELS(X)

enum class kernel_id : int32_t {
#define CQSA_GPU_KERNEL_ID(name, threads, tier) name,
  CQSA_ALL_KERNELS(CQSA_GPU_KERNEL_ID)
#undef CQSA_GPU_KERNEL_ID
      count
};

// Whether kernels of a tier are for devices of this arch; whether a build has them is another question. Tiers: 0 is portable, 70
// and 75 are for Volta and Turing alone, 80 for everything since Ampere, 90 for Hopper alone.
constexpr bool tier_is_for(int32_t tier, int32_t arch) {
  return tier == 0 || (tier == 80 ? arch >= 80 : tier == 90 ? arch == 90 : arch >= tier && arch < tier + 5);
}

// What a launch depends on. arch is 10 * major + minor on CUDA (90 for sm_90) and 0 elsewhere.
struct device_facts {
  int32_t lanes;          // threads that run in lockstep: 32 or 64
  int32_t compute_units;
  int32_t shared_bytes;   // most shared memory of a block, at least 64 KiB on everything since sm_70
  int32_t arch;
  int32_t tier;           // as in cqsa_chip
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
// The copy engine's description of a tensor; on devices of tier 90 only.
cqsa_status encode_tensor(void* device, const tensor_box& box, tensor_map* out);
const device_facts& facts_of(void* device);
// Keeps the text for last_error() and returns the status.
cqsa_status fail(cqsa_status status, const char* format, ...) __attribute__((format(printf, 2, 3)));

// backends/gpu/attention_leaf.cpp, selected_leaf.cpp, merge_leaf.cpp: what a plugin puts into its cqsa_backend_v1.
extern const cqsa_attention_impl portable_attention;
extern const cqsa_selected_impl portable_selected;
cqsa_status portable_merge(void* device, const cqsa_merge_leaf* leaf, const cqsa_exec* exec, void* stream);

}  // namespace cqsa::gpu
