// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cqsa_backend.h"

namespace cqsa::cuda {

// FLOP/s of the implementation that the dispatch list would take, on a problem that fills the device; 0 where it cannot be
// measured. Opens and closes the device itself. About 50 ms at most.
double compute_rate(int32_t index, int64_t head_dim, cqsa_dtype dtype, const cqsa_exec* exec);

}  // namespace cqsa::cuda
