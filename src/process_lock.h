// SPDX-License-Identifier: Apache-2.0
// A mutex that outlives fork(): in a child the thread that held it may not exist, so the child starts with a lock of its own.
#pragma once
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <new>

namespace cqsa {

class process_lock {
 public:
  constexpr process_lock() = default;
  process_lock(const process_lock&) = delete;

  // True for the first holder in a forked child: what the lock protects may be half-written, and must be made anew.
  bool lock() {
    const pid_t self = getpid();
    for (pid_t seen = owner_.load(std::memory_order_acquire); seen != self; seen = owner_.load(std::memory_order_acquire)) {
      if (seen == -self) {
        sched_yield();
      } else if (owner_.compare_exchange_strong(seen, -self, std::memory_order_acq_rel)) {
        new (&mutex_) std::mutex;
        mutex_.lock();
        owner_.store(self, std::memory_order_release);
        return seen != 0;
      }
    }
    mutex_.lock();
    return false;
  }
  void unlock() { mutex_.unlock(); }

 private:
  std::atomic<pid_t> owner_{0};  // the process whose lock this is; 0: none yet; negative: that process is just making it
  std::mutex mutex_;
};

// Holds the lock for a scope.
class process_lock_guard {
 public:
  explicit process_lock_guard(process_lock& lock) : lock_(lock), inherited_(lock.lock()) {}
  ~process_lock_guard() { lock_.unlock(); }
  process_lock_guard(const process_lock_guard&) = delete;
  bool inherited() const { return inherited_; }

 private:
  process_lock& lock_;
  const bool inherited_;
};

}  // namespace cqsa
