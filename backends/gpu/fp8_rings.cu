// SPDX-License-Identifier: Apache-2.0
#include "fp8_small.cuh"

CQSA_KERNEL(256, cqsa_fp8_rings, cqsa::gpu::fp8_rings_params) { cqsa::gpu::fp8_rings_block<CQSA_LANES>(p); }
