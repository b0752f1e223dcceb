// SPDX-License-Identifier: Apache-2.0
// The matrix tiles of AMX behind eight functions: eight registers of 16 rows of 64 bytes, per thread.
//
// With CQSA_TILE_MODEL a model in plain C++ stands in for them, exact to the lane and the bit, so that the kernels run, and
// are tested, on CPUs without AMX. It is compiled into the tests only.
//
// tile_dp_bf16<C, A, B>: C[m][n] += sum over k of A[m][2k] * B[k][2n] + A[m][2k + 1] * B[k][2n + 1], where A is 16 x 32 bf16
// and B holds pairs: 16 x 16 x 2 bf16. Even and odd products are summed apart, from 0, then together, then onto C. Subnormal
// operands and results are zero.
#pragma once

#include <hwy/highway.h>

#include <stdint.h>
#include <string.h>

HWY_BEFORE_NAMESPACE();
namespace cqsa::cpu {
namespace {
namespace HWY_NAMESPACE {

#if !defined(CQSA_TILE_MODEL)

// The compiler neither allocates these registers nor saves them. Inline assembly, since GCC 12's intrinsics do not say that
// a load reads memory, and stores before it may then be moved behind it.
struct alignas(64) tile_palette {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

static inline void tile_config() {
  static constexpr tile_palette config{};
  __asm__ volatile("ldtilecfg %0" : : "m"(config));
}
// Back to the initial state: otherwise every switch of this thread would save 8 KiB more.
static inline void tile_release() { __asm__ volatile("tilerelease" : : : "memory"); }
template <int T> HWY_INLINE void tile_zero() { __asm__ volatile("tilezero %%tmm%c0" : : "i"(T)); }
template <int T> HWY_INLINE void tile_load(const void* from, int64_t step) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(step), "i"(T) : "memory");
}
template <int T> HWY_INLINE void tile_store(void* to, int64_t step) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(step), "i"(T) : "memory");
}
template <int C, int A, int B> HWY_INLINE void tile_dp_bf16() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

#else

struct tile_registers {
  bool configured = false;
  uint32_t word[8][16][16];
};
static thread_local tile_registers tiles;

// As the instructions do without a configuration: stop the program.
static inline void tile_check() {
  if (!tiles.configured) __builtin_trap();
}
static inline void tile_config() {
  tiles.configured = true;
  memset(tiles.word, 0, sizeof tiles.word);
}
static inline void tile_release() { tiles.configured = false; }
template <int T> HWY_NOINLINE void tile_zero() {
  tile_check();
  memset(tiles.word[T], 0, sizeof tiles.word[T]);
}
template <int T> HWY_NOINLINE void tile_load(const void* from, int64_t step) {
  tile_check();
  for (int64_t m = 0; m < 16; ++m) memcpy(tiles.word[T][m], (const char*)from + m * step, 64);
}
template <int T> HWY_NOINLINE void tile_store(void* to, int64_t step) {
  tile_check();
  for (int64_t m = 0; m < 16; ++m) memcpy((char*)to + m * step, tiles.word[T][m], 64);
}

static inline float flushed(uint32_t bits) {
  bits = (bits & 0x7f800000u) ? bits : bits & 0x80000000u;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
static inline uint32_t flushed_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (bits & 0x7f800000u) ? bits : bits & 0x80000000u;
}
static inline float flush(float x) { return flushed(flushed_bits(x)); }

template <int C, int A, int B> HWY_NOINLINE void tile_dp_bf16() {
  tile_check();
  for (int m = 0; m < 16; ++m) {
    float even[16] = {}, odd[16] = {};
    for (int k = 0; k < 16; ++k) {
      const uint32_t a = tiles.word[A][m][k];
      const float a0 = flushed(a << 16), a1 = flushed(a & 0xffff0000u);
      for (int n = 0; n < 16; ++n) {
        const uint32_t b = tiles.word[B][k][n];
        even[n] = flush(__builtin_fmaf(a0, flushed(b << 16), even[n]));
        odd[n] = flush(__builtin_fmaf(a1, flushed(b & 0xffff0000u), odd[n]));
      }
    }
    for (int n = 0; n < 16; ++n)
      tiles.word[C][m][n] = flushed_bits(flushed(tiles.word[C][m][n]) + flush(even[n] + odd[n]));
  }
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace
}  // namespace cqsa::cpu
HWY_AFTER_NAMESPACE();
