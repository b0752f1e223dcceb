// SPDX-License-Identifier: Apache-2.0
// The .safetensors format: u64 header length, JSON header, tensor bytes. Every number in a file is checked before use:
// any bytes at all give either arrays inside the file or a std::runtime_error that says what was found and wanted.
#pragma once
#include <map>
#include <span>
#include <string>
#include <vector>

#include "array.h"

namespace tool {

// `path` is for messages only.
std::vector<file_array> read_safetensors(std::span<const std::byte> file, const std::string& path);

// A tensor to be written.
struct output_array {
  std::string name;
  cqsa_dtype dtype;
  std::vector<int64_t> shape;
  const element_type* type = nullptr;  // instead of dtype, for types that only files have
};

// The texts under "__metadata__", which say how others should read the file.
std::map<std::string, std::string> safetensors_metadata(std::span<const std::byte> file, const std::string& path);

// The first bytes of a file with these tensors, one after the other in the order given; their data begins right after, at a
// multiple of 64 bytes.
std::string safetensors_header(const std::vector<output_array>& arrays, const std::map<std::string, std::string>& metadata = {});

}  // namespace tool
