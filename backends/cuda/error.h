// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/gpu/port.h"
#include "driver.h"

namespace cqsa::cuda {

using gpu::fail;

// The text of this thread's last failure; plain data, so that the thread's end runs nothing of the plugin.
const char* last_error();

// OK for CUDA_SUCCESS; otherwise keeps "<what> failed: CUDA_ERROR_.. (..)" and returns the status that fits, out_of_memory
// for a lack of memory.
cqsa_status check(CUresult result, const char* what, cqsa_status out_of_memory = CQSA_ERROR_OUT_OF_DEVICE_MEMORY);

}  // namespace cqsa::cuda

#define CQSA_CUDA_TRY(expression)                                                                     \
  do {                                                                                                \
    if (const cqsa_status cqsa_try_status = (expression); cqsa_try_status != CQSA_OK) return cqsa_try_status; \
  } while (0)
