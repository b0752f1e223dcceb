// SPDX-License-Identifier: Apache-2.0
// The operands of a problem where its line wants them: on the device, pinned, or in ordinary memory.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "cqsa.h"
#include "device_memory.h"
#include "problem.h"
#include "problem_data.h"

namespace tool {

class placed_operands {
 public:
  // memory: nullptr for memory_place::pageable. data must outlive it.
  placed_operands(device_memory* memory, memory_place place, problem_data& data);

  memory_place place() const { return place_; }
  // On the device, every one of them: a run may then return before it is done.
  bool resident() const { return place_ == memory_place::device; }
  cqsa_attention_args args();
  // Where the operands are, into the fields memory_* of params.
  void tell(cqsa_attention_params& params) const;
  void poison_results();
  void collect_results();      // back into data, which then looks at them
  std::string damage() const;  // "" or which input has other bytes than it had

 private:
  int32_t place_of(const problem_data::slot& slot) const;  // CQSA_MEMORY_*

  struct placed {
    device_buffer buffer;
    cqsa_tensor tensor;
  };
  memory_place place_;
  problem_data& data_;
  std::map<int, placed> placed_;  // by number of the operand; what stays pageable is not in it
};

}  // namespace tool
