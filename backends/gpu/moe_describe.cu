// SPDX-License-Identifier: Apache-2.0
#include "moe_small.cuh"

CQSA_KERNEL(128, cqsa_gpu_moe_describe, cqsa::gpu::moe_describe_params) { cqsa::gpu::describe_block(p); }
