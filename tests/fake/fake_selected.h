// SPDX-License-Identifier: Apache-2.0
// Attention over selected cells on the fake device: addresses checked, translated, and computed by the CPU backend.
#pragma once
#include <functional>
#include <string>

#include "backends/cqsa_backend.h"

namespace fake {


// "" with the work in work_out, or what is wrong with the call.
std::string prepare_selected(const cqsa_selected_leaf& leaf, void* workspace, uint64_t bytes, std::function<void()>& work_out);
cqsa_status probe_selected(const cqsa_selected_leaf* leaf, char* reason, uint64_t size);
uint64_t workspace_of_selected(const cqsa_selected_leaf* leaf, int64_t workers);

}  // namespace fake
