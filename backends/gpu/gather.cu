// SPDX-License-Identifier: Apache-2.0
#include "gather.cuh"

CQSA_KERNEL(256, cqsa_gather, cqsa::gpu::gather_params) { cqsa::gpu::gather_rows(p); }
