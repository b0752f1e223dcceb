// SPDX-License-Identifier: Apache-2.0
#include "progress.h"

#include <cstdio>
#include <string>

#include <unistd.h>

#include <fmt/format.h>

#include "sizes.h"

namespace tool {

progress_bar::progress_bar(bool wanted) : active_(wanted && ::isatty(STDERR_FILENO)) {}

// Leaves the line as if nothing had been there.
progress_bar::~progress_bar() {
  if (drawn_) std::fputs("\r\x1b[K", stderr);
}

void progress_bar::show(int64_t done, int64_t total) {
  const auto now = clock::now();
  if (!active_ || total <= 0 || now - last_ < std::chrono::milliseconds(100)) return;
  last_ = now;
  drawn_ = true;
  constexpr int width = 40;
  const double share = static_cast<double>(done) / static_cast<double>(total);
  const int full = static_cast<int>(share * width);
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  const std::string left = share > 0.01 ? seconds_text(elapsed / share - elapsed) + " left" : "";
  fmt::print(stderr, "\r[{:#<{}}{:.<{}}] {:3.0f} %  {}\x1b[K", "", full, "", width - full, 100 * share, left);
  std::fflush(stderr);
}

}  // namespace tool
