// SPDX-License-Identifier: Apache-2.0
// The port of the GPU backends for the SIMT harness: a device is a lane count, a stream is the calling thread.
#pragma once

#include "backends/gpu/port.h"

namespace cqsa::simt {

struct device {
  gpu::device_facts facts{32, 4, 64 * 1024, 0, 0};
  uint64_t seed = 1;     // of the next launch; each launch draws another
  int workers = 2;
  int64_t launches = 0;
};

// Of this thread, "" when nothing has failed yet.
const char* last_error();

}  // namespace cqsa::simt
