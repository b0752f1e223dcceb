// SPDX-License-Identifier: Apache-2.0
// Scales from amaxes, and from one layout to another.
#pragma once
#include "context.h"

namespace cqsa::fp8 {

cqsa_status scale_from_amax(const cqsa_context&, const cqsa_fp8_scale_args* args, void* stream);
cqsa_status scale_relayout(const cqsa_context&, const cqsa_tensor* scales, int32_t layout, const cqsa_tensor* scales_out, int32_t layout_out,
                           int64_t block_rows, int64_t block_columns, void* stream);

}  // namespace cqsa::fp8
