// SPDX-License-Identifier: Apache-2.0
// A progress bar on standard error, when that is a terminal.
#pragma once
#include <chrono>
#include <cstdint>

namespace tool {

class progress_bar {
 public:
  explicit progress_bar(bool wanted);
  ~progress_bar();
  progress_bar(const progress_bar&) = delete;
  progress_bar& operator=(const progress_bar&) = delete;

  // The first call says how much was there already; rate and time left are of what came since.
  void show(int64_t done, int64_t total);

 private:
  using clock = std::chrono::steady_clock;
  bool active_, drawn_ = false;
  int64_t first_ = -1;
  clock::time_point start_ = clock::now(), last_{};
};

}  // namespace tool
