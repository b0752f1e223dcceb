// SPDX-License-Identifier: Apache-2.0
// What is asked: the params checked and completed, and the operands checked and turned into views.
#pragma once
#include "backends/cqsa_backend.h"
#include "error.h"

namespace cqsa {

inline constexpr uint32_t attention_flags = (CQSA_ATTENTION_DETERMINISTIC << 1) - 1;  // every bit that has a meaning

// Params after validation: dtype_out, softmax_scale and windows filled in, nothing contradictory left.
struct attention_problem {
  cqsa_attention_params p{};
  cqsa_chip chip{};  // of the context it is planned for

  bool has(uint32_t flag) const { return p.flags & flag; }
  int64_t ratio() const { return p.num_heads / p.num_kv_heads; }
  bool varlen() const { return has(CQSA_ATTENTION_VARLEN); }
  bool paged() const { return has(CQSA_ATTENTION_PAGED); }
  bool batch_invariant() const { return has(CQSA_ATTENTION_BATCH_INVARIANT); }
  // Some operand lies in a mapped file whose resident pages count.
  bool mapped() const {
    return p.memory_q == CQSA_MEMORY_MAPPED || p.memory_kv == CQSA_MEMORY_MAPPED || p.memory_out == CQSA_MEMORY_MAPPED;
  }
  // Every operand and output is memory of the device.
  bool on_device() const {
    return p.memory_q == CQSA_MEMORY_DEVICE && p.memory_kv == CQSA_MEMORY_DEVICE && p.memory_out == CQSA_MEMORY_DEVICE;
  }
  // No output element at all.
  bool empty() const { return varlen() ? p.total_q == 0 : p.batch == 0 || p.seqlen_q == 0; }
  // Bytes of one row of one head; k and v include nothing of their scales.
  int64_t q_row_bytes() const;
  int64_t k_row_bytes() const;
  int64_t v_row_bytes() const;
  int64_t out_row_bytes() const;
  int64_t k_scale_row_bytes() const;  // 0 unless per token or per group
  int64_t v_scale_row_bytes() const;
};

// The caller's params (any struct_size that ever was) -> problem. All errors of params that do not need a backend.
cqsa_status make_problem(const cqsa_attention_params* params, attention_problem& out);

cqsa_status copy_args(const cqsa_attention_args* args, cqsa_attention_args& out);

// cqsa_attention_params_of: shapes, dtypes, places and presence flags from tensors. Checks what it has to read; the rest is
// for make_problem and bind_operands. kv_group (int8) is taken as a wish when it is set, and so is
// CQSA_MEMORY_MAPPED for what is in host memory.
cqsa_status params_of(const cqsa_backend_v1& backend, const cqsa_attention_args& args, cqsa_attention_params& inout);

// Params with num_heads = 0 take from the tensors what they do not state; others are left alone. What is stated and is not so is an
// error here, or stays and is one for make_problem or bind_operands.
cqsa_status complete_params(const cqsa_backend_v1& backend, const cqsa_attention_args& args, cqsa_attention_params& inout);

// The leaf of the whole problem without data: every operand that is there has a non-NULL data pointer that must not be
// followed, and compact strides. For probe and workspace.
cqsa_attention_leaf shape_of_leaf(const attention_problem& problem);

// Checks every operand against the problem (presence, shape, dtype, device, overlap, values of host-resident cu_seqlens,
// seqused_k and page_table) and fills the leaf of the whole problem. Touches no output. Operands on the device must all have
// the same device_id; that it is the context's own device is for the caller to check.
cqsa_status bind_operands(const attention_problem& problem, const cqsa_backend_v1& backend, const cqsa_attention_args& args,
                          cqsa_attention_leaf& leaf_out);

}  // namespace cqsa
