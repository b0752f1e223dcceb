// SPDX-License-Identifier: Apache-2.0
#include "attention_tail.cuh"

CQSA_KERNEL(256, cqsa_attention_tail, cqsa::gpu::tail_params) { cqsa::gpu::clear_tail_rows<CQSA_LANES>(p); }
