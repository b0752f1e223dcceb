// SPDX-License-Identifier: Apache-2.0
#include "reader.h"
#include "safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return fuzz::read_one(data, size, [](std::span<const std::byte> file) { return tool::read_safetensors(file, "fuzz.safetensors"); });
}
