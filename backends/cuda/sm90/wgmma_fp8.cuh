// SPDX-License-Identifier: Apache-2.0
// The FP8 products of Hopper's matrix unit: 32 deep, both operands in shared memory with K contiguous, sums as in wgmma.cuh. The unit keeps
// some 14 bits of a sum.
#pragma once

#include "backends/gpu/fp8_gemm_params.h"
#include "wgmma.cuh"

namespace cqsa::gpu::sm90 {

// c (+)= a b; Add 0: the sums begin here.
template <int N, int KindA, int KindB> struct wgmma_fp8;

#define CQSA_WGMMA_FP8(n, count, a_type, b_type, d0, d1, d2)                                                                      \
  template <> struct wgmma_fp8<n, gemm_##a_type, gemm_##b_type> {                                                                 \
    static CQSA_DEVICE void shared(float (&c)[count], uint64_t a, uint64_t b, int add) {                                          \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " d2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k32.f32." CQSA_PTX_##a_type \
                   "." CQSA_PTX_##b_type " {" CQSA_WGMMA_R##count "}, " d0 ", " d1 ", p, 1, 1;\n}\n"                              \
                   : CQSA_WGMMA_O##count                                                                                          \
                   : "l"(a), "l"(b), "r"(add));                                                                                   \
    }                                                                                                                             \
  };
#define CQSA_PTX_e4m3fn "e4m3"
#define CQSA_PTX_e5m2 "e5m2"
#define CQSA_WGMMA_FP8_OF(n, count, d0, d1, d2)         \
  CQSA_WGMMA_FP8(n, count, e4m3fn, e4m3fn, d0, d1, d2)  \
  CQSA_WGMMA_FP8(n, count, e4m3fn, e5m2, d0, d1, d2)    \
  CQSA_WGMMA_FP8(n, count, e5m2, e4m3fn, d0, d1, d2)    \
  CQSA_WGMMA_FP8(n, count, e5m2, e5m2, d0, d1, d2)
CQSA_WGMMA_FP8_OF(64, 32, "%32", "%33", "%34")
CQSA_WGMMA_FP8_OF(128, 64, "%64", "%65", "%66")
CQSA_WGMMA_FP8_OF(256, 128, "%128", "%129", "%130")
#undef CQSA_WGMMA_FP8_OF
#undef CQSA_WGMMA_FP8
#undef CQSA_PTX_e4m3fn
#undef CQSA_PTX_e5m2

}  // namespace cqsa::gpu::sm90
