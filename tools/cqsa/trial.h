// SPDX-License-Identifier: Apache-2.0
// One run of a problem by the library, checked; and timed, if it was right.
#pragma once
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include <nlohmann/json.hpp>

#include "check.h"
#include "device_memory.h"
#include "placement.h"
#include "problem.h"
#include "problem_data.h"

namespace tool {

// How often to time: until both are reached, the best counts.
struct timing {
  int runs = 3;
  double seconds = 0.2;
};

struct trial_report {
  problem_line line;  // of this one run: what makes exactly it again
  std::string failure;  // "" or why it failed, in one sentence
  bool skipped = false;  // nothing ran: the backend has no such schedule (and the line does not insist), or no f64: `failure` says which
  std::string schedule, implementation;  // as planned
  uint64_t budget = 0, peak = 0;         // bytes of the memory that binds; budget 0: none
  check_report check;
  double flops = 0;
  double seconds = 0;  // 0: not timed

  bool pass() const { return failure.empty() || skipped; }
  double rate() const { return seconds > 0 ? flops / seconds : 0; }  // FLOP/s
  std::string text() const;
  nlohmann::ordered_json json() const;
};

// Where the time of a problem went.
struct stage_seconds {
  double operands = 0;   // making them, and putting them where a run wants them
  double reference = 0;  // fp64
  double runs = 0;       // the library, without what --speed repeats
  double checks = 0;

  void add(const stage_seconds& o) { operands += o.operands, reference += o.reference, runs += o.runs, checks += o.checks; }
};

// A problem with its operands and its reference, both made once for all its runs.
class problem_trials {
 public:
  // threads: of the reference; 0: one per core. Throws when the operands do not fit the library's rules.
  problem_trials(cqsa_context* context, const problem_line& line, int threads);

  const problem_spec& spec() const { return spec_; }
  const stage_seconds& seconds() const { return seconds_; }
  // False for a problem in f64 on a backend that has none.
  bool computes_f64() const;
  // speed nullptr: not timed. Never throws for what the library does wrong; throws interrupted_error.
  trial_report run(const memory_choice& memory, const schedule_choice& schedule, const std::string& budget, const timing* speed);

 private:
  void try_run(const memory_choice& memory, const schedule_choice& schedule, const std::string& budget, const timing* speed,
               trial_report& report);
  placed_operands& operands_in(memory_place place);

  std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
  cqsa_context* context_;
  bool host_;  // the backend computes in host memory
  problem_line line_;
  problem_spec spec_;
  problem_data data_;
  cqsa_attention_args args_;
  std::chrono::steady_clock::time_point made_;  // the operands
  row_reference reference_;
  std::unique_ptr<device_memory> device_;  // opened when a run first wants memory of the device
  std::unique_ptr<placed_operands> placed_;
  stage_seconds seconds_;
};

// `cqsa parity --op attention --problem '...'`, with the backend and the threads where they were given.
std::string reproducer(const problem_line& line, const std::string& backend, int32_t threads);

}  // namespace tool
