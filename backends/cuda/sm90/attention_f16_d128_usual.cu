// SPDX-License-Identifier: Apache-2.0
#include "attention.cuh"

CQSA_SM90_ATTENTION(f16, 128, 128, usual)
