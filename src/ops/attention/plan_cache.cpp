// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/plan_cache.h"

#include <cstring>
#include <type_traits>

namespace cqsa {

namespace {

struct cached_plan {
  uint64_t context;                // its number, 0: nothing here
  const hardware_model* measured;  // the rates that the plan was made by
  cqsa_attention_params params;
  cqsa_plan plan;
};
// The end of a thread must run nothing of the library, which may be unloaded by then.
static_assert(std::is_trivially_destructible_v<cached_plan>);

// A model has few kinds of layers. Taken in turn.
constexpr int most = 4;
thread_local constinit cached_plan cache[most] = {};
thread_local constinit int next = 0;

bool fits(const cached_plan& c, const cqsa_context& context, const cqsa_attention_params& params) {
  return c.context == context.number && c.measured == context.hardware.load(std::memory_order_relaxed) &&
         std::memcmp(&c.params, &params, sizeof params) == 0;
}

}  // namespace

bool find_cached_plan(const cqsa_context& context, const cqsa_attention_params& params, cqsa_plan& plan_out) {
  for (const cached_plan& c : cache)
    if (fits(c, context, params)) return plan_out = c.plan, true;
  return false;
}

void cache_plan(const cqsa_context& context, const cqsa_attention_params& params, const cqsa_plan& plan) {
  cached_plan& c = cache[next];
  next = (next + 1) % most;
  c = {context.number, context.hardware.load(std::memory_order_relaxed), params, plan};
}

}  // namespace cqsa
