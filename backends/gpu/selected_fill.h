// SPDX-License-Identifier: Apache-2.0
// From a leaf of selected-cell attention to the parameters of a kernel: shared by the portable one and the tuned ones.
#pragma once

#include "port.h"
#include "selected_params.h"

namespace cqsa::gpu {

// Reasons that hold for every kernel of a GPU; nullptr: none.
const char* why_no_gpu(const cqsa_selected_leaf& leaf);

// `run`: elements of k and v that a kernel reads at once; their views' quads tells whether it may.
void fill_params(const cqsa_selected_leaf& leaf, int64_t run, selected_params* out);

// One block for each query, key head and 16 of its query heads.
cqsa_status launch_units(void* device, kernel_id kernel, uint32_t threads, uint32_t shared_bytes, selected_params* p, void* stream);

// Of a device without tuned kernels for the leaf.
cqsa_status launch_portable(void* device, const cqsa_selected_leaf& leaf, void* stream);

}  // namespace cqsa::gpu
