// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/sm80/kernels_selected.h"

#define CQSA_SM80_KERNELS(X) CQSA_SM80_SELECTED_KERNELS(X)
