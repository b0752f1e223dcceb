// SPDX-License-Identifier: Apache-2.0
// Numbers as people write them: "3GiB", "1.5GB", "64K", and back.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace tool {

// Bytes: "1024", "512MiB", "1.5GB". KiB MiB GiB TiB and bare K M G T are powers of 1024; KB MB GB TB powers of 1000.
uint64_t parse_bytes(std::string_view text);
// A count: "4096", or with K M G T = powers of 1024.
int64_t parse_count(std::string_view text);
// "a,b".
std::pair<int64_t, int64_t> parse_pair(std::string_view text);

std::string bytes_text(double bytes);      // "1.50 GiB"
std::string seconds_text(double seconds);  // "12.3 ms", "3 h 20 min"
std::string flops_text(double flops);      // "1.23 TFLOP"
std::string count_text(int64_t count);     // "64K" when exact, digits otherwise

}  // namespace tool
