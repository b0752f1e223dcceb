// SPDX-License-Identifier: Apache-2.0
#include "quant_iq.cuh"
#include "quant_rows.cuh"

CQSA_TUNED_KERNEL(256, 3, cqsa_quant_iq, cqsa::gpu::quant_rows_params) {
  cqsa::gpu::quant_rows_block<CQSA_LANES>(p, [](int32_t format, const auto& f) { cqsa::gpu::with_iq_format(format, f); });
}
