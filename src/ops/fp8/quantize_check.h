// SPDX-License-Identifier: Apache-2.0
// The arguments of a quantization: each checked, then turned into the job of a leaf.
#pragma once
#include "ops/fp8/operands.h"

namespace cqsa::fp8 {

inline constexpr int most_operands = 19;  // that an entry takes: 17 tensors, a ring, a workspace

// Without the workspace. no_output: both may be absent, as row.block then says what amax wants (cqsa_fp8_amax()).
cqsa_status bind_job(operand_list& list, const cqsa_fp8_quantize_args& args, cqsa_fp8_job& job, bool no_output = false);

// Of a matrix of scales: {0, 0}, {1, 0}, {0, 1}, {128, 128}, {1, g} or {g, 1}.
cqsa_status check_block(const int64_t* block, const char* name);

// What only a host backend can look at before it begins: skip, groups, static scales.
cqsa_status check_job_values(const cqsa_fp8_job& job);

// The matrix of a job, and where the strides of all its tensors let it, without a batch.
struct shape_of_x {
  int64_t batch, rows, columns, all_rows;
};
cqsa_status take_shape(const cqsa_tensor& x, const char* name, shape_of_x& out);
bool fold_batch(int64_t batch, int64_t rows, cqsa_matrix* const* matrices, int count);

}  // namespace cqsa::fp8
