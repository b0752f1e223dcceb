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

namespace {
std::string rate_text(double per_second) {
  return per_second >= 100 ? fmt::format("{:.0f} tiles/s", per_second) : fmt::format("{:.2g} tiles/s", per_second);
}
}  // namespace

void progress_bar::show(int64_t done, int64_t total) {
  const auto now = clock::now();
  if (first_ < 0) first_ = done, start_ = now;
  if (!active_ || total <= 0 || now - last_ < std::chrono::milliseconds(100)) return;
  last_ = now;
  drawn_ = true;
  constexpr int width = 40;
  const double share = static_cast<double>(done) / static_cast<double>(total);
  const int full = static_cast<int>(share * width);
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  const double rate = elapsed > 0 ? static_cast<double>(done - first_) / elapsed : 0;
  const bool known = static_cast<double>(done - first_) > 0.01 * static_cast<double>(total - first_) && rate > 0;
  const std::string left = known ? rate_text(rate) + ", " + seconds_text(static_cast<double>(total - done) / rate) + " left" : "";
  fmt::print(stderr, "\r[{:#<{}}{:.<{}}] {:3.0f} %  {}\x1b[K", "", full, "", width - full, 100 * share, left);
  std::fflush(stderr);
}

}  // namespace tool
