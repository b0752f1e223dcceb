// SPDX-License-Identifier: Apache-2.0
// cuda_port.h with kernels from a folder of cubins, so that versions of them can be compared. A library for a Python script includes it in one file.
#pragma once

#include "benchmarks/cuda_port.h"

#include "backends/cuda/tensor_encode.h"

#include <cuda.h>

#include <filesystem>

namespace cqsa::bench {

// Not inline: GCC makes one of all inline variables of a process, and versions that are compared would run each other's kernels.
static cudaKernel_t loaded[int(gpu::kernel_id::count)];

const void* code_of(gpu::kernel_id kernel) { return reinterpret_cast<const void*>(loaded[int(kernel)]); }

// Kernels of every cubin of the folder, in place of those of the same name that were there.
static void load_folder(const char* folder, bool tell) {
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    if (file.path().extension() != ".cubin") continue;
    cudaLibrary_t library;
    CHECK_CUDA(cudaLibraryLoadFromFile(&library, file.path().c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0));
    for (int i = 0; i < int(gpu::kernel_id::count); ++i) {
      const gpu::kernel_id kernel = gpu::kernel_id(i);
      if (cudaLibraryGetKernel(&loaded[i], library, name_of(kernel)) == cudaSuccess) prepare(kernel, tell);
    }
    cudaGetLastError();  // of the kernels that are not in this file
  }
}

}  // namespace cqsa::bench

namespace cqsa::gpu {

cqsa_status encode_tensor(void*, const tensor_box& box, tensor_map* out) {
  static decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (!encode) CHECK_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", reinterpret_cast<void**>(&encode), 12000, cudaEnableDefault, &found));
  const CUresult error = cuda::encode_box(encode, box, out);
  return error == CUDA_SUCCESS ? CQSA_OK : fail(CQSA_ERROR_RUNTIME, "cuTensorMapEncodeTiled: %d", int(error));
}

}  // namespace cqsa::gpu
