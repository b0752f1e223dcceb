// SPDX-License-Identifier: Apache-2.0
#include "moe_small.cuh"

CQSA_KERNEL(256, cqsa_gpu_moe_quantize, cqsa::gpu::moe_quantize_params) { cqsa::gpu::quantize_block<CQSA_LANES>(p); }
