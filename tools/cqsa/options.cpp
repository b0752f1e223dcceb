// SPDX-License-Identifier: Apache-2.0
#include "options.h"

#include <stdexcept>

#include <fmt/format.h>

#include "sizes.h"

namespace tool {
namespace {

int32_t causal_of(const std::string& name) {
  if (name == "none") return CQSA_CAUSAL_NONE;
  if (name == "top_left") return CQSA_CAUSAL_TOP_LEFT;
  if (name == "bottom_right") return CQSA_CAUSAL_BOTTOM_RIGHT;
  throw std::runtime_error(fmt::format("--causal \"{}\": none, top_left or bottom_right is wanted", name));
}

int32_t schedule_of(const std::string& name) {
  if (name == "auto") return CQSA_SCHEDULE_AUTO;
  if (name == "direct") return CQSA_SCHEDULE_DIRECT;
  if (name == "stream") return CQSA_SCHEDULE_STREAM;
  if (name == "cqs") return CQSA_SCHEDULE_CQS;
  throw std::runtime_error(fmt::format("--schedule \"{}\": auto, direct, stream or cqs is wanted", name));
}

uint64_t budget_of(const char* option, const std::string& text) {
  const uint64_t bytes = parse_bytes(text);
  // The library reads 0 as "no limit", which is surely not what was meant.
  if (bytes == 0) throw std::runtime_error(fmt::format("{} 0: a budget of at least one byte is wanted", option));
  return bytes;
}

}  // namespace

void attention_options::add_to(CLI::App& command) {
  // An unset shell variable must not read as "not given".
  const CLI::Validator filled([](const std::string& text) { return text.empty() ? "an empty text is no value" : ""; }, "");
  command.add_option("--causal", causal, "none, top_left (key <= query) or bottom_right (aligned at the end)")
      ->type_name("RULE");
  command.add_option("--window", window, "keys visible to the left and right of the query, -1: no limit")->type_name("L,R");
  command.add_option("--memory", memory, "memory of the backend that the library may allocate: 64MiB, 3GiB, 1.5GB")
      ->type_name("SIZE")
      ->check(filled);
  command.add_option("--schedule", schedule, "auto, direct, stream or cqs")->type_name("NAME");
  command.add_option("--cqs", cqs, "chunks and depth of the cqs schedule, for example 7,1")->type_name("C,ITR");
  command.add_option("--backend", backend, "auto, cpu, cuda or hip")->type_name("NAME");
}

void attention_options::apply(cqsa_attention_params& params) const {
  params.causal = causal_of(causal);
  params.schedule = schedule_of(schedule);
  if (!window.empty()) {
    const auto [left, right] = parse_pair(window);
    params.flags |= CQSA_ATTENTION_WINDOW;
    params.window_left = left;
    params.window_right = right;
  }
  if (cqs.empty()) return;
  const auto [c, itr] = parse_pair(cqs);
  if (params.schedule != CQSA_SCHEDULE_AUTO && params.schedule != CQSA_SCHEDULE_CQS)
    throw std::runtime_error(fmt::format("--cqs {} contradicts --schedule {}", cqs, schedule));
  if (c < 0 || c > 1000 || itr < 0 || itr > 1000) throw std::runtime_error(fmt::format("--cqs {}: out of range", cqs));
  params.schedule = CQSA_SCHEDULE_CQS;
  params.cqs_c = static_cast<int32_t>(c);
  params.cqs_itr = static_cast<int32_t>(itr);
}

void attention_options::apply_budget(cqsa_attention_params& params, bool host) const {
  if (host && !memory.empty() && !host_memory.empty())
    throw std::runtime_error("--memory and --host-memory are the same budget on a backend that computes in host memory");
  if (!memory.empty()) (host ? params.max_host_bytes : params.max_device_bytes) = budget_of("--memory", memory);
  if (!host_memory.empty()) params.max_host_bytes = budget_of("--host-memory", host_memory);
  if (!pinned_memory.empty()) params.max_pinned_bytes = budget_of("--pinned-memory", pinned_memory);
}

}  // namespace tool
