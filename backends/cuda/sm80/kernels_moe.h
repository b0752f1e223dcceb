// SPDX-License-Identifier: Apache-2.0
// X(name, threads per block, tier): products of mixtures of experts by the f16 matrix unit.
#pragma once

#define CQSA_SM80_MOE_KERNELS(X) X(cqsa_sm80_moe_q2_0, 128, 80) X(cqsa_sm80_moe_any, 128, 80) X(cqsa_sm80_moe_few_q2_0, 128, 80)
