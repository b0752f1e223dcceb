// SPDX-License-Identifier: Apache-2.0
#include "attention.cuh"

CQSA_SM90_ATTENTION(bf16, 128, 128, lengthy)
