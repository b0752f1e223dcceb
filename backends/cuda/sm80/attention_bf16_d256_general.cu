// SPDX-License-Identifier: Apache-2.0
#include "attention_entry.cuh"

CQSA_SM80_ATTENTION(bf16, 256, 256, general)
