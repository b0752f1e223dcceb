// SPDX-License-Identifier: Apache-2.0
#include "kv.cuh"

CQSA_KERNEL(256, cqsa_kv_gather, cqsa::gpu::kv_params) { cqsa::gpu::kv_gather_block<CQSA_LANES>(p); }
