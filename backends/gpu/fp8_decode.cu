// SPDX-License-Identifier: Apache-2.0
#include "fp8_small.cuh"

CQSA_TUNED_KERNEL(256, 4, cqsa_fp8_decode, cqsa::gpu::fp8_dequantize_params) { cqsa::gpu::fp8_dequantize_block(p); }
