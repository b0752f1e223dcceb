// SPDX-License-Identifier: Apache-2.0
#include "fake_stream.h"

#include <chrono>
#include <utility>

namespace fake {

int64_t event::next_record() {
  const std::lock_guard hold(lock_);
  return ++recorded_;
}

int64_t event::latest_record() {
  const std::lock_guard hold(lock_);
  return recorded_;
}

void event::complete(int64_t record) {
  const std::lock_guard hold(lock_);
  completed_ = std::max(completed_, record);
  changed_.notify_all();
}

void event::wait(int64_t record) {
  std::unique_lock hold(lock_);
  changed_.wait(hold, [&] { return completed_ >= record; });
}

stream::stream(const delays& d, int32_t device) : device_(device), delays_(d), random_(d.seed), thread_([this] { run(); }) {}

stream::~stream() {
  {
    const std::lock_guard hold(lock_);
    closing_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void stream::push(std::function<void()> operation) {
  const std::lock_guard hold(lock_);
  if (capturing_) return captured_.push_back(std::move(operation));
  queue_.push_back(std::move(operation));
  changed_.notify_all();
}

bool stream::sync() {
  std::unique_lock hold(lock_);
  if (capturing_) return false;
  changed_.wait(hold, [&] { return queue_.empty() && !busy_; });
  return true;
}

void stream::begin_capture() {
  const std::lock_guard hold(lock_);
  capturing_ = true;
}

bool stream::capturing() {
  const std::lock_guard hold(lock_);
  return capturing_;
}

graph stream::end_capture() {
  const std::lock_guard hold(lock_);
  capturing_ = false;
  return std::exchange(captured_, {});
}

bool stream::idle() {
  const std::lock_guard hold(lock_);
  return queue_.empty() && !busy_;
}

void stream::run() {
  std::unique_lock hold(lock_);
  for (;;) {
    changed_.wait(hold, [&] { return !queue_.empty() || closing_; });
    if (queue_.empty()) return;
    const std::function<void()> operation = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    const uint32_t span = delays_.max_us - std::min(delays_.min_us, delays_.max_us);
    const uint64_t pause = delays_.min_us + (span ? random_() % (span + 1) : 0);
    hold.unlock();
    if (pause) std::this_thread::sleep_for(std::chrono::microseconds(pause));
    operation();
    hold.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

}  // namespace fake
