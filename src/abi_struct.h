// SPDX-License-Identifier: Apache-2.0
// The struct_size rule of cqsa.h section 1, once for every struct.
#pragma once
#include <cstdint>
#include <cstring>

#include "error.h"

namespace cqsa {

// Copies a caller's struct into a zeroed local of our size. A smaller struct (older caller) leaves the tail at its default; a
// larger one (newer caller) is taken when the tail we do not know is zero. `first` is the size the struct had when it was born.
template <class T>
cqsa_status copy_struct(const T* caller, const char* name, uint32_t first, uint32_t known_flags, T& out) {
  if (caller == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "%s is NULL", name);
  uint32_t size = 0;
  std::memcpy(&size, caller, sizeof size);
  if (size < first || size > 65536)
    return fail(CQSA_ERROR_STRUCT_SIZE, "%s->struct_size is %u, wanted sizeof(struct) = %u (at least %u)", name, size,
                static_cast<unsigned>(sizeof(T)), first);
  if (size >= sizeof(T)) {
    std::memcpy(static_cast<void*>(&out), caller, sizeof(T));
  } else {
    std::memset(static_cast<void*>(&out), 0, sizeof(T));
    std::memcpy(static_cast<void*>(&out), caller, size);
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(caller);
  for (uint32_t i = sizeof(T); i < size; ++i)
    if (bytes[i] != 0)
      return fail(CQSA_ERROR_STRUCT_SIZE, "%s has struct_size %u with a non-zero byte at %u, past the %u bytes this version knows",
                  name, size, i, static_cast<unsigned>(sizeof(T)));
  if (out.flags & ~known_flags)
    return fail(CQSA_ERROR_UNKNOWN_FLAG, "%s->flags has the unknown bits 0x%x", name, out.flags & ~known_flags);
  out.struct_size = sizeof(T);
  return CQSA_OK;
}

// No output struct has flags that a caller may set.
template <class T>
cqsa_status check_out_struct(const T* caller, const char* name, uint32_t first) {
  T ignored;
  return copy_struct(caller, name, first, 0, ignored);
}

// Writes an output struct back: no more bytes than the caller's struct_size says, which is kept.
template <class T>
void write_struct(const T& value, T* caller) {
  uint32_t size = 0;
  std::memcpy(&size, caller, sizeof size);
  std::memcpy(static_cast<void*>(caller), &value, size < sizeof(T) ? size : sizeof(T));
  std::memcpy(static_cast<void*>(caller), &size, sizeof size);
}

// The *_init functions: zero `size` bytes and state the size.
template <class T>
void init_struct(T* caller, uint64_t size) {
  if (caller == nullptr || size < sizeof(uint32_t)) return;
  std::memset(static_cast<void*>(caller), 0, size);
  const uint32_t stated = static_cast<uint32_t>(size);
  std::memcpy(static_cast<void*>(caller), &stated, sizeof stated);
}

}  // namespace cqsa
