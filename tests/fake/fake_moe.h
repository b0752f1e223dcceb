// SPDX-License-Identifier: Apache-2.0
// Mixtures of experts on the fake device: addresses checked and translated, lists of matrices that lie on the device read when the leaf runs, what a device finds
// out too late to refuse counted, and all of it computed by the CPU backend.
#pragma once
#include <functional>
#include <string>

#include "backends/cqsa_backend.h"

namespace fake {

// "" with the work in work_out, or what is wrong with the call.
std::string prepare_moe(const cqsa_moe_leaf& leaf, void* workspace, uint64_t bytes, std::function<void()>& work_out);
std::string prepare_moe(const cqsa_moe_route_leaf& leaf, std::function<void()>& work_out);
std::string prepare_moe(const cqsa_moe_group_leaf& leaf, std::function<void()>& work_out);
std::string prepare_moe(const cqsa_moe_quantize_leaf& leaf, std::function<void()>& work_out);
std::string prepare_moe(const cqsa_moe_combine_leaf& leaf, std::function<void()>& work_out);

// 64 bytes for each token of a piece.
uint64_t moe_workspace_of(const cqsa_moe_leaf* leaf, int64_t workers);

}  // namespace fake
