// SPDX-License-Identifier: Apache-2.0
// What quant_leaf.cpp tells the kernels that decode rows of quantized matrices.
#pragma once

#include "attention_params.h"

namespace cqsa::gpu {

struct quant_rows_params {
  const char* data;
  int64_t rows, row_bytes;       // of the matrix
  int64_t count, first_row;      // rows of out
  const void* row_ids;           // null: from first_row on
  int64_t row_ids_stride;
  int32_t row_ids_bytes;
  int32_t format;                // CQSA_QUANT_*
  int64_t pieces;                // of a row: 32 elements; of plain numbers quant_plain_piece
  int64_t elements;              // of a row
  gpu_view out;                  // strides 2 and 3: row, column
  int32_t wide;                  // out may be written 16 bytes at a time
};

constexpr int64_t quant_plain_piece = 1024;
// A lane's part of shared memory: eight words of codes, four numbers, and where its elements go.
constexpr int32_t quant_codes_bytes = 8 * 4, quant_numbers_bytes = 4 * 4, quant_lane_bytes = quant_codes_bytes + quant_numbers_bytes + 8;

}  // namespace cqsa::gpu
