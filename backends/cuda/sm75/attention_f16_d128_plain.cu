// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/sm75/attention_entry.cuh"

CQSA_SM75_ATTENTION(128, plain)
