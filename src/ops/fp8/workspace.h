// SPDX-License-Identifier: Apache-2.0
// The workspace of an FP8 call: the caller's, prepared once, or the library's, prepared for this call.
#pragma once
#include <cinttypes>

#include "ops/fp8/operands.h"

namespace cqsa::fp8 {

struct workspace_use {
  void* memory;         // the caller's, nullptr: none
  uint64_t given;       // its bytes
  uint64_t needed;
  bool capturing;
  void* stream;
  bool prepared = true;  // false: it may hold anything
};

// Place, alignment and size; on a host backend also that it was prepared. Takes it into the list.
cqsa_status check_workspace(operand_list& list, const workspace_use& use);

// Memory for one call when the caller gave none: in the order of the stream where the device has that, else the call waits.
class call_workspace {
 public:
  call_workspace(const cqsa_context& context, void* stream) : context_(context), stream_(stream) {}
  cqsa_status begin(uint64_t bytes, bool prepare);
  cqsa_status end(cqsa_status of_launch);
  void* memory() const { return memory_; }

 private:
  cqsa_status allocate();
  cqsa_status fail_memory(cqsa_status status) const;
  cqsa_status give_back();

  const cqsa_context& context_;
  void* stream_;
  void* memory_ = nullptr;
  uint64_t bytes_ = 0;
  bool waits_ = false;
};

cqsa_status refuse_capture(uint64_t bytes, const char* argument);

// launch(workspace) with the caller's memory or the library's.
template <class Launch>
cqsa_status run_with_workspace(const cqsa_context& context, const workspace_use& use, const char* argument, const Launch& launch) {
  if (use.memory || use.needed == 0) return launch(use.memory);
  if (use.capturing) return refuse_capture(use.needed, argument);
  call_workspace own(context, use.stream);
  CQSA_TRY(own.begin(use.needed, use.prepared));
  return own.end(launch(own.memory()));
}

// cqsa_fp8_workspace_init.
cqsa_status workspace_init(const cqsa_context& context, void* workspace, uint64_t bytes, void* stream);

}  // namespace cqsa::fp8
