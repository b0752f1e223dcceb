// SPDX-License-Identifier: Apache-2.0
#include "moe_small.cuh"

CQSA_KERNEL(256, cqsa_gpu_moe_take, cqsa::gpu::moe_take_params) { cqsa::gpu::take_block<CQSA_LANES>(p); }
