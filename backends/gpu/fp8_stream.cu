// SPDX-License-Identifier: Apache-2.0
#include "fp8_stream.cuh"

// Four blocks on a multiprocessor: 64 KiB of numbers on their way.
CQSA_TUNED_KERNEL(256, 4, cqsa_fp8_stream, cqsa::gpu::fp8_params) { cqsa::gpu::fp8_stream_block<CQSA_LANES, false>(p); }
