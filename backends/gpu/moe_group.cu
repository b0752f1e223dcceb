// SPDX-License-Identifier: Apache-2.0
#include "moe_group.cuh"

CQSA_KERNEL(256, cqsa_gpu_moe_group, cqsa::gpu::moe_group_params) { cqsa::gpu::group_block<CQSA_LANES>(p); }
