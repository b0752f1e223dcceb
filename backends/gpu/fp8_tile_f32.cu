// SPDX-License-Identifier: Apache-2.0
#include "fp8_tile.cuh"

CQSA_KERNEL(256, cqsa_fp8_tile_f32, cqsa::gpu::fp8_one_params) { cqsa::gpu::fp8_tile_block<CQSA_LANES, false>(p); }
