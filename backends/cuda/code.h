// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device.h"

namespace cqsa::cuda {

// Fills d.function for every kernel, with d.context current. Nothing is left for the driver to load at a launch: that would
// wait for the device, and fail in a stream that is being captured.
cqsa_status load_code(device& d);
// The newest tuned kernels in this build for devices of this arch, as in cqsa_chip.
int32_t best_tier(int32_t arch);
const char* kernel_name(gpu::kernel_id kernel);

}  // namespace cqsa::cuda
