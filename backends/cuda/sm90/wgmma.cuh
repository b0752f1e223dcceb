// SPDX-License-Identifier: Apache-2.0
// The matrix instructions of Hopper: four warps (a warpgroup) multiply 64 rows. PTX ISA, "Asynchronous Warpgroup Level Matrix
// Multiply-Accumulate Instructions".
//
// With w = warp % 4, g = lane / 4 and l = lane % 4 a thread holds of 64 x N sums
//   c[4 n + i] = C[16 w + g + 8 (i / 2)][8 n + 2 l + i % 2]
// and of a 64 x 16 operand in registers the four words that mma.m16n8k16 has for rows 16 w .. 16 w + 15.
#pragma once

#include "backends/cuda/sm80/mma.cuh"

namespace cqsa::gpu::sm90 {

// Where an operand is in shared memory: chunks of 16 bytes in rows of 128, exchanged by an XOR with the row modulo 8, as TMA writes
// them with CU_TENSOR_MAP_SWIZZLE_128B. Every panel of 64 halves is one after the other. panel_bytes matters where N is contiguous.
// The high half is the same for all, and what is further on in shared memory is found by adding to the low half.
struct matrix_place {
  uint32_t low;
  CQSA_DEVICE matrix_place(uint32_t shared, uint32_t panel_bytes) : low((panel_bytes >> 4) << 16 | shared >> 4) {}
  CQSA_DEVICE uint64_t at(uint32_t bytes) const {
    constexpr uint32_t swizzled_128 = 1u << 30, eight_rows = 1024 >> 4;
    return uint64_t(swizzled_128 | eight_rows) << 32 | (low + (bytes >> 4));
  }
};

// Registers that were written before the next product.
CQSA_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
CQSA_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most Pending of the newest groups are under way.
template <int Pending> CQSA_DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory"); }
// Keeps the compiler from using sums before the wait that stands in front of this.
template <int Count> CQSA_DEVICE void after_wait(float (&c)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

// ------------------------------------------------------------------------------------------------------------ instructions

#define CQSA_WGMMA_R16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define CQSA_WGMMA_R32 CQSA_WGMMA_R16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define CQSA_WGMMA_R48 CQSA_WGMMA_R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define CQSA_WGMMA_R64 CQSA_WGMMA_R48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define CQSA_WGMMA_R80 CQSA_WGMMA_R64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define CQSA_WGMMA_R96 CQSA_WGMMA_R80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define CQSA_WGMMA_R112 CQSA_WGMMA_R96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define CQSA_WGMMA_R128 CQSA_WGMMA_R112 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define CQSA_WGMMA_R40 CQSA_WGMMA_R32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define CQSA_WGMMA_R56 CQSA_WGMMA_R48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define CQSA_WGMMA_R72 CQSA_WGMMA_R64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define CQSA_WGMMA_R88 CQSA_WGMMA_R80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define CQSA_WGMMA_C8(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define CQSA_WGMMA_C16(i) CQSA_WGMMA_C8(i), CQSA_WGMMA_C8(i + 8)
#define CQSA_WGMMA_O16 CQSA_WGMMA_C16(0)
#define CQSA_WGMMA_O32 CQSA_WGMMA_O16, CQSA_WGMMA_C16(16)
#define CQSA_WGMMA_O48 CQSA_WGMMA_O32, CQSA_WGMMA_C16(32)
#define CQSA_WGMMA_O64 CQSA_WGMMA_O48, CQSA_WGMMA_C16(48)
#define CQSA_WGMMA_O80 CQSA_WGMMA_O64, CQSA_WGMMA_C16(64)
#define CQSA_WGMMA_O96 CQSA_WGMMA_O80, CQSA_WGMMA_C16(80)
#define CQSA_WGMMA_O112 CQSA_WGMMA_O96, CQSA_WGMMA_C16(96)
#define CQSA_WGMMA_O128 CQSA_WGMMA_O112, CQSA_WGMMA_C16(112)
#define CQSA_WGMMA_O40 CQSA_WGMMA_O32, CQSA_WGMMA_C8(32)
#define CQSA_WGMMA_O56 CQSA_WGMMA_O48, CQSA_WGMMA_C8(48)
#define CQSA_WGMMA_O72 CQSA_WGMMA_O64, CQSA_WGMMA_C8(64)
#define CQSA_WGMMA_O88 CQSA_WGMMA_O80, CQSA_WGMMA_C8(80)

// One instruction: c (+)= a b, 16 deep. a in shared memory with K contiguous, or in registers. b in shared memory with K contiguous
// (TransposeB 0) or N contiguous (1). Add 0: the sums begin here.
template <int N, int Kind, int TransposeB> struct wgmma_instruction;

#define CQSA_WGMMA(n, count, kind, d0, d1, d2, d3, d4, d5)                                                                             \
  template <int TransposeB> struct wgmma_instruction<n, kind_##kind, TransposeB> {                                                     \
    static CQSA_DEVICE void shared(float (&c)[count], uint64_t a, uint64_t b, int add) {                                               \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " d2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #kind "." #kind       \
                   " {" CQSA_WGMMA_R##count "}, " d0 ", " d1 ", p, 1, 1, 0, " d3 ";\n}\n"                                              \
                   : CQSA_WGMMA_O##count                                                                                               \
                   : "l"(a), "l"(b), "r"(add), "n"(TransposeB));                                                                       \
    }                                                                                                                                  \
    static CQSA_DEVICE void registers(float (&c)[count], const uint32_t (&a)[4], uint64_t b) {                                         \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #kind "." #kind " {" CQSA_WGMMA_R##count "}, {" d0 ", " d1 ", " d2 \
                   ", " d3 "}, " d4 ", 1, 1, 1, " d5 ";"                                                                               \
                   : CQSA_WGMMA_O##count                                                                                               \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TransposeB));                                             \
    }                                                                                                                                  \
  };
#define CQSA_WGMMA_BOTH(n, count, ...) CQSA_WGMMA(n, count, f16, __VA_ARGS__) CQSA_WGMMA(n, count, bf16, __VA_ARGS__)

CQSA_WGMMA_BOTH(64, 32, "%32", "%33", "%34", "%35", "%36", "%37")
CQSA_WGMMA_BOTH(80, 40, "%40", "%41", "%42", "%43", "%44", "%45")
CQSA_WGMMA_BOTH(96, 48, "%48", "%49", "%50", "%51", "%52", "%53")
CQSA_WGMMA_BOTH(112, 56, "%56", "%57", "%58", "%59", "%60", "%61")
CQSA_WGMMA_BOTH(128, 64, "%64", "%65", "%66", "%67", "%68", "%69")
CQSA_WGMMA_BOTH(144, 72, "%72", "%73", "%74", "%75", "%76", "%77")
CQSA_WGMMA_BOTH(160, 80, "%80", "%81", "%82", "%83", "%84", "%85")
CQSA_WGMMA_BOTH(176, 88, "%88", "%89", "%90", "%91", "%92", "%93")
CQSA_WGMMA_BOTH(192, 96, "%96", "%97", "%98", "%99", "%100", "%101")
CQSA_WGMMA_BOTH(256, 128, "%128", "%129", "%130", "%131", "%132", "%133")

#undef CQSA_WGMMA_BOTH
#undef CQSA_WGMMA

}  // namespace cqsa::gpu::sm90
