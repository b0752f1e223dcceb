// SPDX-License-Identifier: Apache-2.0
#include "fp8_general.cuh"

CQSA_KERNEL(256, cqsa_fp8_general, cqsa::gpu::fp8_params) { cqsa::gpu::fp8_general_block<CQSA_LANES>(p); }
