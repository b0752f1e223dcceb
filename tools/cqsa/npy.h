// SPDX-License-Identifier: Apache-2.0
// The .npy format, versions 1 to 3, little-endian and in C order. Checked like .safetensors (see there).
#pragma once
#include <span>
#include <string>

#include "array.h"
#include "safetensors.h"

namespace tool {

// The one array of a file. `path` is for messages only.
file_array read_npy(std::span<const std::byte> file, const std::string& path);

// The first bytes of a file with this array; its data begins right after, at a multiple of 64 bytes.
std::string npy_header(const output_array& array);

}  // namespace tool
