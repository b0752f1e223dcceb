// SPDX-License-Identifier: Apache-2.0
#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace tool {

int threads_or_all(int asked) { return asked > 0 ? asked : static_cast<int>(std::max(1u, std::thread::hardware_concurrency())); }

void in_parallel(std::size_t count, int threads, const std::function<void(std::size_t)>& body) {
  std::atomic<std::size_t> next{0};
  std::mutex lock;
  std::exception_ptr failure;
  const auto work = [&] {
    try {
      for (std::size_t i; (i = next++) < count;) body(i);
    } catch (...) {
      const std::lock_guard guard(lock);
      if (!failure) failure = std::current_exception();
      next = count;
    }
  };
  {
    std::vector<std::jthread> workers;
    const auto wanted = std::min(count, static_cast<std::size_t>(std::max(threads, 1)));
    for (std::size_t i = 1; i < wanted; ++i) workers.emplace_back(work);
    work();
  }
  if (failure) std::rethrow_exception(failure);
}

void in_blocks(int64_t count, int64_t grain, int threads, const std::function<void(int64_t, int64_t)>& body) {
  const int64_t step = std::max<int64_t>(grain, 1), blocks = count > 0 ? (count - 1) / step + 1 : 0;
  in_parallel(static_cast<std::size_t>(blocks), threads, [&](std::size_t i) {
    const int64_t begin = static_cast<int64_t>(i) * step;
    body(begin, std::min(count, begin + step));
  });
}

}  // namespace tool
