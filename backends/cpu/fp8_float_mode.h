// SPDX-License-Identifier: Apache-2.0
// Codes and scales are the same to the bit whatever the caller's thread does with subnormal numbers and rounding.
#pragma once

#include <cstdint>

#if defined(CQSA_CPU_X86)
#include <xmmintrin.h>
#endif

namespace cqsa::cpu {

// While it lives: to nearest even, nothing flushed, no exceptions. For whoever computes, on each thread: it is a register of the thread.
class plain_floats {
 public:
  plain_floats() : before_(get()) {
    if (before_ != plain) set(plain);
  }
  ~plain_floats() {
    if (before_ != plain) set(before_);
  }
  plain_floats(const plain_floats&) = delete;
  plain_floats& operator=(const plain_floats&) = delete;

 private:
  // A compiler that knows nothing of the register must not take loads across its change.
#if defined(__GNUC__)
  static void hold() { asm volatile("" ::: "memory"); }
#else
  static void hold() {}
#endif
#if defined(CQSA_CPU_X86)
  static constexpr uint64_t plain = 0x1F80;
  static uint64_t get() { return _mm_getcsr() & ~0x3Fu; }  // without what has happened so far
  static void set(uint64_t mode) { hold(), _mm_setcsr((_mm_getcsr() & 0x3Fu) | static_cast<unsigned>(mode)), hold(); }
#elif defined(__aarch64__) && defined(__GNUC__)
  static constexpr uint64_t plain = 0;
  static uint64_t get() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void set(uint64_t mode) { asm volatile("msr fpcr, %0" ::"r"(mode) : "memory"); }
#else
  static constexpr uint64_t plain = 0;
  static uint64_t get() { return plain; }
  static void set(uint64_t) { hold(); }
#endif
  const uint64_t before_;
};

}  // namespace cqsa::cpu
