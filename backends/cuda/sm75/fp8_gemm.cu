// SPDX-License-Identifier: Apache-2.0
// The source of sm_80's with the instructions of sm_75.
#include "as_sm80.cuh"

#include "backends/cuda/sm80/fp8_gemm.cuh"

CQSA_TUNED_KERNEL(256, 1, cqsa_sm75_fp8_gemm, cqsa::gpu::gemm_params) { cqsa::gpu::sm80::gemm_block(p); }
