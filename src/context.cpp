// SPDX-License-Identifier: Apache-2.0
#include "context.h"

#include <cinttypes>

#include "error.h"

namespace cqsa {

namespace {

constexpr uint64_t host_alignment = CQSA_WORKSPACE_ALIGNMENT;

// A callback's run of some tasks. Up to 4096 slots; slot i runs the tasks i, i + slots, .. so that a bit for each
// slot is enough to see every slot run exactly once, without an allocation.
struct lent_run {
  static constexpr int64_t most_slots = 4096;
  task_fn task;
  void* data;
  int64_t num_tasks;
  int64_t slots;
  std::atomic<int64_t> ended{0};
  std::atomic<int64_t> refused{0};  // slots that came twice or do not exist: not run
  std::atomic<uint64_t> begun[most_slots / 64]{};

  lent_run(task_fn task_, void* data_, int64_t num_tasks_)
      : task(task_), data(data_), num_tasks(num_tasks_), slots(num_tasks_ < most_slots ? num_tasks_ : most_slots) {}

  bool first_time(int64_t slot) {
    if (slot < 0 || slot >= slots) return false;
    const uint64_t bit = uint64_t{1} << (slot % 64);
    return (begun[slot / 64].fetch_or(bit, std::memory_order_relaxed) & bit) == 0;
  }

  static void run_slot(void* self, int64_t slot) {
    auto& run = *static_cast<lent_run*>(self);
    if (!run.first_time(slot)) {
      run.refused.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    for (int64_t i = slot; i < run.num_tasks; i += run.slots) run.task(run.data, i);
    run.ended.fetch_add(1, std::memory_order_release);
  }
};

cqsa_status run_lent(const cqsa_context& context, int64_t num_tasks, task_fn task, void* data) {
  lent_run run(task, data, num_tasks);
  const int32_t result = context.parallel_for(context.parallel_for_user, run.slots, lent_run::run_slot, &run);
  const int64_t ended = run.ended.load(std::memory_order_acquire);
  const int64_t refused = run.refused.load(std::memory_order_relaxed);
  if (result != 0)
    return fail(CQSA_ERROR_CALLBACK, "parallel_for returned %" PRId32 " after %" PRId64 " of %" PRId64 " tasks, wanted 0",
                result, ended, run.slots);
  if (ended != run.slots || refused != 0)
    return fail(CQSA_ERROR_CALLBACK,
                "parallel_for returned 0, but %" PRId64 " of %" PRId64 " tasks had ended and %" PRId64
                " calls were for a task that had begun before or does not exist",
                ended, run.slots, refused);
  return CQSA_OK;
}

}  // namespace

bool kept_staging::keep(void* memory, uint64_t bytes) {
  int expected = none;
  if (bytes > most || !state_.compare_exchange_strong(expected, busy, std::memory_order_acquire)) return false;
  memory_ = memory;
  bytes_ = bytes;
  state_.store(held, std::memory_order_release);
  return true;
}

void* kept_staging::take(uint64_t& bytes_out) {
  int expected = held;
  if (!state_.compare_exchange_strong(expected, busy, std::memory_order_acquire)) return nullptr;
  void* const memory = memory_;
  bytes_out = bytes_;
  state_.store(none, std::memory_order_release);
  return memory;
}

bool give_back_staging(const cqsa_context& context) {
  uint64_t bytes = 0;
  void* const memory = context.staging.take(bytes);
  if (memory) context.backend->pinned_free(context.device, memory);
  return memory != nullptr;
}

void retain(cqsa_context* context) { context->references.fetch_add(1, std::memory_order_relaxed); }

void release(cqsa_context* context) {
  if (context->references.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  give_back_staging(*context);
  if (context->device != nullptr) context->backend->device_close(context->device);
  forget_hardware(context->hardware.load(std::memory_order_relaxed));
  delete context;
}

cqsa_exec plain_exec(const cqsa_context& context) {
  const auto run = [](void* user, int64_t num_tasks, task_fn task, void* data) {
    return run_tasks(*static_cast<const cqsa_context*>(user), num_tasks, task, data);
  };
  return {const_cast<cqsa_context*>(&context), run, nullptr, context.num_threads};
}

cqsa_status run_tasks(const cqsa_context& context, int64_t num_tasks, task_fn task, void* data) {
  if (num_tasks <= 0) return CQSA_OK;
  if (context.parallel_for != nullptr) return run_lent(context, num_tasks, task, data);
  if (context.pool) {
    context.pool->run(num_tasks, task, data);
  } else {
    for (int64_t i = 0; i < num_tasks; ++i) task(data, i);
  }
  return CQSA_OK;
}

namespace {
alignas(host_alignment) char nothing[host_alignment];  // where 0 bytes are: the allocator is not asked for them
}  // namespace

void* host_allocate(const cqsa_context& context, uint64_t bytes) {
  if (bytes == 0) return nothing;
  void* const memory = context.allocator.allocate(context.allocator.user, bytes, host_alignment);
  if (reinterpret_cast<uintptr_t>(memory) % host_alignment == 0) return memory;
  context.allocator.release(context.allocator.user, memory, bytes);  // not what was asked for: as good as none
  log(context, CQSA_LOG_WARNING, "the allocator returned memory that is not aligned to %" PRIu64 " bytes; it was given back",
      host_alignment);
  return nullptr;
}

void host_release(const cqsa_context& context, void* memory, uint64_t bytes) {
  if (memory == nullptr || memory == nothing) return;
  context.allocator.release(context.allocator.user, memory, bytes);
}

}  // namespace cqsa
