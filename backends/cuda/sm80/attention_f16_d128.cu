// SPDX-License-Identifier: Apache-2.0
#include "attention_entry.cuh"

CQSA_SM80_ATTENTION(f16, 128, 128, plain)
