// SPDX-License-Identifier: Apache-2.0
#include "fp8_group.cuh"

CQSA_TUNED_KERNEL(256, cqsa::gpu::fp8_group_blocks, cqsa_fp8_group, cqsa::gpu::fp8_one_params) { cqsa::gpu::fp8_group_block<CQSA_LANES>(p); }
