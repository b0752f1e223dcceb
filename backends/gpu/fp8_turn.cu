// SPDX-License-Identifier: Apache-2.0
#include "fp8_small.cuh"

CQSA_TUNED_KERNEL(256, 4, cqsa_fp8_turn, cqsa::gpu::fp8_transpose_params) { cqsa::gpu::fp8_transpose_block(p); }
