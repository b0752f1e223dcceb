// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "context.h"
#include "error.h"

namespace cqsa {

// cqsa_dequantize_rows and cqsa_quantize_rows: checks, then one leaf call.
cqsa_status dequantize_rows(const cqsa_context& context, const cqsa_quant_tensor* w, int64_t first_row, const cqsa_tensor* row_ids,
                            const cqsa_tensor* out, void* stream);
cqsa_status quantize_rows(const cqsa_context& context, const cqsa_tensor* x, const cqsa_quant_tensor* w, void* stream);

}  // namespace cqsa
