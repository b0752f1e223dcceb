// SPDX-License-Identifier: Apache-2.0
#include "library.h"

namespace tool {
namespace {

// Calls a text-filling function twice: for the length, then for the text.
template <class Fill> std::string text_of(Fill fill) {
  uint64_t length = 0;
  require(fill(nullptr, 0, &length));
  std::string text(length, '\0');
  require(fill(text.data(), length + 1, &length));  // the zero falls on the string's own
  return text;
}

}  // namespace

context_ptr make_context(const std::string& backend, int32_t threads) {
  cqsa_context_params params = CQSA_CONTEXT_PARAMS_INIT;
  params.backend = backend.empty() ? nullptr : backend.c_str();
  params.num_threads = threads;
  cqsa_context* context = nullptr;
  require(cqsa_context_create(&params, &context));
  return context_ptr(context);
}

plan_ptr make_plan(cqsa_context* context, const cqsa_attention_params& params) {
  cqsa_plan* plan = nullptr;
  require(cqsa_attention_plan_create(context, &params, &plan));
  return plan_ptr(plan);
}

plan_ptr make_plan_for(const std::string& hardware_json, const cqsa_attention_params& params) {
  cqsa_plan* plan = nullptr;
  require(cqsa_attention_plan_create_for(hardware_json.c_str(), &params, &plan));
  return plan_ptr(plan);
}

std::string hardware_json(const cqsa_context* context) {
  return text_of([&](char* b, uint64_t n, uint64_t* length) { return cqsa_context_hardware(context, b, n, length); });
}
std::string plan_line(const cqsa_plan* plan, const cqsa_run_info* run) {
  return text_of([&](char* b, uint64_t n, uint64_t* length) { return cqsa_plan_line(plan, run, b, n, length); });
}
std::string plan_explanation(const cqsa_plan* plan) {
  return text_of([&](char* b, uint64_t n, uint64_t* length) { return cqsa_plan_explain(plan, b, n, length); });
}
std::string plan_json(const cqsa_plan* plan) {
  return text_of([&](char* b, uint64_t n, uint64_t* length) { return cqsa_plan_json(plan, b, n, length); });
}

cqsa_plan_info describe(const cqsa_plan* plan) {
  cqsa_plan_info info = CQSA_PLAN_INFO_INIT;
  require(cqsa_plan_describe(plan, &info));
  return info;
}

bool is_host_backend(const std::string& backend) { return backend == "cpu"; }

void set_budget(const cqsa_context* context, cqsa_attention_params& params, uint64_t bytes) {
  (is_host_backend(cqsa_context_backend(context)) ? params.max_host_bytes : params.max_device_bytes) = bytes;
}

bool fits(const cqsa_context* context, cqsa_attention_params params, uint64_t bytes) {
  set_budget(context, params, bytes);
  return cqsa_attention_query(context, &params) == CQSA_OK;
}

uint64_t least_budget(const cqsa_context* context, const cqsa_attention_params& params) {
  return static_cast<uint64_t>(first_true(0, int64_t{1} << 44, [&](int64_t bytes) {
    return fits(context, params, static_cast<uint64_t>(bytes));
  }));
}

}  // namespace tool
