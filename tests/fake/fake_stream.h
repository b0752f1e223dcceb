// SPDX-License-Identifier: Apache-2.0
// Streams and events of the fake device: a thread with a queue each, so that whatever no event orders really runs in any order.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

namespace fake {

// Records are numbered; a wait is for the record that was the latest when it was asked for.
class event {
 public:
  int64_t next_record();
  int64_t latest_record();
  void complete(int64_t record);
  void wait(int64_t record);

 private:
  std::mutex lock_;
  std::condition_variable changed_;
  int64_t recorded_ = 0, completed_ = 0;
};

struct delays {
  uint32_t min_us = 0, max_us = 0;
  uint64_t seed = 0;
};

using graph = std::vector<std::function<void()>>;

class stream {
 public:
  explicit stream(const delays& d, int32_t device = 0);
  ~stream();  // finishes what is queued
  // Queues, or while the stream is captured adds to the graph instead.
  void push(std::function<void()> operation);
  // False under capture, which does not allow it.
  bool sync();
  bool idle();
  int32_t device() const { return device_; }

  void begin_capture();
  bool capturing();
  graph end_capture();

 private:
  void run();

  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool busy_ = false, closing_ = false, capturing_ = false;
  graph captured_;
  const int32_t device_;
  delays delays_;
  std::mt19937_64 random_;
  std::thread thread_;
};

}  // namespace fake
