// SPDX-License-Identifier: Apache-2.0
// What the host parts of the sm_70 kernels share.
#pragma once

#include "backends/cqsa_backend.h"

namespace cqsa::gpu {

// Why the matrix unit of Volta does not take a problem; nullptr: it does.
const char* why_no_sm70(int32_t tier, int32_t precision, cqsa_dtype q, cqsa_dtype k, cqsa_dtype v, int64_t head_dim, int64_t head_dim_v);

}  // namespace cqsa::gpu
