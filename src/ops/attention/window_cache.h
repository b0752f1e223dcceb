// SPDX-License-Identifier: Apache-2.0
// Which window of keys is in which buffer: least recently used goes first. The run places its windows by it, and the planner
// counts their loads by it.
#pragma once
#include <algorithm>
#include <cstdint>

namespace cqsa {

class window_cache {
 public:
  explicit window_cache(int64_t buffers) : buffers_(static_cast<int>(buffers)) { clear(); }

  void clear() { std::fill_n(held_, most, -1); }

  // The buffer for `window`: the one that holds it, or the one to load it into.
  int buffer_for(int64_t window) const {
    int oldest = 0;
    for (int i = 0; i < buffers_; ++i) {
      if (held_[i] == window) return i;
      if (used_[i] < used_[oldest]) oldest = i;
    }
    return oldest;
  }
  bool holds(int64_t window) const { return held_[buffer_for(window)] == window; }

  void use(int64_t window) {
    const int buffer = buffer_for(window);
    held_[buffer] = window;
    used_[buffer] = ++now_;
  }

 private:
  static constexpr int most = 3;
  int buffers_;
  int64_t held_[most], used_[most] = {}, now_ = 0;
};

}  // namespace cqsa
