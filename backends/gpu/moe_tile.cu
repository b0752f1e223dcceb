// SPDX-License-Identifier: Apache-2.0
#include "moe_tile.cuh"

CQSA_KERNEL(256, cqsa_gpu_moe_tile, cqsa::gpu::moe_multiply_params) { cqsa::gpu::tile_block<CQSA_LANES>(p); }
