// SPDX-License-Identifier: Apache-2.0
#include "fp8_gemm.cuh"

CQSA_TUNED_KERNEL(256, 1, cqsa_sm80_fp8_gemm, cqsa::gpu::gemm_params) { cqsa::gpu::sm80::gemm_block(p); }
