// SPDX-License-Identifier: Apache-2.0
// Errors inside the core: a function returns a cqsa_status, and the one that finds the fault writes the sentence.
#pragma once
#include "cqsa.h"

namespace cqsa {

// Writes the thread's last error (plain thread-local bytes, so that dlclose can unload the library) and returns `status`.
[[gnu::format(printf, 2, 3), gnu::cold]] cqsa_status fail(cqsa_status status, const char* format, ...);

const char* last_error_text();

}  // namespace cqsa

// Passes a failure on to the caller.
#define CQSA_TRY(expression)                                             \
  do {                                                                   \
    if (const cqsa_status status_ = (expression); status_ != CQSA_OK) return status_; \
  } while (0)
