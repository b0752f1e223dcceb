// SPDX-License-Identifier: Apache-2.0
#include "quant_rows.cuh"

CQSA_KERNEL(256, cqsa_quant_plain, cqsa::gpu::quant_rows_params) {
  cqsa::gpu::quant_plain_block<CQSA_LANES>(p);
}
