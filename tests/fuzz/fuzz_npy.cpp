// SPDX-License-Identifier: Apache-2.0
#include "npy.h"
#include "reader.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return fuzz::read_one(data, size, [](std::span<const std::byte> file) {
    return std::vector<tool::file_array>{tool::read_npy(file, "fuzz.npy")};
  });
}
