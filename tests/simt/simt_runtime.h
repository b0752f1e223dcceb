// SPDX-License-Identifier: Apache-2.0
// The host side of the SIMT harness: runs a registered kernel, one fiber per thread, and says what went wrong.
#pragma once

#include "simt_device.h"

#include <string>
#include <vector>

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

// Mutants of any kernel without a change to it: a place in the code where threads wait for each other or exchange something is
// left out. A shuffle then gives the thread's own value, a matrix instruction leaves its accumulator alone.
struct call_site {
  std::string what;  // "barrier", "lanes_barrier", "shuffle", "ballot", "cp_async_wait", "mma_..."
  std::string file;  // without folders
  int line;
};
// The sites that the kernels of this process have come by since record_sites(true).
void record_sites(bool on);
std::vector<call_site> recorded_sites();
// nullptr: leaves out nothing. Not while a kernel runs.
void leave_out(const call_site* site);

}  // namespace cqsa::simt
