// SPDX-License-Identifier: Apache-2.0
// The mixture-of-experts layer on the CPU: every implementation against f64, every format, the rules one by one, errors of int8, determinism.
#include "moe_problem.h"

#include <cstdio>

#include "../random_count.h"


using namespace moe_test;

namespace {

const std::vector<cqsa_quant_format> all_formats = [] {
  std::vector<cqsa_quant_format> all;
  for (cqsa_quant_format f = 1; f < quant_format_count; ++f) all.push_back(f);
  return all;
}();

// The error of an implementation, against that of the same roundings and nothing else.
void check_errors(problem& p, const char* name, const std::vector<double>& exact, const std::vector<double>& model) {
  const std::vector<double> got = p.result();
  const errors mine = compare(got, exact, p.hidden), allowed = compare(model, exact, p.hidden);
  const bool reference = std::string(name) == "cpu_reference", halves = !p.slots() && p.out_dtype != CQSA_DTYPE_F32;
  const double of_out = halves ? (p.out_dtype == CQSA_DTYPE_F16 ? 0x1p-10 : 0x1p-7) : 0;
  INFO(name << ": relative " << mine.relative << ", of the roundings alone " << allowed.relative);
  if (reference) CHECK(mine.relative <= 1e-6 + of_out);
  else if (p.precision == CQSA_MOE_PRECISION_F16) CHECK(mine.nmse() <= 1e-6 + of_out * of_out);
  else CHECK(mine.relative <= 1.05 * allowed.relative + 1e-5 + of_out);
}

void check_everywhere(problem& p, int64_t chunk = 0) {
  p.decode();
  const std::vector<double> exact = p.exact(), model = p.exact(true);
  for (const cqsa_moe_impl* impl : implementations()) {
    std::fill(p.out.memory.begin(), p.out.memory.end(), char(0xff));
    REQUIRE(run_on(*impl, p, chunk) == CQSA_OK);
    check_errors(p, impl->name, exact, model);
  }
}

template <class T> T pick(engine& r, std::initializer_list<T> list) { return list.begin()[below(r, int64_t(list.size()))]; }

void shape_at_random(engine& r, problem& p) {
  p.tokens = pick<int64_t>(r, {1, 2, 3, 7, 20, 40}), p.topk = pick<int64_t>(r, {1, 2, 3, 8}), p.experts = pick<int64_t>(r, {1, 2, 5, 9});
  p.hidden = pick<int64_t>(r, {256, 512}), p.inter = pick<int64_t>(r, {256, 512});
  p.activation = int32_t(below(r, 7)), p.layout = p.gated() ? int32_t(below(r, 3)) : 0;
  p.x_dtype = pick(r, {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16}), p.out_dtype = pick(r, {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16});
  p.id_dtype = pick(r, {CQSA_DTYPE_I32, CQSA_DTYPE_I64}), p.gap = pick<int64_t>(r, {0, 0, 3});
  p.precision = int32_t(below(r, 3)), p.output = int32_t(below(r, 2)), p.biases = below(r, 2), p.mapped = below(r, 2);
}

void fill_at_random(engine& r, problem& p) {
  const auto any = [&] { return all_formats[size_t(below(r, int64_t(all_formats.size())))]; };
  p.gate_formats = {any(), any()}, p.up_formats = {any()}, p.down_formats = {any(), any(), any()};
  if (p.activation == CQSA_MOE_SWIGLU && below(r, 2)) p.alpha = 1.702f, p.beta = 1, p.limit = 2;
  if (!p.slots() && below(r, 2)) p.shared_inter = pick<int64_t>(r, {256, 768}), p.shared_gate = int(below(r, 3));
}

}  // namespace

TEST_CASE("moe: random layers by every implementation", "[moe]") {
  const uint32_t first = uint32_t(std::getenv("CQSA_SEED") ? std::atoi(std::getenv("CQSA_SEED")) : 1);
  for (uint32_t seed = first; seed < first + cqsa::test::random_count(24, 1); ++seed) {
    INFO("seed " << seed);
    engine r(seed);
    problem p;
    shape_at_random(r, p), fill_at_random(r, p);
    INFO("tokens " << p.tokens << " k " << p.topk << " experts " << p.experts << " hidden " << p.hidden << " inter " << p.inter << " activation " << p.activation
                   << " layout " << p.layout << " precision " << p.precision << " output " << p.output);
    p.make(seed);
    check_everywhere(p, pick<int64_t>(r, {0, 1, 3}));
  }
}

