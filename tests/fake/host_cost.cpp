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

// FP8: one tensor with everything that training wants, a plain one, a product, and many tensors at once.
void measure_fp8() {
  cqsa_context* const context = device_context();
  array x(CQSA_DTYPE_BF16, {64, 256}), row(CQSA_DTYPE_E4M3FN, {64, 256}), turned(CQSA_DTYPE_E5M2, {256, 64}), scale(CQSA_DTYPE_F32, {1}), inv(CQSA_DTYPE_F32, {1});
  array turned_inv(CQSA_DTYPE_F32, {1}), amax(CQSA_DTYPE_F32, {1}), skip(CQSA_DTYPE_I32, {1}), d(CQSA_DTYPE_BF16, {64, 64});
  for (array* a : {&x, &row, &turned, &scale, &inv, &turned_inv, &amax, &skip, &d}) a->to_device();
  constexpr uint64_t bytes = 1 << 16;
  void *const workspace = fake().alloc(bytes), *const ring_memory = fake().alloc(bytes);
  cqsa_fp8_ring ring = CQSA_FP8_RING_INIT;
  ring.hist_len = 16, ring.format = CQSA_DTYPE_E4M3FN, ring.state = ring_memory, ring.bytes = bytes;
  cqsa_fp8_quantize_args plain = CQSA_FP8_QUANTIZE_ARGS_INIT;
  plain.x = x.tensor(), plain.row.out = row.tensor(), plain.row.scale_inv = inv.tensor(), plain.workspace = workspace, plain.workspace_bytes = bytes;
  cqsa_fp8_quantize_args full = plain;
  full.row.scale = scale.tensor(), full.transposed.out = turned.tensor(), full.transposed.scale_inv = turned_inv.tensor(), full.amax = amax.tensor();
  full.skip = skip.tensor(), full.source = CQSA_FP8_RING, full.ring = &ring;
  cqsa_fp8_gemm_args g = CQSA_FP8_GEMM_ARGS_INIT;
  g.a = g.b = row.tensor(), g.d = d.tensor(), g.scale_inv_a = g.scale_inv_b = inv.tensor(), g.workspace = workspace, g.workspace_bytes = bytes;
  const double a = nanoseconds([&] { must(cqsa_fp8_quantize(context, &plain, nullptr)); });
  const double b = nanoseconds([&] { must(cqsa_fp8_quantize(context, &full, nullptr)); });
  const double c = nanoseconds([&] { must(cqsa_fp8_gemm(context, &g, nullptr)); });
  std::printf("fp8                          quantize %5.0f ns   both outputs, ring, skip %5.0f ns   gemm %5.0f ns\n", a, b, c);
  std::vector<std::unique_ptr<array>> outs;
  std::vector<cqsa_fp8_quantize_args> all(64, plain);
  std::vector<const cqsa_fp8_quantize_args*> list;
  for (cqsa_fp8_quantize_args& one : all) {
    outs.push_back(std::make_unique<array>(CQSA_DTYPE_E4M3FN, sizes{64, 256}));
    outs.back()->to_device();
    one.row.out = outs.back()->tensor(), one.row.scale_inv = nullptr, list.push_back(&one);
    if (list.size() > 1) one.workspace = nullptr, one.workspace_bytes = 0;
  }
  const double many = nanoseconds([&] { must(cqsa_fp8_quantize_many(context, list.data(), 64, nullptr)); });
  std::printf("fp8                          64 tensors %5.0f ns\n", many);
  fake().free(workspace), fake().free(ring_memory);
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
  measure_fp8();
  configure();
}
