// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "context.h"
#include "error.h"

namespace cqsa {

// cqsa_attention_merge: checks and calls the backend's merge leaf.
cqsa_status merge(const cqsa_context& context, const cqsa_attention_merge_args* args, void* stream);

}  // namespace cqsa
