// SPDX-License-Identifier: Apache-2.0
#include "hadamard.cuh"

CQSA_KERNEL(256, cqsa_hadamard, cqsa::gpu::hadamard_params) { cqsa::gpu::hadamard_block(p); }
