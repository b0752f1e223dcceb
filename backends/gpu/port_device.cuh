// SPDX-License-Identifier: Apache-2.0
// The names in which the portable kernels are written; the only file of the portable tier that knows a vendor. Three worlds
// supply them: nvcc and clang for CUDA, clang for HIP, and the SIMT harness of the tests (CQSA_SIMT), where a thread of a block
// is a fiber on the CPU.
//
// Lanes is the number of threads that run in lockstep, 32 or 64, a template argument of every kernel.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(CQSA_SIMT)

#include "simt_device.h"  // tests/simt

#else

#if defined(__HIP__)
#include <hip/hip_runtime.h>
#else
#include <cuda_fp16.h>
#endif

// Lanes of the chip this pass compiles for, for the wrappers that CQSA_KERNEL makes; gfx9 is the only one with 64.
#if !defined(CQSA_LANES)
#if defined(__GFX9__)
#define CQSA_LANES 64
#else
#define CQSA_LANES 32
#endif
#endif
// A deliberate mistake that the tests of the SIMT harness can switch on; see docs/kernels/simt.md.
#define CQSA_MUTANT(n) false

#define CQSA_DEVICE __device__ __forceinline__
// CQSA_KERNEL(threads per block, name, type of its one parameter) { .. p .. }. Two blocks on a multiprocessor (two waves on a SIMD
// unit of AMD's), so that one computes while the other loads: at most 128 registers on NVIDIA's chips.
#define CQSA_KERNEL(threads, name, params) CQSA_TUNED_KERNEL(threads, 2, name, params)
// .. and with another number of blocks.
#define CQSA_TUNED_KERNEL(threads, blocks, name, params) \
  extern "C" __global__ void __launch_bounds__(threads, blocks) name(const params p)

