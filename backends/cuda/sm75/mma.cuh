// SPDX-License-Identifier: Apache-2.0
// The matrix instructions of Turing. PTX ISA, "Matrix Fragments for mma.m16n8k8" and "Warp-level matrix instructions: ldmatrix".
//
// With g = lane / 4 and l = lane % 4 a lane holds, i from 0:
//   a  A[g + 8 (i / 2)][2 l + i % 2]    4 halves      b  B[2 l + i][g]    2 halves
//   c  C[g + 8 (i / 2)][2 l + i % 2]    4 floats
#pragma once

#include "backends/gpu/port_device.cuh"

#if defined(CQSA_SIMT)
#include "simt_mma.h"  // tests/simt
#else

namespace cqsa::gpu {

// c += a b, f16 operands.
CQSA_DEVICE void mma_m16n8k8_f16(float (&c)[4], const uint32_t (&a)[2], uint32_t b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(b));
}

CQSA_DEVICE uint32_t shared_address(const void* shared) { return uint32_t(__cvta_generic_to_shared(shared)); }

// 8 x 8 matrices of halves from shared memory: lane 8 m + r gives the address, aligned to 16, of row r of matrix m; lanes beyond
// the last matrix give any of these. Register m then holds elements [g][2 l] and [g][2 l + 1] of matrix m, transposed
// [2 l][g] and [2 l + 1][g].
CQSA_DEVICE void ldmatrix_x1(uint32_t (&r)[1], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(shared_address(row)) : "memory");
}
CQSA_DEVICE void ldmatrix_x2(uint32_t (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(shared_address(row)) : "memory");
}
CQSA_DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
CQSA_DEVICE void ldmatrix_x1_trans(uint32_t (&r)[1], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(shared_address(row)) : "memory");
}
CQSA_DEVICE void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(shared_address(row)) : "memory");
}
CQSA_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

}  // namespace cqsa::gpu

#endif
