// SPDX-License-Identifier: Apache-2.0
#include "fp8_stream.cuh"

CQSA_TUNED_KERNEL(256, 5, cqsa_fp8_stream, cqsa::gpu::fp8_one_params) { cqsa::gpu::fp8_stream_block<CQSA_LANES, false>(p); }