TEST_CASE("moe: every format as gate and up, and as down", "[moe]") {
  for (const bool down : {false, true})
    for (const cqsa_quant_format format : all_formats) {
      INFO(quant_formats[format].name << (down ? " down" : " gate and up"));
      problem p;
      (down ? p.down_formats : p.gate_formats) = {format};
      p.tokens = 6, p.experts = 2;
      p.make(uint32_t(format));
      check_everywhere(p);
    }
}

TEST_CASE("moe: sizes that are no multiple of a tile", "[moe]") {
  for (const auto& [hidden, inter, format] : {std::tuple<int64_t, int64_t, cqsa_quant_format>{1, 1, CQSA_QUANT_F32}, {33, 7, CQSA_QUANT_F16}, {129, 95, CQSA_QUANT_BF16},
                                              {32, 32, CQSA_QUANT_Q4_0}, {96, 160, CQSA_QUANT_MXFP4}, {64, 192, CQSA_QUANT_NVFP4}, {640, 32, CQSA_QUANT_Q5_1}}) {
    INFO(hidden << " x " << inter);
    problem p;
    p.hidden = hidden, p.inter = inter, p.tokens = 5, p.gate_formats = {format}, p.down_formats = {format}, p.layout = CQSA_MOE_INTERLEAVED;
    p.make(3);
    check_everywhere(p);
  }
}

TEST_CASE("moe: 4096 experts, 64 of them for a token", "[moe]") {
  problem p;
  p.experts = 4096, p.topk = 64, p.tokens = 3, p.hidden = 32, p.inter = 32;
  p.make(5);
  check_everywhere(p);
}

// ---- rules ------------------------------------------------------------------------------------------------------------------

TEST_CASE("moe: -1, no tokens, zero tokens, zero weights", "[moe]") {
  problem p;
  p.make(1);
  for (int64_t s = 0; s < p.topk; ++s) p.ids.set(0, s, -1), p.weights.set(2, s, 0);
  p.weights.set(3, 0, 0), p.ids.set(3, 1, -1);
  REQUIRE(run(p) == CQSA_OK);
  for (const int64_t t : {0, 1, 2, 3})
    for (int64_t i = 0; i < p.hidden; ++i) {
      CHECK(p.out.get(t, i) == 0);
      CHECK(!std::signbit(p.out.get(t, i)));
    }
  p.x.shape[0] = p.ids.shape[0] = p.weights.shape[0] = p.out.shape[0] = 0;
  CHECK(run(p) == CQSA_OK);
  uint64_t bytes = 1;
  CHECK(cqsa_moe_workspace(cpu_context(), &p.args, &bytes) == CQSA_OK);
  CHECK(bytes == 0);
}

TEST_CASE("moe: an expert twice counts twice", "[moe]") {
  problem p;
  p.topk = 2;
  p.make(1);
  for (int64_t t = 0; t < p.tokens; ++t) p.ids.set(t, 0, 1), p.ids.set(t, 1, 1), p.weights.set(t, 0, 0.25), p.weights.set(t, 1, 0.25);
  REQUIRE(run(p) == CQSA_OK);
  const std::vector<double> twice = p.result();
  for (int64_t t = 0; t < p.tokens; ++t) p.ids.set(t, 1, -1), p.weights.set(t, 0, 0.5);
  REQUIRE(run(p) == CQSA_OK);
  CHECK(p.result() == twice);
}

TEST_CASE("moe: experts without tokens are never read, NaN scales poison their tokens only", "[moe]") {
  problem p;
  p.gate_formats = p.down_formats = {CQSA_QUANT_Q4_K};
  p.make(2);
  for (int64_t t = 0; t < p.tokens; ++t)
    for (int64_t s = 0; s < p.topk; ++s) p.ids.set(t, s, t % 2);
  REQUIRE(run(p) == CQSA_OK);
  const std::vector<double> before = p.result();
  for (projection* w : {&p.own.gate, &p.own.up, &p.own.down}) w->list[2].data = nullptr, w->list[3].data = nullptr;
  REQUIRE(run(p) == CQSA_OK);
  CHECK(p.result() == before);
  const uint16_t nan = 0x7e00;
  std::memcpy(p.own.down.blobs[1].data() + 2, &nan, 2);  // row 0 of expert 1
  REQUIRE(run(p) == CQSA_OK);
  for (int64_t t = 0; t < p.tokens; ++t)
    for (int64_t i = 0; i < p.hidden; ++i) {
      const bool poisoned = t % 2 == 1 && i == 0;
      const double got = p.out.get(t, i);
      CHECK((poisoned ? got != got : got == before[size_t(t * p.hidden + i)]));
    }
  for (int64_t t = 0; t < p.tokens; ++t)
    for (int64_t s = 0; s < p.topk; ++s)
      if (t % 2) p.weights.set(t, s, 0);
  REQUIRE(run(p) == CQSA_OK);
  CHECK(p.out.get(3, 0) == 0);
}

