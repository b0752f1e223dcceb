// SPDX-License-Identifier: Apache-2.0
// An arena that counts and carves with the same code: run a layout function once on an empty arena to learn the bytes, then
// on the real memory to get the pointers. So the size that a plan states cannot differ from the size that a run uses.
#pragma once
#include <cstdint>

#include "cqsa.h"

namespace cqsa {

inline constexpr uint64_t workspace_alignment = CQSA_WORKSPACE_ALIGNMENT;

class arena {
 public:
  arena() = default;  // counts only; take() gives null pointers
  explicit arena(void* base) : base_(static_cast<char*>(base)) {}

  // `count` elements of T, aligned to 64 bytes. Saturates instead of wrapping: a size nobody has is refused by any budget.
  template <class T>
  T* take(int64_t count) {
    return static_cast<T*>(take_bytes(times(static_cast<uint64_t>(count), sizeof(T))));
  }

  void* take_bytes(uint64_t bytes) {
    void* pointer = base_ ? base_ + used_ : nullptr;
    const uint64_t padded = bytes > limit - (workspace_alignment - 1)
                                ? limit
                                : (bytes + workspace_alignment - 1) / workspace_alignment * workspace_alignment;
    used_ = used_ > limit - padded ? limit : used_ + padded;
    return pointer;
  }

  uint64_t used() const { return used_; }

  static uint64_t times(uint64_t a, uint64_t b) { return a != 0 && b > limit / a ? limit : a * b; }
  static constexpr uint64_t limit = uint64_t{1} << 62;

 private:
  char* base_ = nullptr;
  uint64_t used_ = 0;
};

}  // namespace cqsa
