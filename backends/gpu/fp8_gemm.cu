// SPDX-License-Identifier: Apache-2.0
#include "fp8_gemm.cuh"

CQSA_KERNEL(256, cqsa_fp8_gemm, cqsa::gpu::gemm_params) { cqsa::gpu::gemm_block<CQSA_LANES>(p); }
