// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cqsa_backend.h"

namespace cqsa::cuda {

// The leaf operations, backends/cuda/leaves/list.cpp; in the tests without a GPU, stubs. Of each ordered list the first whose probe
// accepts is taken; the portable one is last.
void add_leaves(cqsa_backend_v1& backend);

}  // namespace cqsa::cuda
