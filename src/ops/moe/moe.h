// SPDX-License-Identifier: Apache-2.0
// The mixture-of-experts layer, cqsa.h section 17: the first implementation of the backend that takes it.
#pragma once
#include <string>

#include "ops/moe/weights.h"

namespace cqsa::moe {

cqsa_status prefill(const cqsa_context&, const cqsa_moe_args* args, void* stream, bool capturing);
cqsa_status workspace(const cqsa_context&, const cqsa_moe_args* args, uint64_t& bytes_out);
cqsa_status explain(const cqsa_context&, const cqsa_moe_args* args, std::string& out);

inline constexpr int most_operands = 12;  // tensors of a call, and its workspace
// The arguments, checked, as the leaf, without the workspace and without what only a look at values tells. outputs: what the call writes so far.
cqsa_status bind(fp8::operand_list& list, const cqsa_moe_args& args, cqsa_moe_leaf& leaf);
// No matrix shares memory with what is written; where every matrix is.
cqsa_status check_weights(fp8::operand_list& list, const cqsa_moe_args& args, const cqsa_moe_leaf& leaf);
// Ids and the expert map, on a host backend.
cqsa_status check_ids(const cqsa_moe_leaf& leaf);

// What grouping takes too.
cqsa_moe_rows rows_of(const fp8::operand_list& list, const cqsa_tensor& t);
cqsa_status take_ids(fp8::operand_list& list, const cqsa_tensor* t, int64_t tokens, cqsa_moe_rows& out, int64_t& topk);
struct id_space {
  int64_t num_experts, num_ids = 0;
  const int32_t* map = nullptr;
  int64_t map_stride = 0;
};
cqsa_status take_map(fp8::operand_list& list, const cqsa_tensor* t, id_space& space);
cqsa_status take_counters(fp8::operand_list& list, const cqsa_tensor* t, int64_t*& out, int64_t& stride);
// usable: whether an expert can be used; nullptr: all can.
cqsa_status check_id_values(const cqsa_moe_rows& ids, int64_t tokens, int64_t topk, const id_space& space);

}  // namespace cqsa::moe
