// SPDX-License-Identifier: Apache-2.0
#include "error.h"

#include <cstdarg>
#include <cstdio>

namespace cqsa {

namespace {
// Plain data on purpose: a thread_local with a destructor keeps the library mapped after dlclose.
thread_local char text[512];
}  // namespace

cqsa_status fail(cqsa_status status, const char* format, ...) {
  // Formatted aside first: an argument may be the text itself (a plugin's or an earlier message passed on).
  char fresh[sizeof text];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(fresh, sizeof fresh, format, arguments);
  va_end(arguments);
  __builtin_memcpy(text, fresh, sizeof text);
  return status;
}

const char* last_error_text() { return text; }

}  // namespace cqsa
