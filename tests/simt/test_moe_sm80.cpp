// SPDX-License-Identifier: Apache-2.0
// Mixtures of experts by the f16 matrix unit of sm_80 in the harness: random layers, every format, each count of tokens.
#include "moe_simt.h"

#include "backends/cuda/tuned.h"
#include "simt_runtime.h"

#include "../random_count.h"

using namespace moe_test;

namespace {

template <class T> T pick(engine& r, std::initializer_list<T> list) { return list.begin()[below(r, int64_t(list.size()))]; }
cqsa_quant_format any_blocks(engine& r) { return below(r, 2) ? CQSA_QUANT_Q2_0 : cqsa_quant_format(CQSA_QUANT_Q1_0 + below(r, quant_format_count - CQSA_QUANT_Q1_0)); }

std::string mistake(const simt_run& r, problem& p, uint32_t flags = CQSA_MOE_BATCH_INVARIANT) {
  if (p.own.down.values.empty()) p.decode();
  const std::vector<double> exact = p.exact(), model = p.exact(true);
  const std::string failed = run_simt(r, p, flags);
  return failed.empty() ? wrong_errors(p, exact, model) : failed;
}
simt_run run_of(uint64_t seed) {
  simt_run run;
  run.impl = &gpu::sm80_moe, run.tier = 80, run.seed = seed;
  return run;
}

}  // namespace

TEST_CASE("simt moe sm80: random layers") {
  const uint32_t first = uint32_t(std::getenv("CQSA_SEED") ? std::atoi(std::getenv("CQSA_SEED")) : 1);
  for (uint32_t seed = first; seed < first + cqsa::test::random_count(14, 1); ++seed) {
    engine r(seed);
    problem p;
    p.tokens = pick<int64_t>(r, {1, 3, 20, 70}), p.topk = pick<int64_t>(r, {1, 2, 4}), p.experts = pick<int64_t>(r, {1, 2, 5});
    p.hidden = pick<int64_t>(r, {256, 512}), p.inter = pick<int64_t>(r, {256, 512});
    p.activation = int32_t(below(r, 7)), p.layout = p.gated() ? int32_t(below(r, 3)) : 0;
    p.x_dtype = pick(r, {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16}), p.out_dtype = pick(r, {CQSA_DTYPE_F32, CQSA_DTYPE_BF16});
    p.precision = int32_t(below(r, 3)), p.output = int32_t(below(r, 2)), p.biases = below(r, 2), p.mapped = below(r, 2);
    p.gate_formats = {any_blocks(r)}, p.up_formats = {any_blocks(r)}, p.down_formats = {any_blocks(r)};
    if (below(r, 2)) p.up_formats = p.gate_formats;
    if (!p.slots() && below(r, 2)) p.shared_inter = pick<int64_t>(r, {256, 768}), p.shared_gate = int(below(r, 3));
    INFO("seed " << seed << ": tokens " << p.tokens << " k " << p.topk << " experts " << p.experts << " hidden " << p.hidden << " inter " << p.inter << " activation "
                 << p.activation << " layout " << p.layout << " precision " << p.precision << " formats " << p.gate_formats[0] << " " << p.up_formats[0] << " "
                 << p.down_formats[0] << " shared " << p.shared_inter);
    p.make(seed);
    simt_run run = run_of(seed);
    run.units = int(1 + below(r, 4)), run.chunk = pick<int64_t>(r, {0, 0, 3}), run.on_device = below(r, 2);
    const std::string text = mistake(run, p);
    if (!text.empty()) FAIL_CHECK(text);
  }
}

TEST_CASE("simt moe sm80: every format") {
  for (cqsa_quant_format f = CQSA_QUANT_Q1_0; f < quant_format_count; ++f) {
    problem p;
    p.tokens = 3, p.experts = 1, p.topk = 1, p.gate_formats = {f}, p.down_formats = {f}, p.precision = CQSA_MOE_PRECISION_F16;
    INFO(quant_formats[f].name);
    p.make(uint32_t(f));
    const std::string text = mistake(run_of(f), p);
    if (!text.empty()) FAIL_CHECK(text);
  }
}

TEST_CASE("simt moe sm80: a token's bits do not go by the others, plain weights are left to others, and rows that are very large or small stay right") {
  problem p;
  p.tokens = 41, p.topk = 1, p.experts = 2, p.gate_formats = p.down_formats = {CQSA_QUANT_Q2_0}, p.precision = CQSA_MOE_PRECISION_F16;
  p.make(5);
  for (int64_t i = 0; i < p.hidden; ++i) p.x.set(3, i, p.x.get(3, i) * 1e-6), p.x.set(4, i, p.x.get(4, i) * 1e6);
  CHECK(mistake(run_of(1), p) == "");
  const std::vector<double> all = p.result();
  p.decode();
  const std::vector<double> exact = p.exact();
  for (const int64_t t : {3, 4}) {
    double wrong = 0, size = 0;
    for (int64_t i = t * p.hidden; i < (t + 1) * p.hidden; ++i) wrong += std::pow(all[size_t(i)] - exact[size_t(i)], 2), size += exact[size_t(i)] * exact[size_t(i)];
    CHECK(wrong <= 1e-6 * size);
  }
  for (const int64_t chunk : {1, 9}) {
    simt_run run = run_of(2);
    run.chunk = chunk;
    REQUIRE(run_simt(run, p, CQSA_MOE_BATCH_INVARIANT) == "");
    CHECK(p.result() == all);
  }
  problem plain;
  plain.down_formats = {CQSA_QUANT_BF16};
  plain.make(1);
  CHECK(run_simt(run_of(1), plain).rfind("declined", 0) == 0);
}

TEST_CASE("simt moe sm80: few tokens of weights of Q2_0") {
  for (const int64_t inter : {64, 256, 320}) {
    problem p;
    p.tokens = 5, p.topk = 2, p.experts = 3, p.inter = inter, p.hidden = 192, p.gate_formats = p.down_formats = {CQSA_QUANT_Q2_0};
    p.layout = inter == 256 ? CQSA_MOE_INTERLEAVED : CQSA_MOE_SEPARATE, p.activation = inter == 64 ? CQSA_MOE_RELU2 : CQSA_MOE_SWIGLU, p.biases = inter == 320;
    p.shared_inter = inter == 320 ? 128 : 0;
    p.make(uint32_t(inter));
    CHECK(mistake(run_of(3), p, 0) == "");
  }
}

TEST_CASE("simt moe sm80: a stage that is mistaken shows") {
  problem p;
  p.tokens = 9, p.experts = 1, p.topk = 1;
  p.make(4);
  REQUIRE(mistake(run_of(1), p) == "");
  cqsa_simt_mutant = 81;
  const std::string text = mistake(run_of(1), p);
  cqsa_simt_mutant = 0;
  CHECK(!text.empty());
}
