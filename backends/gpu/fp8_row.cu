// SPDX-License-Identifier: Apache-2.0
#include "fp8_group.cuh"

// A row for each block.
CQSA_TUNED_KERNEL(256, cqsa::gpu::fp8_row_blocks, cqsa_fp8_row, cqsa::gpu::fp8_one_params) { cqsa::gpu::fp8_row_block<CQSA_LANES>(p); }
