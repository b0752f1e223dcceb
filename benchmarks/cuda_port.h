// SPDX-License-Identifier: Apache-2.0
// backends/gpu/port.h over the CUDA run-time library, for benchmarks of leaves by themselves: no plugin, no core. A program includes it
// in one file and says where its kernels are.
#pragma once

#include "backends/gpu/port.h"

#include <cuda_runtime.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#define CHECK_CUDA(call)                                                                  \
  do {                                                                                    \
    const cudaError_t status_of_call = (call);                                            \
    if (status_of_call != cudaSuccess) {                                                  \
      std::printf("%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(status_of_call)); \
      std::exit(2);                                                                       \
    }                                                                                     \
  } while (0)

namespace cqsa::bench {

// The program's own: the code of a kernel, nullptr where it has none.
const void* code_of(gpu::kernel_id kernel);

inline const char* name_of(gpu::kernel_id kernel) {
  static constexpr const char* names[] = {
#define CQSA_KERNEL_NAME(name, threads, tier) #name,
      CQSA_ALL_KERNELS(CQSA_KERNEL_NAME)
#undef CQSA_KERNEL_NAME
  };
  return names[int(kernel)];
}

// static: an inline variable would be one for all libraries that a script has loaded.
static gpu::device_facts this_device{32, 0, 65536, 0, 0};
static const char* last_kernel = "";  // that was launched

// Device 0 in numbers; for kernels of this tier.
inline void open_device(int32_t tier) {
  cudaDeviceProp prop;
  CHECK_CUDA(cudaGetDeviceProperties(&prop, 0));
  this_device.compute_units = prop.multiProcessorCount;
  this_device.shared_bytes = int32_t(prop.sharedMemPerBlockOptin);
  this_device.arch = 10 * prop.major + prop.minor;
  this_device.tier = tier;
  std::printf("%s, %d multiprocessors\n", prop.name, prop.multiProcessorCount);
}

// Allows a kernel all of the shared memory, and says what the compiler made of it.
inline void prepare(gpu::kernel_id kernel, bool tell = true) {
  const void* code = code_of(kernel);
  if (!code) return;
  cudaFuncAttributes a;
  CHECK_CUDA(cudaFuncSetAttribute(code, cudaFuncAttributeMaxDynamicSharedMemorySize, this_device.shared_bytes));
  CHECK_CUDA(cudaFuncGetAttributes(&a, code));
  if (tell) std::printf("%s: %d registers, %zu bytes of local memory, code %d\n", name_of(kernel), a.numRegs, a.localSizeBytes, a.binaryVersion);
}

inline void prepare_all(bool tell = true) {
  for (int i = 0; i < int(gpu::kernel_id::count); ++i) prepare(gpu::kernel_id(i), tell);
}

}  // namespace cqsa::bench

namespace cqsa::gpu {

cqsa_status fail(cqsa_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vprintf(format, arguments);
  va_end(arguments);
  std::printf("\n");
  return status;
}
const device_facts& facts_of(void*) { return bench::this_device; }
cqsa_status launch(void*, kernel_id kernel, const launch_shape& s, const void* params, size_t, void* stream) {
  const void* code = bench::code_of(kernel);
  if (!code) return fail(CQSA_ERROR_INTERNAL, "no kernel %s in this program", bench::name_of(kernel));
  bench::last_kernel = bench::name_of(kernel);
  void* argument = const_cast<void*>(params);
  const cudaError_t error = cudaLaunchKernel(code, dim3(s.grid[0], s.grid[1], s.grid[2]), dim3(s.threads), &argument, s.shared_bytes,
                                             static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? CQSA_OK : fail(CQSA_ERROR_RUNTIME, "%s: %s", bench::name_of(kernel), cudaGetErrorString(error));
}
cqsa_status upload(void*, void* to, const void* from, uint64_t bytes, void* stream) {
  CHECK_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, static_cast<cudaStream_t>(stream)));
  return CQSA_OK;
}

}  // namespace cqsa::gpu
