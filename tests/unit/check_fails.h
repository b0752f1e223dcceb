// SPDX-License-Identifier: Apache-2.0
// What the tests of refusals share.
#pragma once
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include <string>
#include <vector>

#include "error.h"

using parts = std::vector<const char*>;

// The status, and a sentence that has all the parts.
inline void check_fails(cqsa_status got, cqsa_status wanted, const parts& wanted_parts) {
  const std::string text = cqsa::last_error_text();
  INFO("message: " << text);
  CHECK(got == wanted);
  for (const char* part : wanted_parts) {
    INFO("part: " << part);
    CHECK(text.find(part) != std::string::npos);
  }
}
