// SPDX-License-Identifier: Apache-2.0
#include "quant_simple.cuh"
#include "quant_rows.cuh"

CQSA_TUNED_KERNEL(256, 3, cqsa_quant_simple, cqsa::gpu::quant_rows_params) {
  cqsa::gpu::quant_rows_block<CQSA_LANES>(p, [](int32_t format, const auto& f) { cqsa::gpu::with_simple_format(format, f); });
}