namespace cqsa::gpu {

CQSA_DEVICE int thread_index() { return int(threadIdx.x); }
CQSA_DEVICE int block_threads() { return int(blockDim.x); }
CQSA_DEVICE int64_t block_index_x() { return blockIdx.x; }
CQSA_DEVICE int64_t block_index_y() { return blockIdx.y; }
CQSA_DEVICE int64_t grid_size_x() { return gridDim.x; }

// All threads of the block.
CQSA_DEVICE void barrier() { __syncthreads(); }

// The block's dynamic shared memory, aligned to 16.
CQSA_DEVICE unsigned char* shared_memory() {
  extern __shared__ __align__(16) unsigned char cqsa_shared[];
  return cqsa_shared;
}

#if defined(__HIP__)
template <int Lanes> CQSA_DEVICE void lanes_barrier() { __builtin_amdgcn_wave_barrier(); }
template <int Lanes, class T> CQSA_DEVICE T shuffle_xor(T value, int mask) { return __shfl_xor(value, mask, Lanes); }
template <int Lanes, class T> CQSA_DEVICE T shuffle(T value, int lane) { return __shfl(value, lane, Lanes); }
template <int Lanes> CQSA_DEVICE uint64_t ballot(bool value) { return __ballot(value); }
CQSA_DEVICE float f16_to_f32(uint16_t bits) {
  _Float16 h;
  __builtin_memcpy(&h, &bits, 2);
  return float(h);
}
CQSA_DEVICE uint16_t f32_to_f16(float value) {
  const _Float16 h = _Float16(value);
  uint16_t bits;
  __builtin_memcpy(&bits, &h, 2);
  return bits;
}
#else
template <int Lanes> CQSA_DEVICE void lanes_barrier() { __syncwarp(); }
template <int Lanes, class T> CQSA_DEVICE T shuffle_xor(T value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask, Lanes); }
template <int Lanes, class T> CQSA_DEVICE T shuffle(T value, int lane) { return __shfl_sync(0xffffffffu, value, lane, Lanes); }
template <int Lanes> CQSA_DEVICE uint64_t ballot(bool value) { return __ballot_sync(0xffffffffu, value); }
CQSA_DEVICE float f16_to_f32(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
CQSA_DEVICE uint16_t f32_to_f16(float value) { return __half_as_ushort(__float2half_rn(value)); }
#endif

// Shared or global memory; the old value.
CQSA_DEVICE uint32_t atomic_or(uint32_t* to, uint32_t bits) { return atomicOr(to, bits); }
CQSA_DEVICE uint32_t atomic_exchange(uint32_t* to, uint32_t value) { return atomicExch(to, value); }
CQSA_DEVICE uint32_t atomic_add(uint32_t* to, uint32_t value) { return atomicAdd(to, value); }
CQSA_DEVICE uint32_t atomic_max(uint32_t* to, uint32_t value) { return atomicMax(to, value); }
// What this thread did before it is seen, by all of the device, before what it does behind, and the reverse for what it reads.
#if defined(__HIP__)
CQSA_DEVICE void device_fence() { __threadfence(); }
CQSA_DEVICE uint32_t atomic_add_release(uint32_t* to, uint32_t value) { return __hip_atomic_fetch_add(to, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT); }
#else  // what __threadfence() is, sequentially consistent, takes longer
CQSA_DEVICE void device_fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// After what this thread did before. A fence would empty the first cache too.
CQSA_DEVICE uint32_t atomic_add_release(uint32_t* to, uint32_t value) {
  uint32_t before;
  asm volatile("atom.release.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(value) : "memory");
  return before;
}
#endif
CQSA_DEVICE void atomic_add_i64(int64_t* to, int64_t value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(value));
}

// 16 bytes that nobody writes meanwhile.
struct alignas(16) loaded16 {
  uint32_t x[4];
};
#if defined(__HIP__)
CQSA_DEVICE loaded16 load_once(const void* from) { return *static_cast<const loaded16*>(from); }
CQSA_DEVICE loaded16 load_now(const void* from) { return *static_cast<const loaded16*>(from); }
CQSA_DEVICE uint32_t max_u16x2(uint32_t a, uint32_t b) {
  const uint32_t low = (a & 0xffffu) > (b & 0xffffu) ? a & 0xffffu : b & 0xffffu, high = a >> 16 > b >> 16 ? a : b;
  return low | (high & 0xffff0000u);
}
// Byte i is byte (selector >> 4 * i & 7) of the eight of a and b, a's first.
CQSA_DEVICE uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  return __builtin_amdgcn_perm(b, a, (selector & 7u) | (selector & 0x70u) << 4 | (selector & 0x700u) << 8 | (selector & 0x7000u) << 12);
}
#else
CQSA_DEVICE loaded16 load_once(const void* from) {
  loaded16 out;
  // Without a hint: on an H200 L1::no_allocate and .cs take 3 to 4 of 53 us more.
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(out.x[0]), "=r"(out.x[1]), "=r"(out.x[2]), "=r"(out.x[3]) : "l"(from));
  return out;
}
// .. that a barrier behind it does not overtake.
CQSA_DEVICE loaded16 load_now(const void* from) {
  loaded16 out;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(out.x[0]), "=r"(out.x[1]), "=r"(out.x[2]), "=r"(out.x[3]) : "l"(from) : "memory");
  return out;
}
CQSA_DEVICE uint32_t max_u16x2(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 900
  uint32_t out;
  asm("max.u16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
#else
  const uint32_t low = (a & 0xffffu) > (b & 0xffffu) ? a & 0xffffu : b & 0xffffu, high = a >> 16 > b >> 16 ? a : b;
  return low | (high & 0xffff0000u);
#endif
}
CQSA_DEVICE uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t selector) { return __byte_perm(a, b, selector); }
#endif

// Whether the compiler for this chip keeps a tile in few registers: that for sm_80 and newer does.
#if (defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800) || defined(__HIP__)
constexpr bool tile_in_few_registers = false;
#else
constexpr bool tile_in_few_registers = true;
#endif

// Eight aligned bytes. No hint here either: .cs takes 1 of 53 us more.
CQSA_DEVICE void store_once8(void* to, uint32_t low, uint32_t high) { *static_cast<uint2*>(to) = make_uint2(low, high); }

