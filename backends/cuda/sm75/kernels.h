// SPDX-License-Identifier: Apache-2.0
#pragma once

#define CQSA_SM75_KERNELS(X)
