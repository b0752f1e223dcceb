// SPDX-License-Identifier: Apache-2.0
// A stack that can be switched to. Debian's Boost.Context knows nothing of sanitizers, so switches are annotated here.
#pragma once

#include <boost/context/detail/fcontext.hpp>

#include <cstddef>
#include <memory>
#include <vector>

namespace cqsa::simt {

// The fcontext functions have been the same since Boost 1.61; boost::context::fiber, built on them, leaves no place for the
// annotations.
class fiber {
 public:
  // A fiber without a stack stands for the caller's own stack.
  fiber() = default;
  ~fiber();
  fiber(const fiber&) = delete;
  // [stack, stack + bytes); entry(argument) begins at the first switch and must not return, but leave().
  void prepare(void* stack, size_t bytes, void (*entry)(void*), void* argument);
  // From this fiber, which is running, to another; returns when somebody switches back.
  void switch_to(fiber& to) { jump(to, false); }
  // The same for ever.
  [[noreturn]] void leave(fiber& to);

 private:
  void jump(fiber& to, bool last);
  static void arrive(boost::context::detail::transfer_t from);
  static void start(boost::context::detail::transfer_t from);

  boost::context::detail::fcontext_t context_ = nullptr;
  void (*entry_)(void*) = nullptr;
  void* argument_ = nullptr;
  const void* stack_ = nullptr;
  size_t stack_bytes_ = 0;
  void* fake_stack_ = nullptr;
  void* tsan_ = nullptr;  // TSan's idea of this fiber, a thread like any other
  fiber* from_ = nullptr;  // who switched here last; not on that fiber's stack, which may be gone
};

// Stacks with an unmapped page below each; kept and given again, since mapping them costs more than a small kernel.
class stack_pool {
 public:
  static constexpr size_t bytes = 256 * 1024;  // touched pages only
  static stack_pool& instance();
  void* take();
  void give(void* stack);

 private:
  struct state;
  std::unique_ptr<state> state_;
  stack_pool();
  ~stack_pool();
};

}  // namespace cqsa::simt
