// SPDX-License-Identifier: Apache-2.0
// Attention over selected cells of a paged cache, cqsa.h section 11.
#pragma once
#include "context.h"
#include "error.h"

namespace cqsa {

// cqsa_attention_selected: checks the arguments and gives them to the first implementation of the backend that takes them.
cqsa_status attention_selected(const cqsa_context&, const cqsa_attention_selected_args* args, void* stream, bool capturing);

// Its workspace; looks at shapes and types only.
cqsa_status attention_selected_workspace(const cqsa_context&, const cqsa_attention_selected_args* args, uint64_t& bytes_out);

// The arguments, checked, as what a backend gets. shapes_only: nothing but shapes, types and numbers is looked at, and the views
// hold addresses that must not be followed.
cqsa_status bind_selected(const cqsa_context&, const cqsa_attention_selected_args& args, bool shapes_only, cqsa_selected_leaf& leaf_out);

// CQSA_SELECTED_CHECK: counts, ids, and the pages they lead to. On a backend with memory of its own it copies the lists to the host,
// piece by piece, once what is queued on the stream has ended.
cqsa_status check_selection(const cqsa_context&, const cqsa_selected_leaf&, void* stream);

}  // namespace cqsa
