// SPDX-License-Identifier: Apache-2.0
// What merge_leaf.cpp tells the merge kernel.
#pragma once

#include "backends/cqsa_backend.h"

namespace cqsa::gpu {

struct merge_params {
  cqsa_merge_leaf leaf;
  int64_t rows;  // product of shape
};

}  // namespace cqsa::gpu
