// SPDX-License-Identifier: Apache-2.0
// What the core itself takes of a call in enqueue mode: the fake device accepts launches and does nothing. Prints the median of
// many batches of calls; not a test, since it says as much about the machine as about the core.
#include <algorithm>
#include <chrono>

#include "device_problem.h"

using namespace device_test;

namespace {

template <class F>
double nanoseconds(F&& call) {
  constexpr int batches = 41, calls = 2000;
  std::vector<double> taken;
  for (int b = 0; b < batches; ++b) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) call();
    taken.push_back(std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() / calls);
  }
  std::nth_element(taken.begin(), taken.begin() + batches / 2, taken.end());
  return taken[batches / 2];
}

void must(cqsa_status status) {
  if (status != CQSA_OK) FAIL(cqsa_last_error());
}

void measure(const char* name, const spec& s) {
  operands o = make(s, 1);
  place(o);
  cqsa_context* const context = device_context();
  cqsa_attention_params p = params_of(context, o);
  cqsa_plan* plan = nullptr;
  must(cqsa_attention_plan_create(context, &p, &plan));
  uint64_t bytes = 0;
  must(cqsa_workspace_query(plan, &bytes));
  cqsa_attention_args args = o.args();
  void* workspace = fake().alloc(bytes + 64);
  args.workspace = workspace, args.workspace_bytes = bytes;
  cqsa_attention_params bare = CQSA_ATTENTION_PARAMS_INIT;
  bare.causal = s.causal;
  bare.kv_group = s.kv_group;
  const double execute = nanoseconds([&] { must(cqsa_attention_execute(plan, &args, nullptr)); });
  const double stated = nanoseconds([&] { must(cqsa_attention(context, &p, &args, nullptr)); });
  const double taken = nanoseconds([&] { must(cqsa_attention(context, &bare, &args, nullptr)); });
  std::printf("%-28s execute %5.0f ns   one call %5.0f ns   one call, shapes from the tensors %5.0f ns\n", name, execute, stated, taken);
  fake().free(workspace);
  cqsa_plan_destroy(plan);
}

}  // namespace

TEST_CASE("what the core takes of a call", "[.][cost]") {
  fake_config config{};
  config.no_work = 1;
  configure(config);
  spec s;
  s.q_device = s.kv_device = s.out_device = true;
  s.causal = CQSA_CAUSAL_BOTTOM_RIGHT;
  measure("batched, causal", s);
  s.heads_inside = true;
  s.heads = 8, s.kv_heads = 2;
  measure("batch, seq, head, channel", s);
  s.varlen = true;
  measure("varlen", s);
  s.varlen = false, s.paged = s.seqused = true, s.page_size = 16, s.nk = 48;
  measure("paged", s);
  s.paged = s.seqused = false, s.mask = 0, s.bias = 0, s.alibi = s.sinks = true;
  s.kv = CQSA_DTYPE_I8, s.scale_k = s.scale_v = CQSA_SCALE_GROUP, s.kv_group = 32;
  measure("every operand", s);
  configure();
}
