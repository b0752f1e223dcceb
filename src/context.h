// SPDX-License-Identifier: Apache-2.0
// cqsa_context from the inside: backend + device + threads + allocator + log, counted references.
#pragma once
#include <atomic>
#include <memory>

#include "backends/cqsa_backend.h"
#include "thread_pool.h"

namespace cqsa {
struct hardware_model;  // ops/attention/plan.h
void forget_hardware(const hardware_model* newest);

// Pinned staging of a finished run, kept for the next one: pinning memory takes as long as copying 25 times as much. One block at
// most. No lock, as a fork must not leave one behind: who finds it in another's hands does without.
class kept_staging {
 public:
  static constexpr uint64_t most = uint64_t{128} << 20;  // bytes; as large as the rings of both directions ever are

  // False: there is one already, or this one is too large; it stays the caller's.
  bool keep(void* memory, uint64_t bytes);
  // nullptr: there is none. Otherwise it is the caller's from now on.
  void* take(uint64_t& bytes_out);

 private:
  enum : int { none, busy, held };
  std::atomic<int> state_{none};
  void* memory_ = nullptr;  // of who made the state busy
  uint64_t bytes_ = 0;
};
}

struct cqsa_context {
  const cqsa_backend_v1* backend = nullptr;
  void* device = nullptr;  // from backend->device_open; nullptr on a host backend
  int32_t device_index = 0;
  cqsa_chip chip{};  // of the device; all 0 on a host backend
  uint64_t number = 0;  // no other context of this process has had it: addresses are used again
  int32_t num_threads = 1;
  cqsa_allocator allocator{};  // always has both functions
  cqsa_parallel_for_fn parallel_for = nullptr;
  void* parallel_for_user = nullptr;
  cqsa_log_fn log = nullptr;
  void* log_user = nullptr;
  std::unique_ptr<cqsa::thread_pool> pool;  // present when parallel_for is absent and num_threads > 1
  std::atomic<int64_t> references{1};
  // Measured at first need, see cqsa_context_hardware(). No lock: a fork while another thread measures must not leave one behind.
  mutable std::atomic<const cqsa::hardware_model*> hardware{nullptr};
  mutable cqsa::kept_staging staging;

  bool is_host() const { return backend->flags & CQSA_BACKEND_HOST; }
};

namespace cqsa {

void retain(cqsa_context* context);
void release(cqsa_context* context);  // the last one closes the device, joins the threads and deletes

// Runs tasks on the context's threads or the caller's parallel_for. CQSA_ERROR_CALLBACK when the callback failed or left
// tasks out. Allocates nothing.
cqsa_status run_tasks(const cqsa_context& context, int64_t num_tasks, task_fn task, void* data);

// For leaves that neither report progress nor can be cancelled: all threads of the context.
cqsa_exec plain_exec(const cqsa_context& context);

// Unpins what the context keeps. Whether there was something.
bool give_back_staging(const cqsa_context& context);

void log(const cqsa_context& context, int32_t level, const char* format, ...) __attribute__((format(printf, 3, 4)));

// Host memory through the context's allocator, counted by the caller. nullptr when there is none.
void* host_allocate(const cqsa_context& context, uint64_t bytes);
void host_release(const cqsa_context& context, void* memory, uint64_t bytes);

}  // namespace cqsa
