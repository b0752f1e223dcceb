// SPDX-License-Identifier: Apache-2.0
// The matrix and copy instructions of Ampere, and those of Turing. PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point
// type" and "Data Movement and Conversion Instructions: cp.async".
//
// With g = lane / 4 and l = lane % 4 a lane holds, i from 0:
//   a  A[g + 8 (i / 2 % 2)][2 l + i % 2 + 8 (i / 4)]    8 halves      b  B[2 l + i % 2 + 8 (i / 2)][g]    4 halves
//   c  C[g + 8 (i / 2)][2 l + i % 2]                    4 floats
#pragma once

#include "backends/cuda/sm75/mma.cuh"

#if !defined(CQSA_SIMT)

namespace cqsa::gpu {

// c += a b, f16 operands.
CQSA_DEVICE void mma_m16n8k16_f16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// The same with bf16 operands.
CQSA_DEVICE void mma_m16n8k16_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// thread_index(), read anew: what is computed from it does not occupy registers until it is needed again.
CQSA_DEVICE int thread_now() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// For the addresses of loops: the compiler may keep them from turn to turn where it has the registers; for sm_80 it spills others then.
CQSA_DEVICE int thread_in_loop() {
#if __CUDA_ARCH__ >= 900
  return thread_index();
#else
  return thread_now();
#endif
}

// Two floats to halves, the first one in the low bits; to nearest, ties to even.
CQSA_DEVICE uint32_t pack_f16(float low, float high) {
  uint32_t bits;
  asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
CQSA_DEVICE uint32_t pack_bf16(float low, float high) {
  uint32_t bits;
  asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

// Global to shared memory, both aligned to the size. The first `valid` bytes are read, the others become 0. What has been copied
// is there for this thread after the wait, for the others after a barrier behind it; between issue and wait the destination must
// not be touched. 16 bytes pass by the L1 cache.
CQSA_DEVICE void cp_async_16(void* shared, const void* global, int valid = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(__cvta_generic_to_global(global)), "r"(valid) : "memory");
}
CQSA_DEVICE void cp_async_8(void* shared, const void* global, int valid = 8) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(shared)), "l"(__cvta_generic_to_global(global)), "r"(valid) : "memory");
}
CQSA_DEVICE void cp_async_4(void* shared, const void* global, int valid = 4) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)), "l"(__cvta_generic_to_global(global)), "r"(valid) : "memory");
}
// Closes the group of the copies issued since the last one.
CQSA_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most Pending of the newest groups are under way.
template <int Pending> CQSA_DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory"); }

// a b + c of two halves each.
CQSA_DEVICE uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
CQSA_DEVICE uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
// Byte i of the result is byte (selector >> 4 i & 7) of the eight bytes of a, then b.
CQSA_DEVICE uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) { return __byte_perm(a, b, selector); }

}  // namespace cqsa::gpu

#endif
