// SPDX-License-Identifier: Apache-2.0
// What fp8_gemm_leaf.cpp tells the kernels of cqsa_fp8_gemm(). Plain data, passed by value at launch.
#pragma once

#include <cstdint>

namespace cqsa::gpu {

// Element types of c, bias and d, and the formats of a and b. The first three are those of element_kind.
enum gemm_kind : int32_t { gemm_f32 = 0, gemm_f16 = 1, gemm_bf16 = 2, gemm_e4m3fn = 3, gemm_e5m2 = 4, gemm_e4m3fnuz = 5, gemm_e5m2fnuz = 6 };

constexpr int gemm_ticket_word = 16;  // of a workspace, whose first word is the magic number; as in fp8_rules.h
constexpr uint32_t gemm_workspace_magic = 0x57465143u;
constexpr int gemm_promote = 128;  // products of neighbours in k that are summed up before they get their scales

// Codes [batch, rows, k]; strides in bytes.
struct gemm_operand {
  const unsigned char* data;
  int64_t stride[3];
  int32_t kind;
  int32_t wide;  // 16 neighbours in k may be read at once; not for the portable kernel
};

// The scale of (row, k) is data[batch * stride[0] + row / rows * stride[1] + k / 128 * stride[2]]; NULL: 1. One scale for a whole axis is a
// stride of 0.
struct gemm_scales {
  const float* data;
  int64_t stride[3];
  int64_t rows;
};

// [batch, m, n]; strides in elements.
struct gemm_matrix {
  char* data;
  int64_t stride[3];
  int32_t kind;
  int32_t wide;  // a row's elements 8 i .. 8 i + 7 are neighbours, and aligned to their bytes or to 16
};

// How sums become d.
struct gemm_end {
  gemm_matrix c, d;  // c.data NULL: none
  const char* bias;  // [n], NULL: none
  int64_t bias_stride;
  const float* d_scale;  // NULL: 1
  float* d_amax;
  uint32_t* ticket;  // two words of the workspace, 0 before and after: the largest |d| so far, and how many have told theirs
  float alpha, beta;
  int32_t bias_kind;
  int32_t reserved;
};

struct gemm_params {
  gemm_operand a, b;
  gemm_scales scale_a, scale_b;
  gemm_end end;
  int64_t batch, m, n, k;
  int64_t row_tiles, column_tiles;
};

}  // namespace cqsa::gpu
