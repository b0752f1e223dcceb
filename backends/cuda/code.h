// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device.h"

namespace cqsa::cuda {

// Fills d.function for every kernel, with d.context current. Nothing is left for the driver to load at a launch: that would
// wait for the device, and fail in a stream that is being captured.
cqsa_status load_code(device& d);
const char* kernel_name(gpu::kernel_id kernel);

}  // namespace cqsa::cuda