TEST_CASE("moe: a NaN in x stays in its token", "[moe]") {
  for (const int32_t precision : {CQSA_MOE_PRECISION_Q8, CQSA_MOE_PRECISION_F16}) {
    problem p;
    p.precision = precision;
    p.make(2);
    for (int64_t s = 0; s < p.topk; ++s) p.ids.set(4, s, 0), p.weights.set(4, s, 1);
    REQUIRE(run(p) == CQSA_OK);
    const std::vector<double> before = p.result();
    p.x.set(4, 17, NAN);
    REQUIRE(run(p) == CQSA_OK);
    for (int64_t t = 0; t < p.tokens; ++t)
      for (int64_t i = 0; i < p.hidden; ++i) CHECK((t == 4 ? p.out.get(t, i) != p.out.get(t, i) : p.out.get(t, i) == before[size_t(t * p.hidden + i)]));
  }
}

TEST_CASE("moe: 1 to 130 tokens are each the beginning of 130", "[moe]") {
  for (const int32_t precision : {CQSA_MOE_PRECISION_Q8, CQSA_MOE_PRECISION_F16}) {
    problem p;
    p.tokens = 130, p.topk = 4, p.hidden = p.inter = 256, p.precision = precision, p.shared_inter = 256, p.shared_gate = 1;
    p.gate_formats = {CQSA_QUANT_Q4_K}, p.down_formats = {CQSA_QUANT_Q6_K};
    p.make(11);
    p.args.flags = CQSA_MOE_BATCH_INVARIANT;
    REQUIRE(run(p) == CQSA_OK);
    const std::vector<char> all = p.out.memory;
    for (int64_t t = 1; t < 130; t += t < 20 ? 1 : 7) {
      INFO(t << " tokens");
      p.x.shape[0] = p.ids.shape[0] = p.weights.shape[0] = p.out.shape[0] = t;
      std::fill(p.out.memory.begin(), p.out.memory.end(), char(0xff));
      REQUIRE(run(p) == CQSA_OK);
      CHECK(std::memcmp(p.out.memory.data(), all.data(), size_t(t * p.hidden * 4)) == 0);
      CHECK(p.out.memory[size_t(t * p.hidden * 4)] == char(0xff));
    }
  }
}

TEST_CASE("moe: a limit of memory, and what a workspace is", "[moe]") {
  problem p;
  p.tokens = 64, p.shared_inter = 256;
  p.make(4);
  uint64_t whole = 0, least = 0;
  REQUIRE(cqsa_moe_workspace(cpu_context(), &p.args, &whole) == CQSA_OK);
  REQUIRE(run(p) == CQSA_OK);
  const std::vector<char> wanted = p.out.memory;
  p.args.max_bytes = 1;
  CHECK(run(p) == CQSA_ERROR_BUDGET_TOO_SMALL);
  const std::string said = cqsa_last_error();
  REQUIRE(std::sscanf(said.c_str(), "args->max_bytes is 1, and the least that works is %lu", &least) == 1);
  CHECK(least < whole);
  for (const uint64_t budget : {least, (least + whole) / 2, whole}) {
    p.args.max_bytes = budget;
    uint64_t bytes = 0;
    REQUIRE(cqsa_moe_workspace(cpu_context(), &p.args, &bytes) == CQSA_OK);
    CHECK(bytes <= budget);
    std::unique_ptr<char, void (*)(void*)> memory(static_cast<char*>(std::aligned_alloc(64, bytes + 64)), std::free);
    std::memset(memory.get(), 0xff, bytes + 64);
    p.args.workspace = memory.get(), p.args.workspace_bytes = bytes - 1;
    CHECK(run(p) == CQSA_ERROR_WORKSPACE);
    p.args.workspace_bytes = bytes;
    std::fill(p.out.memory.begin(), p.out.memory.end(), char(0xff));
    REQUIRE(run(p) == CQSA_OK);
    CHECK(p.out.memory == wanted);
    for (uint64_t i = bytes; i < bytes + 64; ++i) REQUIRE(memory.get()[i] == char(0xff));
    p.args.workspace = nullptr, p.args.workspace_bytes = 0;
  }
  p.args.max_bytes = least - 1;
  CHECK(run(p) == CQSA_ERROR_BUDGET_TOO_SMALL);
}

