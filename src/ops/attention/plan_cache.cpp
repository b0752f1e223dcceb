// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/plan_cache.h"

#include <cstring>
#include <type_traits>

#include "ops/attention/bind_cache.h"

namespace cqsa {

namespace {

struct cached_plan {
  uint64_t context;                // its number, 0: nothing here
  const hardware_model* measured;  // the rates that the plan was made by
  one_shot_params params;
  cqsa_plan plan;
};
// The end of a thread must run nothing of the library, which may be unloaded by then.
static_assert(std::is_trivially_destructible_v<cached_plan>);

// A model has few kinds of layers. Taken in turn.
constexpr int most = 4;
thread_local constinit cached_plan cache[most] = {};
thread_local constinit int next = 0;

bool is_of(const cached_plan& c, const cqsa_context& context) {
  return c.context == context.number && c.measured == context.hardware.load(std::memory_order_relaxed);
}

bool same(const cqsa_attention_params& a, const cqsa_attention_params& b) { return std::memcmp(&a, &b, sizeof a) == 0; }

}  // namespace

bool find_cached_plan(const cqsa_context& context, const one_shot_params& params, cqsa_plan& plan_out) {
  for (cached_plan& c : cache) {
    if (!is_of(c, context) || !same(c.params.complete, params.complete)) continue;
    c.params.stated = params.stated;
    plan_out = c.plan;
    return true;
  }
  return false;
}

bool find_repeated(const cqsa_context& context, const cqsa_attention_params& stated, const cqsa_attention_args& args, cqsa_plan& plan_out,
                   cqsa_attention_leaf& leaf_out) {
  for (const cached_plan& c : cache)
    if (is_of(c, context) && same(c.params.stated, stated) && bind_again(c.plan, args, leaf_out)) return plan_out = c.plan, true;
  return false;
}

void cache_plan(const cqsa_context& context, const one_shot_params& params, const cqsa_plan& plan) {
  cached_plan& c = cache[next];
  next = (next + 1) % most;
  c = {context.number, context.hardware.load(std::memory_order_relaxed), params, plan};
}

}  // namespace cqsa
