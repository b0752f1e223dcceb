// SPDX-License-Identifier: Apache-2.0
// The C API with C++ manners: handles that free themselves, and statuses as exceptions.
#pragma once
#include <memory>
#include <stdexcept>
#include <string>

#include "cqsa.h"

namespace tool {

struct library_error : std::runtime_error {
  explicit library_error(cqsa_status status) : std::runtime_error(cqsa_last_error()), status(status) {}
  cqsa_status status;
};

inline void require(cqsa_status status) {
  if (status != CQSA_OK) throw library_error(status);
}

struct context_deleter {
  void operator()(cqsa_context* context) const { cqsa_context_destroy(context); }
};
struct plan_deleter {
  void operator()(cqsa_plan* plan) const { cqsa_plan_destroy(plan); }
};
using context_ptr = std::unique_ptr<cqsa_context, context_deleter>;
using plan_ptr = std::unique_ptr<cqsa_plan, plan_deleter>;

// backend "" or "auto": the best one that is ready; threads 0: one per core.
context_ptr make_context(const std::string& backend, int32_t threads = 0);
plan_ptr make_plan(cqsa_context* context, const cqsa_attention_params& params);
plan_ptr make_plan_for(const std::string& hardware_json, const cqsa_attention_params& params);

std::string hardware_json(const cqsa_context* context);
std::string plan_line(const cqsa_plan* plan, const cqsa_run_info* run = nullptr);
std::string plan_explanation(const cqsa_plan* plan);
std::string plan_json(const cqsa_plan* plan);
cqsa_plan_info describe(const cqsa_plan* plan);

// True for a backend that computes in host memory, where max_host_bytes is the budget that binds.
bool is_host_backend(const std::string& backend);

// The budget of the memory that binds on the context's backend.
void set_budget(const cqsa_context* context, cqsa_attention_params& params, uint64_t bytes);
bool fits(const cqsa_context* context, cqsa_attention_params params, uint64_t bytes);
uint64_t least_budget(const cqsa_context* context, const cqsa_attention_params& params);

// The least x in (low, high] for which `holds`, which is false up to some x and true from there on.
template <class Holds> int64_t first_true(int64_t low, int64_t high, Holds holds) {
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (holds(middle) ? high : low) = middle;
  }
  return high;
}

}  // namespace tool
