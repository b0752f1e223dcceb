// SPDX-License-Identifier: Apache-2.0
// A file reader under a fuzzer: it either refuses with std::runtime_error or returns arrays that lie inside the file.
#pragma once
#include <cstdlib>
#include <span>
#include <stdexcept>
#include <vector>

#include "array.h"

namespace fuzz {

inline void check_inside(const tool::file_array& array, std::span<const std::byte> file) {
  const int64_t bytes = tool::byte_count(array.shape, array.type->bytes, "array");
  const std::byte* const end = file.data() + file.size();
  if (array.data < file.data() || array.data > end || bytes > end - array.data) std::abort();
}

template <class Read>
int read_one(const uint8_t* data, size_t size, Read&& read) {
  const std::span file(reinterpret_cast<const std::byte*>(data), size);
  try {
    for (const tool::file_array& array : read(file)) check_inside(array, file);
  } catch (const std::runtime_error&) {
    // Refused, with a text. Anything else that is thrown ends the program, as it should.
  }
  return 0;
}

}  // namespace fuzz
