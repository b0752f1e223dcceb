// SPDX-License-Identifier: Apache-2.0
// Every kernel of the tier, X(name, threads per block, tier): each operation keeps its own list.
#pragma once

#include "kernels_attention.h"
#include "kernels_decode.h"
#include "kernels_fp8.h"
#include "kernels_moe.h"
#include "kernels_selected.h"

#define CQSA_SM80_KERNELS(X) CQSA_SM80_ATTENTION_KERNELS(X) CQSA_SM80_DECODE_KERNELS(X) CQSA_SM80_SELECTED_KERNELS(X) CQSA_SM80_FP8_KERNELS(X) \
  CQSA_SM80_MOE_KERNELS(X)
