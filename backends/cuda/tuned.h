// SPDX-License-Identifier: Apache-2.0
// The implementations of the tuned tiers, which plugin.cpp lists before the portable one.
#pragma once

#include "backends/cqsa_backend.h"

namespace cqsa::gpu {

extern const cqsa_selected_impl sm80_selected;

}  // namespace cqsa::gpu
