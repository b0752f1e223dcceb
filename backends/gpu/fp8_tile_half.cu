// SPDX-License-Identifier: Apache-2.0
#include "fp8_tile.cuh"

// f16 and bf16; a block has 32 KiB on their way.
CQSA_TUNED_KERNEL(256, cqsa::gpu::fp8_tile_blocks(cqsa::gpu::tile_in_few_registers), cqsa_fp8_tile_half, cqsa::gpu::fp8_one_params) {
  cqsa::gpu::fp8_tile_block<CQSA_LANES, true>(p);
}
