// SPDX-License-Identifier: Apache-2.0
#include "attention.cuh"

CQSA_KERNEL(256, cqsa_attention_d256, cqsa::gpu::attention_params) { cqsa::gpu::attention_block<CQSA_LANES, 256>(p); }
