// SPDX-License-Identifier: Apache-2.0
#include "moe.cuh"

CQSA_SM90_MOE(q2_0, 64, blocks::q2_0)
