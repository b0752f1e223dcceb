// SPDX-License-Identifier: Apache-2.0
#include "moe.cuh"

CQSA_SM90_MOE(q2_0, 128, blocks::q2_0)
