// SPDX-License-Identifier: Apache-2.0
// The NVIDIA driver, libcuda.so.1, opened at run time: the plugin loads on machines without it. Only types come from the
// toolkit's cuda.h, and nothing of the CUDA run-time library: it would bring a current device, a sticky error and a context
// choice of its own into the caller's process. Both kinds of user share a device's primary context, so memory, streams and
// events of either work with the other.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "backends/cqsa_backend.h"

#if CUDA_VERSION < 12000
#error "the CUDA backend needs the headers of CUDA 12.0 or newer"
#endif
#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
#error "a NULL stream is the legacy default stream: build without CUDA_API_PER_THREAD_DEFAULT_STREAM"
#endif

namespace cqsa::cuda {

// By the names that every driver since CUDA 12.0 exports: where the header maps a name to a newer version, the old one is
// named in full, so that the headers of a newer toolkit do not ask for a newer driver.
#define CQSA_CUDA_FUNCTIONS(X)                                                                                       \
  X(cuInit) X(cuDriverGetVersion) X(cuGetErrorName) X(cuGetErrorString)                                              \
  X(cuDeviceGetCount) X(cuDeviceGet) X(cuDeviceGetName) X(cuDeviceGetAttribute) X(cuDeviceTotalMem_v2)               \
  X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease_v2) X(cuDevicePrimaryCtxGetState)                          \
  X(cuCtxGetCurrent) X(cuCtxPushCurrent_v2) X(cuCtxPopCurrent_v2) X(cuCtxGetDevice) X(cuThreadExchangeStreamCaptureMode)                \
  X(cuLibraryLoadData) X(cuLibraryGetKernel) X(cuKernelGetFunction) X(cuFuncGetAttribute) X(cuFuncSetAttribute)      \
  X(cuMemAlloc_v2) X(cuMemFree_v2) X(cuMemHostAlloc) X(cuMemFreeHost) X(cuMemGetInfo_v2)                             \
  X(cuMemAllocAsync) X(cuMemFreeAsync) X(cuPointerGetAttributes)                                                     \
  X(cuMemcpyHtoDAsync_v2) X(cuMemcpyDtoHAsync_v2) X(cuMemcpyDtoDAsync_v2) X(cuMemsetD32Async)                        \
  X(cuStreamCreate) X(cuStreamDestroy_v2) X(cuStreamSynchronize) X(cuStreamWaitEvent) X(cuStreamIsCapturing)         \
  X(cuStreamGetCtx) X(cuEventCreate) X(cuEventDestroy_v2) X(cuEventRecord) X(cuEventSynchronize) X(cuLaunchKernel)              \
  X(cuTensorMapEncodeTiled)

struct driver_api {
#define CQSA_CUDA_MEMBER(name) decltype(&::name) name;
  CQSA_CUDA_FUNCTIONS(CQSA_CUDA_MEMBER)
#undef CQSA_CUDA_MEMBER
  CUresult (*cuEventElapsedTime)(float* milliseconds, CUevent start, CUevent end);  // the header's own name has moved to _v2
  // NULL in drivers older than CUDA 12.4, which load a function when its attributes are asked for.
  CUresult (*cuFuncLoad)(CUfunction function);
  CUresult (*cuFuncGetParamInfo)(CUfunction function, size_t index, size_t* offset, size_t* bytes);
};

struct driver_status {
  int32_t state;  // CQSA_BACKEND_*
  char reason[512];
};

// Loads and initialises the driver at the first call. The answer never changes but in a forked child of a process in which it
// was READY: CUDA does not work there, and every function says so instead of calling the driver.
const driver_status& ensure_driver();
cqsa_status require_driver();  // OK, or the status of that state with its text kept for last_error()
bool driver_was_forked();

// May be used once ensure_driver() was READY.
const driver_api& driver();

// "CUDA_ERROR_OUT_OF_MEMORY (out of memory)" into text; also before cuInit and with an unknown number.
const char* describe(CUresult result, char* text, uint64_t size);

}  // namespace cqsa::cuda
