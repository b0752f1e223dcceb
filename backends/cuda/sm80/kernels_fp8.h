// SPDX-License-Identifier: Apache-2.0
// X(name, threads per block, tier): the FP8 product by the f16 matrix unit.
#pragma once

#define CQSA_SM80_FP8_KERNELS(X) X(cqsa_sm80_fp8_gemm, 256, 80)
