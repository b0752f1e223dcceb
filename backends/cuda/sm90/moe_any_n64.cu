// SPDX-License-Identifier: Apache-2.0
#include "moe.cuh"

CQSA_SM90_MOE(any, 64, sm80::any_format)
