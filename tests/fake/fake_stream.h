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

class stream {
 public:
  explicit stream(const delays& d);
  ~stream();  // finishes what is queued
  void push(std::function<void()> operation);
  void sync();
  bool idle();

 private:
  void run();

  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool busy_ = false, closing_ = false;
  delays delays_;
  std::mt19937_64 random_;
  std::thread thread_;
};

}  // namespace fake
