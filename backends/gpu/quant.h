// SPDX-License-Identifier: Apache-2.0
// What a plugin puts into its cqsa_backend_v1 for quantized matrices; quant_leaf.cpp. One launch, without memory.
#pragma once

#include "backends/cqsa_backend.h"

namespace cqsa::gpu {

cqsa_status portable_dequantize_rows(void* device, const cqsa_dequantize_leaf* leaf, const cqsa_exec* exec, void* stream);

}  // namespace cqsa::gpu
