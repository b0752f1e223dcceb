// SPDX-License-Identifier: Apache-2.0
#include "error.h"

#include <cstdarg>
#include <cstdio>

namespace cqsa::cuda {

namespace {

thread_local constinit char error_text[1024] = "";

cqsa_status status_of(CUresult result, cqsa_status out_of_memory) {
  switch (result) {
    case CUDA_SUCCESS: return CQSA_OK;
    case CUDA_ERROR_OUT_OF_MEMORY: return out_of_memory;
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
    case CUDA_ERROR_UNSUPPORTED_PTX_VERSION:
    case CUDA_ERROR_JIT_COMPILER_NOT_FOUND: return CQSA_ERROR_NO_DEVICE_CODE;
    default: return CQSA_ERROR_RUNTIME;
  }
}

}  // namespace

const char* last_error() { return error_text; }

cqsa_status check(CUresult result, const char* what, cqsa_status out_of_memory) {
  if (result == CUDA_SUCCESS) return CQSA_OK;
  char reason[160];
  return fail(status_of(result, out_of_memory), "%s failed: %s", what, describe(result, reason, sizeof reason));
}

}  // namespace cqsa::cuda

namespace cqsa::gpu {

cqsa_status fail(cqsa_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(cuda::error_text, sizeof cuda::error_text, format, arguments);
  va_end(arguments);
  return status;
}

}  // namespace cqsa::gpu
