// SPDX-License-Identifier: Apache-2.0
// Memory that runs out on demand: the program's malloc family, or where AddressSanitizer owns that, operator new. To be included in
// one file of a program only: it defines them.
#pragma once
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#define FAILING_NEW 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FAILING_NEW 1
#endif
#endif

namespace failing {

// Whether what comes from malloc and its kin fails too.
#if defined(FAILING_NEW)
inline constexpr bool with_malloc = false;
#else
inline constexpr bool with_malloc = true;
#endif

// Of the calling thread: the allocations still to be given before one fails; negative: none fails. Other threads are left
// alone: the tests' own, and those of a device, may allocate meanwhile.
inline thread_local int64_t left = -1;
inline thread_local bool all_later = false, hit = false;
inline std::atomic<int64_t> live{0};  // blocks in the whole program

inline void arm(int64_t nth, bool forever) {
  left = nth - 1;
  all_later = forever;
  hit = false;
}

// Whether an allocation failed since arm().
inline bool disarm() {
  left = -1;
  return hit;
}

// For code that is not under test.
struct pause {
  int64_t kept = left;
  pause() { left = -1; }
  ~pause() { left = kept; }
};

inline bool refuses() {
  if (left < 0) return false;
  if (left > 0) return --left, false;
  if (!all_later) left = -1;
  hit = true;
  errno = ENOMEM;
  return true;
}

inline void* counted(void* memory) {
  if (memory) live.fetch_add(1, std::memory_order_relaxed);
  return memory;
}
inline void uncount(void* memory) {
  if (memory) live.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace failing

#if defined(FAILING_NEW)

void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return failing::refuses() ? nullptr : failing::counted(std::malloc(bytes ? bytes : 1));
}
void* operator new(std::size_t bytes) {
  if (void* memory = operator new(bytes, std::nothrow)) return memory;
  throw std::bad_alloc();
}
void* operator new[](std::size_t bytes) { return operator new(bytes); }
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept { return operator new(bytes, std::nothrow); }
void operator delete(void* memory) noexcept {
  failing::uncount(memory);
  std::free(memory);
}
void operator delete[](void* memory) noexcept { operator delete(memory); }
void operator delete(void* memory, std::size_t) noexcept { operator delete(memory); }
void operator delete[](void* memory, std::size_t) noexcept { operator delete(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { operator delete(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { operator delete(memory); }

#else

// glibc calls these wherever it allocates for somebody: fopen, realpath, pthread_create, dlopen, and operator new of libstdc++.
extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);
void __libc_free(void*);

void* malloc(std::size_t bytes) noexcept { return failing::refuses() ? nullptr : failing::counted(__libc_malloc(bytes)); }
void* calloc(std::size_t count, std::size_t bytes) noexcept {
  return failing::refuses() ? nullptr : failing::counted(__libc_calloc(count, bytes));
}
void* realloc(void* old, std::size_t bytes) noexcept {
  if (failing::refuses()) return nullptr;
  void* const memory = __libc_realloc(old, bytes);
  if (old == nullptr) failing::counted(memory);
  if (old != nullptr && bytes == 0) failing::uncount(old);
  return memory;
}
void* memalign(std::size_t alignment, std::size_t bytes) noexcept {
  return failing::refuses() ? nullptr : failing::counted(__libc_memalign(alignment, bytes));
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) noexcept { return memalign(alignment, bytes); }
int posix_memalign(void** out, std::size_t alignment, std::size_t bytes) noexcept {
  void* const memory = memalign(alignment, bytes);
  if (memory) *out = memory;
  return memory ? 0 : ENOMEM;
}
void free(void* memory) noexcept {
  failing::uncount(memory);
  __libc_free(memory);
}
}

#endif
