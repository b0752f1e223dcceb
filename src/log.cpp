// SPDX-License-Identifier: Apache-2.0
#include <cstdarg>
#include <cstdio>

#include "context.h"

namespace cqsa {

void log(const cqsa_context& context, int32_t level, const char* format, ...) {
  if (context.log == nullptr) return;
  char line[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  context.log(context.log_user, level, line);
}

}  // namespace cqsa
