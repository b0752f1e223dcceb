// SPDX-License-Identifier: Apache-2.0
// A problem of `cqsa parity` and `cqsa bench`: one line of key=value pairs that says all that is needed to make it again.
// docs/parity.md has the keys.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cqsa.h"

namespace tool {

// The line itself: keys in the order in which they were written, each at most once.
class problem_line {
 public:
  problem_line() = default;
  explicit problem_line(std::string_view text);  // throws for anything that is not key=value with a known key

  const std::string* find(std::string_view key) const;  // nullptr: not there
  void set(std::string_view key, std::string value);
  std::string text() const;
  bool empty() const { return pairs_.empty(); }

 private:
  std::vector<std::pair<std::string, std::string>> pairs_;
};

// Where the elements of q, k, v and out lie.
enum class memory_layout {
  packed,      // row-major
  bshd,        // heads inside the sequence
  gapped,      // unused elements before the first row and after each
  reversed,    // every axis but the last one backwards
  transposed,  // the axes in the opposite order: channels lie furthest apart
};

// A schedule with its parameters, as the line names it: "direct", "cqs:7:1".
struct schedule_choice {
  std::string name = "auto";
  int32_t schedule = CQSA_SCHEDULE_AUTO, cqs_c = 0, cqs_itr = 0;
  bool optional = false;  // from "all": a backend that has no such schedule for the problem may leave it out
};

// Where the operands and results are.
enum class memory_place {
  pageable,     // ordinary host memory
  pinned,       // host memory that the device's driver has page-locked
  device,       // memory of the device
  kv_pageable,  // on the device, but keys, values and their scales in ordinary host memory
  kv_pinned     // on the device, but keys, values and their scales in pinned host memory
};

struct memory_choice {
  std::string name = "pageable";
  memory_place place = memory_place::pageable;
  bool optional = false;  // from "all": a backend that computes in host memory leaves it out
};

// The line, understood.
struct problem_spec {
  cqsa_attention_params params = CQSA_ATTENTION_PARAMS_INIT;  // without presence flags of operands, schedule and budget
  bool mask = false, bias = false, alibi = false, sinks = false, varlen = false, seqused = false, lse = true;
  uint32_t mask_broadcast = 0, bias_broadcast = 0;  // CQSA_BROADCAST_*
  bool alibi_per_sequence = false;
  cqsa_dtype index = CQSA_DTYPE_I32;  // of cu_seqlens and seqused_k
  memory_layout layout = memory_layout::packed;
  double range = 2;      // q, k, v lie in [-range, range)
  double tolerance = 1;  // factor on the errors that are allowed
  int64_t rows = 0;      // to check; 0: all of them
  uint64_t seed = 1;
  std::vector<schedule_choice> schedules;
  std::vector<memory_choice> memories;
  std::vector<std::string> budgets;  // "none", "least", "half" or a size
};

problem_spec parse_problem(const problem_line& line);

// Lines of a file; empty ones and comments (#) are left out. Throws with the number of the line.
std::vector<problem_line> parse_problem_file(std::string_view text, const std::string& name);

// smoke, ci, gpu or all: the files of tests/parity, which are compiled in. nullptr: there is no set of that name.
const std::string* problem_set(const std::string& name);

std::vector<std::string> split(std::string_view text, char separator);

}  // namespace tool
