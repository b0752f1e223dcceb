// SPDX-License-Identifier: Apache-2.0
// Every kernel of the tuned tiers, X(name, threads per block, tier) as in backends/gpu/kernels.h; each tier keeps its own list.
#pragma once

#include "backends/cuda/sm70/kernels.h"
#include "backends/cuda/sm75/kernels.h"
#include "backends/cuda/sm80/kernels.h"
#include "backends/cuda/sm90/kernels.h"

#define CQSA_CUDA_KERNELS(X) CQSA_SM70_KERNELS(X) CQSA_SM75_KERNELS(X) CQSA_SM80_KERNELS(X) CQSA_SM90_KERNELS(X)
