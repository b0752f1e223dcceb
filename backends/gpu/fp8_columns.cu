// SPDX-License-Identifier: Apache-2.0
#include "fp8_columns.cuh"

// One block on a multiprocessor, with 64 KiB on their way.
CQSA_TUNED_KERNEL(1024, 1, cqsa_fp8_columns, cqsa::gpu::fp8_one_params) { cqsa::gpu::fp8_columns_block<CQSA_LANES>(p); }