// c plus the products of four signed bytes.
#if defined(__HIP__) && (defined(__GFX9__) || defined(__gfx1030__))
CQSA_DEVICE int32_t dot4(uint32_t a, uint32_t b, int32_t c) { return __builtin_amdgcn_sdot4(int(a), int(b), c, false); }
#elif defined(__HIP__) && defined(__GFX11__)
CQSA_DEVICE int32_t dot4(uint32_t a, uint32_t b, int32_t c) { return __builtin_amdgcn_sudot4(true, int(a), true, int(b), c, false); }
#elif defined(__HIP__)
CQSA_DEVICE int32_t dot4(uint32_t a, uint32_t b, int32_t c) {
  for (int i = 0; i < 4; ++i) c += int8_t(a >> 8 * i) * int8_t(b >> 8 * i);
  return c;
}
#else
CQSA_DEVICE int32_t dot4(uint32_t a, uint32_t b, int32_t c) { return __dp4a(int(a), int(b), c); }
#endif

// Two numbers, neither of them NaN, to FP8 codes, to nearest even and saturated; the first one low. Only where has_fp8.
#if !defined(__HIP__) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
constexpr bool has_fp8 = true;
CQSA_DEVICE uint32_t pack_e4m3(float low, float high) {
  uint16_t out;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
  return out;
}
CQSA_DEVICE uint32_t pack_e5m2(float low, float high) {
  uint16_t out;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
  return out;
}
#else
constexpr bool has_fp8 = false;
CQSA_DEVICE uint32_t pack_e4m3(float, float) { return 0; }
CQSA_DEVICE uint32_t pack_e5m2(float, float) { return 0; }
#endif

// 0, but no compiler knows it: what depends on it is worked out where it stands, and takes no registers before.
CQSA_DEVICE int hidden_zero() {
  int zero = 0;
#if defined(__HIP__)
  asm volatile("" : "+s"(zero));
#else
  asm volatile("" : "+r"(zero));
#endif
  return zero;
}

// Two numbers, neither of them NaN, to f16 and bf16, to nearest even; the first one low.
#if !defined(__HIP__) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
CQSA_DEVICE uint32_t pair_of_f16(float low, float high) {
  uint32_t out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
CQSA_DEVICE uint32_t pair_of_bf16(float low, float high) {
  uint32_t out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
#else
CQSA_DEVICE uint32_t pair_of_f16(float low, float high) { return f32_to_f16(low) | uint32_t(f32_to_f16(high)) << 16; }
CQSA_DEVICE uint32_t pair_of_bf16(float low, float high) {
  const uint32_t a = __float_as_uint(low), b = __float_as_uint(high);
  return (a + 0x7fffu + (a >> 16 & 1u)) >> 16 | ((b + 0x7fffu + (b >> 16 & 1u)) & 0xffff0000u);
}
#endif

CQSA_DEVICE float fma_f32(float a, float b, float c) { return fmaf(a, b, c); }
CQSA_DEVICE float exp_f32(float x) { return expf(x); }
// 2^x and 1 / x to 2 units in the last place; results below the smallest normal number are 0.
#if defined(__HIP__)
CQSA_DEVICE float exp2_f32(float x) { return exp2f(x); }
CQSA_DEVICE float reciprocal_f32(float x) { return 1.0f / x; }
#else
CQSA_DEVICE float reciprocal_f32(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
CQSA_DEVICE float exp2_f32(float x) {
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif
// A product that no compiler fuses with a sum behind it.
#if defined(__HIP__)
CQSA_DEVICE float product_f32(float a, float b) {
#pragma clang fp contract(off)
  return a * b;
}
#else
CQSA_DEVICE float product_f32(float a, float b) { return __fmul_rn(a, b); }
#endif
CQSA_DEVICE float log_f32(float x) { return logf(x); }
CQSA_DEVICE double log_f64(double x) { return log(x); }
CQSA_DEVICE double exp_f64(double x) { return exp(x); }
CQSA_DEVICE float tanh_f32(float x) { return tanhf(x); }
CQSA_DEVICE float erf_f32(float x) { return erff(x); }
CQSA_DEVICE float max_f32(float a, float b) { return fmaxf(a, b); }
CQSA_DEVICE uint32_t bits_of(float x) { return __float_as_uint(x); }
CQSA_DEVICE float float_of(uint32_t x) { return __uint_as_float(x); }

}  // namespace cqsa::gpu

#endif
