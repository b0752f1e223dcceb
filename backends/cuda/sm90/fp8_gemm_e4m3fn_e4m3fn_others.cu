// SPDX-License-Identifier: Apache-2.0
#include "fp8_gemm.cuh"

CQSA_SM90_FP8_OTHERS(e4m3fn, e4m3fn)
