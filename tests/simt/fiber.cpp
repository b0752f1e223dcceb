// SPDX-License-Identifier: Apache-2.0
#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <mutex>
#include <new>

#if defined(CQSA_SIMT_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(CQSA_SIMT_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

namespace cqsa::simt {
namespace ctx = boost::context::detail;

fiber::~fiber() {
#if defined(CQSA_SIMT_TSAN)
  if (stack_ && tsan_) __tsan_destroy_fiber(tsan_);
#endif
}

void fiber::prepare(void* stack, size_t bytes, void (*entry)(void*), void* argument) {
  entry_ = entry, argument_ = argument;
  stack_ = stack, stack_bytes_ = bytes;
  fake_stack_ = nullptr;
#if defined(CQSA_SIMT_ASAN)
  __asan_unpoison_memory_region(stack, bytes);  // whoever had it may have been abandoned in the middle
#endif
#if defined(CQSA_SIMT_TSAN)
  if (!tsan_) tsan_ = __tsan_create_fiber(0);
#endif
  context_ = ctx::make_fcontext(static_cast<char*>(stack) + bytes, bytes, start);
}

// What is handed over is the fiber that arrives.
void fiber::arrive(ctx::transfer_t t) {
  fiber* self = static_cast<fiber*>(t.data);
  fiber* from = self->from_;
#if defined(CQSA_SIMT_ASAN)
  const void* bottom = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(self->fake_stack_, &bottom, &bytes);
  if (!from->stack_) from->stack_ = bottom, from->stack_bytes_ = bytes;
#endif
  from->context_ = t.fctx;
}

void fiber::start(ctx::transfer_t t) {
  arrive(t);
  fiber* self = static_cast<fiber*>(t.data);
  self->entry_(self->argument_);
  std::abort();  // entry must leave()
}

void fiber::jump(fiber& to, bool last) {
  to.from_ = this;
#if defined(CQSA_SIMT_ASAN)
  __sanitizer_start_switch_fiber(last ? nullptr : &fake_stack_, to.stack_, to.stack_bytes_);
#else
  (void)last;
#endif
#if defined(CQSA_SIMT_TSAN)
  if (!stack_ && !tsan_) tsan_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(to.tsan_, __tsan_switch_to_fiber_no_sync);  // a switch orders nothing: only what kernels do counts
#endif
  arrive(ctx::jump_fcontext(to.context_, &to));
}

void fiber::leave(fiber& to) {
  jump(to, true);
  std::abort();
}

struct stack_pool::state {
  std::mutex mutex;
  std::vector<void*> free;
};

stack_pool::stack_pool() : state_(new state) {}
stack_pool::~stack_pool() {
  for (void* stack : state_->free) munmap(static_cast<char*>(stack) - getpagesize(), bytes + size_t(getpagesize()));
}

stack_pool& stack_pool::instance() {
  static stack_pool pool;
  return pool;
}

void* stack_pool::take() {
  std::lock_guard lock(state_->mutex);
  if (!state_->free.empty()) {
    void* stack = state_->free.back();
    state_->free.pop_back();
    return stack;
  }
  const size_t page = size_t(getpagesize());
  void* memory = mmap(nullptr, bytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE) != 0) throw std::bad_alloc();
  return static_cast<char*>(memory) + page;
}

void stack_pool::give(void* stack) {
  std::lock_guard lock(state_->mutex);
  state_->free.push_back(stack);
}

}  // namespace cqsa::simt
