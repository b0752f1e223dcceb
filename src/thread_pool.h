// SPDX-License-Identifier: Apache-2.0
// A small pool: threads start at the first job that can use them, are started again in a forked child, and are joined in the
// destructor. Several callers may run jobs at once; a caller always works on its own job, so no job waits for a thread.
#pragma once
#include <pthread.h>

#include <cstdint>
#include <memory>

#include "cqsa.h"

namespace cqsa {

using task_fn = void (*)(void* data, int64_t index);

class thread_pool {
 public:
  explicit thread_pool(int num_threads);  // the caller's thread included
  ~thread_pool();
  thread_pool(const thread_pool&) = delete;
  thread_pool& operator=(const thread_pool&) = delete;

  int size() const { return num_threads_; }
  // Starts the threads now, so that a later run allocates nothing. Failing to start some is no error: fewer help.
  void start();
  // task(data, i) for every i in [0, num_tasks); returns when all have ended. Never fails.
  void run(int64_t num_tasks, task_fn task, void* data);

 private:
  struct shared;
  int num_threads_;
  shared* shared_ = nullptr;
};

// Starts a thread on which no signal of the host program lands. False: there is none.
bool start_quiet_thread(pthread_t& thread_out, void* (*body)(void*), void* data);

// Cores this process may run on (affinity and cgroup quota respected), at least 1.
int available_cores();

}  // namespace cqsa
