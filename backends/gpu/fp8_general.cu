// SPDX-License-Identifier: Apache-2.0
#include "fp8_general.cuh"

// One block on a multiprocessor is enough for what is slow anyway, and keeps all in registers.
CQSA_TUNED_KERNEL(256, 1, cqsa_fp8_general, cqsa::gpu::fp8_params) { cqsa::gpu::fp8_general_block<CQSA_LANES>(p); }
