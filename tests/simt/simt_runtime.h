// SPDX-License-Identifier: Apache-2.0
// The host side of the SIMT harness: runs a registered kernel, one fiber per thread, and says what went wrong.
#pragma once

#include "simt_device.h"

#include <string>

namespace cqsa::simt {

struct run_shape {
  int64_t grid[3] = {1, 1, 1};
  int threads = 0;  // 0: as registered
  int64_t shared_bytes = 0;
};

// "" or the first thing that went wrong: a deadlock, a barrier or an operation of all lanes that not everyone came to, memory
// written beside the shared memory, a copy never waited for. The same seed gives the same run as long as blocks do not depend
// on each other. Blocks run in random order, on up to `workers` threads of the operating system.
std::string run(const char* kernel, int lanes, const run_shape& shape, const void* params, size_t params_bytes, uint64_t seed,
                int workers = 2);

// For a kernel that is a function.
std::string run(void (*body)(const void*), int lanes, const run_shape& shape, const void* params, size_t params_bytes, uint64_t seed,
                int workers = 2);

}  // namespace cqsa::simt
