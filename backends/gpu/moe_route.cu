// SPDX-License-Identifier: Apache-2.0
#include "moe_route.cuh"

CQSA_KERNEL(128, cqsa_gpu_moe_route, cqsa::gpu::moe_route_params) { cqsa::gpu::route_block<CQSA_LANES>(p); }
