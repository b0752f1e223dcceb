// SPDX-License-Identifier: Apache-2.0
// cqsa_fp8_quantize() and what is asked with it: checks, then one leaf call for all tensors.
#pragma once
#include "context.h"

namespace cqsa::fp8 {

// many: messages name the entry.
cqsa_status quantize(const cqsa_context&, const cqsa_fp8_quantize_args* const* args, int64_t count, bool many, void* stream, bool capturing);
cqsa_status quantize_workspace(const cqsa_context&, const cqsa_fp8_quantize_args* const* args, int64_t count, uint64_t& bytes_out);

struct amax_call {
  const cqsa_tensor* x;
  const int64_t* block;
  int32_t nan_policy;
  const cqsa_tensor* amax_out;
  void* workspace;
  uint64_t workspace_bytes;
};
cqsa_status amax(const cqsa_context&, const amax_call& call, void* stream, bool capturing);

}  // namespace cqsa::fp8
