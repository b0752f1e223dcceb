// SPDX-License-Identifier: Apache-2.0
#pragma once

#define CQSA_SM70_KERNELS(X)