TEST_CASE("moe: experts one after the other in one block of memory", "[moe]") {
  problem p;
  p.gate_formats = {CQSA_QUANT_Q4_0};
  p.make(8);
  REQUIRE(run(p) == CQSA_OK);
  const std::vector<char> wanted = p.out.memory;
  const size_t own = size_t(p.own.gate.list[0].data_bytes);
  for (const size_t gap : {size_t{0}, size_t{6}}) {
    std::vector<uint8_t> all((own + gap) * 4);
    for (size_t e = 0; e < 4; ++e) std::memcpy(all.data() + e * (own + gap), p.own.gate.blobs[e].data() + 2, own);
    cqsa_moe_weights w = p.own.gate.weights;
    w.experts = nullptr, w.all = p.own.gate.list[0], w.all.data = all.data(), w.all.data_bytes = own * 4 + gap * 3, w.expert_bytes = gap ? own + gap : 0;
    p.args.w_gate = &w;
    std::fill(p.out.memory.begin(), p.out.memory.end(), char(0xff));
    REQUIRE(run(p) == CQSA_OK);
    CHECK(p.out.memory == wanted);
    w.all.data_bytes -= 1;
    CHECK(run(p) == CQSA_ERROR_SHAPE);
  }
}

TEST_CASE("moe: what explain says", "[moe]") {
  problem p;
  p.gate_formats = {CQSA_QUANT_Q4_K}, p.down_formats = {CQSA_QUANT_BF16};
  p.make(1);
  char text[2048];
  uint64_t length = 0;
  REQUIRE(cqsa_moe_explain(cpu_context(), &p.args, text, sizeof text, &length) == CQSA_OK);
  const std::string said = text;
  CHECK(said.find("impl=cpu_") == 0);
  CHECK(said.find("w_gate: Q4_K, activations int8 (q8)\n") != std::string::npos);
  CHECK(said.find("w_down: BF16, activations f16 or better\n") != std::string::npos);
  CHECK(said.find("8 tokens in 1 piece, ") != std::string::npos);
}

// ---- errors of int8 ---------------------------------------------------------------------------------------------------------

TEST_CASE("moe: the published errors", "[moe]") {
  struct pair {
    const char* name;
    cqsa_quant_format gate, down;
    double relative;  // others' figures for the same kind of layer
  };
  const pair pairs[] = {pair{"Q2_0", CQSA_QUANT_Q2_0, CQSA_QUANT_Q2_0, 1.144e-2}, pair{"IQ2_S+Q2_0", CQSA_QUANT_IQ2_S, CQSA_QUANT_Q2_0, 1.489e-2},
                        pair{"IQ2_XXS+Q2_0", CQSA_QUANT_IQ2_XXS, CQSA_QUANT_Q2_0, 1.464e-2}, pair{"IQ2_XS+IQ4_NL", CQSA_QUANT_IQ2_XS, CQSA_QUANT_IQ4_NL, 1.465e-2},
                        pair{"IQ3_XXS+IQ4_NL", CQSA_QUANT_IQ3_XXS, CQSA_QUANT_IQ4_NL, 1.458e-2}, pair{"IQ3_S+IQ4_NL", CQSA_QUANT_IQ3_S, CQSA_QUANT_IQ4_NL, 1.470e-2},
                        pair{"IQ4_XS+Q2_0", CQSA_QUANT_IQ4_XS, CQSA_QUANT_Q2_0, 1.446e-2}};
  for (const pair& f : pairs) {
    problem p;
    if (&f - pairs > cqsa::test::random_count(7, 1)) break;
    p.tokens = 256, p.topk = 4, p.experts = 64, p.gate_formats = {f.gate}, p.down_formats = {f.down};
    p.make(42);
    p.decode();
    const std::vector<double> exact = p.exact(), model = p.exact(true);
    REQUIRE(run(p) == CQSA_OK);
    const errors q8 = compare(p.result(), exact, p.hidden), allowed = compare(model, exact, p.hidden);
    p.args.precision = CQSA_MOE_PRECISION_F16;
    REQUIRE(run(p) == CQSA_OK);
    const errors f16 = compare(p.result(), exact, p.hidden);
    std::printf("moe %s: q8 relative %.4g, worst row %.4g, of the roundings alone %.4g, f16 nmse %.3g\n", f.name, q8.relative, q8.worst_row, allowed.relative, f16.nmse());
    CHECK(q8.relative <= 1.05 * allowed.relative);
    CHECK(q8.nmse() <= 5e-4);
    CHECK(f16.nmse() <= 1e-6);
  }
}
