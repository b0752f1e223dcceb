// SPDX-License-Identifier: Apache-2.0
// Codes back to numbers, and codes transposed.
#pragma once
#include "context.h"

namespace cqsa::fp8 {

cqsa_status dequantize(const cqsa_context&, const cqsa_fp8_dequantize_args* args, void* stream);
cqsa_status transpose(const cqsa_context&, const cqsa_tensor* x, const cqsa_tensor* out, void* stream);

}  // namespace cqsa::fp8
