// SPDX-License-Identifier: Apache-2.0
#include "fp8_small.cuh"

CQSA_KERNEL(256, cqsa_fp8_init, cqsa::gpu::fp8_init_params) { cqsa::gpu::fp8_init_block(p); }
