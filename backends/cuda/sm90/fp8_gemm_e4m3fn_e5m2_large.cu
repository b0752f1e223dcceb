// SPDX-License-Identifier: Apache-2.0
#include "fp8_gemm.cuh"

CQSA_SM90_FP8_LARGE(e4m3fn, e5m2)
