// SPDX-License-Identifier: Apache-2.0
// How many random problems a test takes.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>

namespace cqsa::test {

// As many as usual, or `each` for one of CQSA_PROPERTY_COUNT, which tools/sanitize.sh sets: under a sanitizer each takes long.
inline uint32_t random_count(uint32_t usual, uint32_t each) {
  const char* text = std::getenv("CQSA_PROPERTY_COUNT");
  return text ? std::min(usual, each * uint32_t(std::strtoul(text, nullptr, 10))) : usual;
}

}  // namespace cqsa::test
