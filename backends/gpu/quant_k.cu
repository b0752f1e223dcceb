// SPDX-License-Identifier: Apache-2.0
#include "quant_k.cuh"
#include "quant_rows.cuh"

CQSA_TUNED_KERNEL(256, 3, cqsa_quant_k, cqsa::gpu::quant_rows_params) {
  cqsa::gpu::quant_rows_block<CQSA_LANES>(p, [](int32_t format, const auto& f) { cqsa::gpu::with_k_format(format, f); });
}
