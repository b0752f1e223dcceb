// SPDX-License-Identifier: Apache-2.0
// The device side of the SIMT harness: what backends/gpu/port_device.cuh promises to kernels, for a thread that is a fiber on the
// CPU. C++17, as kernels are. Compile a kernel file once with -DCQSA_LANES=32 and once with -DCQSA_LANES=64; CQSA_KERNEL registers
// it by name and lane count, and cqsa::simt::run() of simt_runtime.h finds it.
//
// A switch point is a call after which another thread may go on: barrier, lanes_barrier, shuffle, ballot, a matrix instruction, a
// wait for copies. Between two of them a thread runs alone.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if !defined(CQSA_LANES)
#define CQSA_LANES 32
#endif

// The mutant that is switched on, 0 for none. A kernel asks CQSA_MUTANT(n); on a real device that is false.
extern int cqsa_simt_mutant;
#define CQSA_MUTANT(n) (cqsa_simt_mutant == (n))

#define CQSA_DEVICE inline
#define CQSA_SIMT_JOIN_(a, b) a##b
#define CQSA_SIMT_JOIN(a, b) CQSA_SIMT_JOIN_(a, b)
#define CQSA_SIMT_NAME(name) CQSA_SIMT_JOIN(CQSA_SIMT_JOIN(name, _lanes), CQSA_LANES)

// The number of blocks on a multiprocessor is nothing to the harness.
#define CQSA_TUNED_KERNEL(threads, blocks, name, params) CQSA_KERNEL(threads, name, params)
#define CQSA_KERNEL(threads, name, params)                                                                                \
  static void CQSA_SIMT_NAME(name)(const params p);                                                                       \
  static const ::cqsa::simt::registered_kernel CQSA_SIMT_JOIN(CQSA_SIMT_NAME(name), _entry)(                              \
      #name, CQSA_LANES, threads, sizeof(params),                                                                         \
      [](const void* simt_params) { CQSA_SIMT_NAME(name)(*static_cast<const params*>(simt_params)); });                   \
  static void CQSA_SIMT_NAME(name)(const params p)

namespace cqsa::simt {

struct registered_kernel {
  registered_kernel(const char* name, int lanes, int threads, size_t params_bytes, void (*body)(const void*));
};

// What a thread may know of its place.
struct thread_place {
  int index, block_threads, lanes;
  int64_t block[3], grid[3];
  unsigned char* shared;
  int64_t shared_bytes;
};
extern __thread const thread_place* here;  // __thread: no wrapper call as thread_local has one across files

// What a lane brings to an operation of all lanes. The pointers are into the stacks of threads that are waiting.
struct lane_operand {
  const void* in;
  void* out;
  int64_t argument;
};
using lanes_function = void (*)(lane_operand* lanes, int num_lanes);

// Ends the run with this text.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
void block_barrier(const char* file, int line);
// Waits until all lanes have come to the same place; the last one calls the function, if any, before anyone goes on.
void meet_lanes(const char* what, int lanes, const lane_operand& mine, lanes_function function, const char* file, int line);

// Checks that [p, p + bytes) is shared memory, aligned to `alignment`.
void check_shared(const char* what, const void* p, int64_t bytes, int64_t alignment);

void issue_copy(void* shared, const void* global, int bytes, int read_bytes);
void commit_copies();
void wait_copies(int most_pending, const char* file, int line);

template <class T> void shuffle_lanes(lane_operand* lanes, int num_lanes) {
  for (int i = 0; i < num_lanes; ++i) std::memcpy(lanes[i].out, lanes[lanes[i].argument].in, sizeof(T));
}
inline void ballot_lanes(lane_operand* lanes, int num_lanes) {
  uint64_t bits = 0;
  for (int i = 0; i < num_lanes; ++i) bits |= uint64_t(lanes[i].argument != 0) << i;
  for (int i = 0; i < num_lanes; ++i) std::memcpy(lanes[i].out, &bits, sizeof bits);
}

}  // namespace cqsa::simt

#define CQSA_SIMT_SITE const char *simt_file = __builtin_FILE(), int simt_line = __builtin_LINE()

