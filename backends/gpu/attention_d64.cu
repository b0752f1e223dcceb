// SPDX-License-Identifier: Apache-2.0
#include "attention.cuh"

CQSA_KERNEL(256, cqsa_attention_d64, cqsa::gpu::attention_params) { cqsa::gpu::attention_block<CQSA_LANES, 64>(p); }
