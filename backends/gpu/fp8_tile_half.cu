// SPDX-License-Identifier: Apache-2.0
#include "fp8_tile.cuh"

#if (defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800) || defined(__HIP__)
constexpr bool new_chip = false;
#else
constexpr bool new_chip = true;
#endif
// f16 and bf16; a block has 32 KiB on their way.
CQSA_TUNED_KERNEL(256, cqsa::gpu::fp8_tile_blocks(new_chip), cqsa_fp8_tile_half, cqsa::gpu::fp8_params) { cqsa::gpu::fp8_tile_block<CQSA_LANES, true>(p); }
