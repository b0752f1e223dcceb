// SPDX-License-Identifier: Apache-2.0
// Options that several commands have, as the text that was typed, and what they mean for the library.
#pragma once
#include <string>

#include <CLI/CLI.hpp>

#include "cqsa.h"

namespace tool {

struct attention_options {
  std::string causal = "none", window, schedule = "auto", cqs, memory, host_memory, pinned_memory, backend = "auto";

  void add_to(CLI::App& command);
  // Masks and schedule.
  void apply(cqsa_attention_params& params) const;
  // Budgets. `host`: the backend computes in host memory, so that --memory means host memory.
  void apply_budget(cqsa_attention_params& params, bool host) const;
};

// The commands. Each returns the exit status of the process; errors are exceptions.
void add_doctor(CLI::App& app, int& status);
void add_plan(CLI::App& app, int& status);
void add_attention(CLI::App& app, int& status);
void add_bench(CLI::App& app, int& status);
void add_parity(CLI::App& app, int& status);
void add_quantize(CLI::App& app, int& status);

constexpr int kExitOk = 0;
constexpr int kExitError = 1;
constexpr int kExitCheckFailed = 2;
constexpr int kExitInterrupted = 130;  // 128 + SIGINT, as shells have it

}  // namespace tool