namespace cqsa::gpu {

CQSA_DEVICE int thread_index() { return simt::here->index; }
CQSA_DEVICE int block_threads() { return simt::here->block_threads; }
CQSA_DEVICE int64_t block_index_x() { return simt::here->block[0]; }
CQSA_DEVICE int64_t block_index_y() { return simt::here->block[1]; }
CQSA_DEVICE int64_t grid_size_x() { return simt::here->grid[0]; }

CQSA_DEVICE void barrier(CQSA_SIMT_SITE) { simt::block_barrier(simt_file, simt_line); }
CQSA_DEVICE unsigned char* shared_memory() { return simt::here->shared; }

template <int Lanes> CQSA_DEVICE void lanes_barrier(CQSA_SIMT_SITE) {
  simt::meet_lanes("lanes_barrier", Lanes, {nullptr, nullptr, 0}, nullptr, simt_file, simt_line);
}
template <int Lanes, class T> CQSA_DEVICE T shuffle(T value, int lane, CQSA_SIMT_SITE) {
  if (lane < 0 || lane >= Lanes) simt::fail("%s:%d: shuffle from lane %d", simt_file, simt_line, lane);
  T out = value;
  simt::meet_lanes("shuffle", Lanes, {&value, &out, lane}, simt::shuffle_lanes<T>, simt_file, simt_line);
  return out;
}
template <int Lanes, class T> CQSA_DEVICE T shuffle_xor(T value, int mask, CQSA_SIMT_SITE) {
  return shuffle<Lanes>(value, (thread_index() % Lanes) ^ mask, simt_file, simt_line);
}
template <int Lanes> CQSA_DEVICE uint64_t ballot(bool value, CQSA_SIMT_SITE) {
  uint64_t out = uint64_t(value) << thread_index() % Lanes;
  simt::meet_lanes("ballot", Lanes, {nullptr, &out, value}, simt::ballot_lanes, simt_file, simt_line);
  return out;
}

float f16_to_f32(uint16_t bits);
uint16_t f32_to_f16(float value);

CQSA_DEVICE uint32_t atomic_or(uint32_t* to, uint32_t bits) { return __atomic_fetch_or(to, bits, __ATOMIC_RELAXED); }
CQSA_DEVICE uint32_t atomic_max(uint32_t* to, uint32_t value) {
  uint32_t old = __atomic_load_n(to, __ATOMIC_RELAXED);
  while (old < value && !__atomic_compare_exchange_n(to, &old, value, true, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
  }
  return old;
}
CQSA_DEVICE uint32_t atomic_add(uint32_t* to, uint32_t value) { return __atomic_fetch_add(to, value, __ATOMIC_ACQ_REL); }
CQSA_DEVICE uint32_t atomic_exchange(uint32_t* to, uint32_t value) { return __atomic_exchange_n(to, value, __ATOMIC_ACQ_REL); }
CQSA_DEVICE void device_fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
CQSA_DEVICE uint32_t atomic_add_release(uint32_t* to, uint32_t value) { return __atomic_fetch_add(to, value, __ATOMIC_ACQ_REL); }

CQSA_DEVICE void atomic_add_i64(int64_t* to, int64_t value) { __atomic_fetch_add(to, value, __ATOMIC_RELAXED); }

struct alignas(16) loaded16 {
  uint32_t x[4];
};
CQSA_DEVICE loaded16 load_once(const void* from) {
  if (uintptr_t(from) % 16) simt::fail("load_once of a misaligned address");
  return *static_cast<const loaded16*>(from);
}
CQSA_DEVICE loaded16 load_now(const void* from) { return load_once(from); }
CQSA_DEVICE void store_once8(void* to, uint32_t low, uint32_t high) {
  if (uintptr_t(to) % 8) simt::fail("store_once8 to a misaligned address");
  static_cast<uint32_t*>(to)[0] = low, static_cast<uint32_t*>(to)[1] = high;
}
CQSA_DEVICE uint32_t max_u16x2(uint32_t a, uint32_t b) {
  const uint32_t low = (a & 0xffffu) > (b & 0xffffu) ? a & 0xffffu : b & 0xffffu, high = a >> 16 > b >> 16 ? a : b;
  return low | (high & 0xffff0000u);
}
CQSA_DEVICE uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = uint64_t(b) << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= uint32_t(both >> 8 * (selector >> 4 * i & 7u) & 0xffu) << 8 * i;
  return out;
}
CQSA_DEVICE int32_t dot4(uint32_t a, uint32_t b, int32_t c) {
  for (int i = 0; i < 4; ++i) c += int8_t(a >> 8 * i) * int8_t(b >> 8 * i);
  return c;
}
CQSA_DEVICE uint32_t pair_of_f16(float low, float high) { return f32_to_f16(low) | uint32_t(f32_to_f16(high)) << 16; }
CQSA_DEVICE uint32_t pair_of_bf16(float low, float high) {
  uint32_t bits[2];
  std::memcpy(bits, &low, 4), std::memcpy(bits + 1, &high, 4);
  for (uint32_t& x : bits) x = (x + 0x7fffu + (x >> 16 & 1u)) >> 16;
  return bits[0] | bits[1] << 16;
}
constexpr bool has_fp8 = false;
constexpr bool tile_in_few_registers = true;
CQSA_DEVICE uint32_t pack_e4m3(float, float) { return 0; }
CQSA_DEVICE uint32_t pack_e5m2(float, float) { return 0; }

CQSA_DEVICE int hidden_zero() { return 0; }
CQSA_DEVICE float fma_f32(float a, float b, float c) { return std::fma(a, b, c); }
CQSA_DEVICE float exp_f32(float x) { return std::exp(x); }
CQSA_DEVICE float exp2_f32(float x) { return std::exp2(x); }
CQSA_DEVICE float reciprocal_f32(float x) { return 1.0f / x; }
CQSA_DEVICE float product_f32(float a, float b) { return a * b; }  // kernels are compiled without contraction
CQSA_DEVICE float log_f32(float x) { return std::log(x); }
CQSA_DEVICE double log_f64(double x) { return std::log(x); }
CQSA_DEVICE double exp_f64(double x) { return std::exp(x); }
CQSA_DEVICE float tanh_f32(float x) { return std::tanh(x); }
CQSA_DEVICE float erf_f32(float x) { return std::erf(x); }
CQSA_DEVICE float max_f32(float a, float b) { return std::fmax(a, b); }
CQSA_DEVICE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
CQSA_DEVICE float float_of(uint32_t x) {
  float value;
  std::memcpy(&value, &x, 4);
  return value;
}

}  // namespace cqsa::gpu
