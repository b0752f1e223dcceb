// SPDX-License-Identifier: Apache-2.0
// The matrix instruction of Volta. PTX ISA, "Matrix Fragments for mma.m8n8k4 with .f16 floating point type".
//
// A warp computes four independent 8 x 8 x 4 products, one by each quad pair: lanes 4 p .. 4 p + 3 and 16 + 4 p .. 19 + 4 p for
// p = 0..3. With l = lane % 4 and h = 4 for lanes from 16 on, otherwise 0, a lane holds, i from 0:
//   a  row: A[l + h][i]     col: A[i + h][l]        4 halves
//   b  row: B[l][i + h]     col: B[i][l + h]        4 halves
//   c  C[(l & 1) + (i & 2) + h][(i & 4) + (l & 2) + (i & 1)]    8 floats
// Since sm_75 the instruction is emulated, right and slow.
#pragma once

#include "backends/gpu/port_device.cuh"

namespace cqsa::gpu {
enum class order { row, col };
}

#if defined(CQSA_SIMT)
#include "simt_mma.h"  // tests/simt
#else

namespace cqsa::gpu {

#define CQSA_MMA_M8N8K4(alayout, blayout)                                                                                         \
  asm volatile("mma.sync.aligned.m8n8k4." #alayout "." #blayout ".f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9}, {%10,%11}, " \
               "{%0,%1,%2,%3,%4,%5,%6,%7};"                                                                                       \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])                    \
               : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(b[1]))

// c += a b in each quad pair; f16 operands.
template <order A, order B> CQSA_DEVICE void mma_m8n8k4(float (&c)[8], const uint32_t (&a)[2], const uint32_t (&b)[2]) {
  if constexpr (A == order::row && B == order::row) CQSA_MMA_M8N8K4(row, row);
  else if constexpr (A == order::row) CQSA_MMA_M8N8K4(row, col);
  else if constexpr (B == order::row) CQSA_MMA_M8N8K4(col, row);
  else CQSA_MMA_M8N8K4(col, col);
}
#undef CQSA_MMA_M8N8K4

}  // namespace cqsa::gpu

#endif
