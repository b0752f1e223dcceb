// SPDX-License-Identifier: Apache-2.0
// Mixtures of experts by the portable kernels in the harness: against f64, every format, the rules one by one; and the parts against the CPU's.
#include "moe_simt.h"

#include "simt_runtime.h"

#include "../random_count.h"

using namespace moe_test;

namespace {

template <class T> T pick(engine& r, std::initializer_list<T> list) { return list.begin()[below(r, int64_t(list.size()))]; }
cqsa_quant_format any_format(engine& r) { return cqsa_quant_format(1 + below(r, quant_format_count - 1)); }

void shape_at_random(engine& r, problem& p) {
  p.tokens = pick<int64_t>(r, {1, 2, 3, 7, 20, 70}), p.topk = pick<int64_t>(r, {1, 2, 3, 8}), p.experts = pick<int64_t>(r, {1, 2, 5, 9});
  p.hidden = pick<int64_t>(r, {256, 512}), p.inter = pick<int64_t>(r, {256, 512});
  p.activation = int32_t(below(r, 7)), p.layout = p.gated() ? int32_t(below(r, 3)) : 0;
  p.x_dtype = pick(r, {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16}), p.out_dtype = pick(r, {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16});
  p.id_dtype = pick(r, {CQSA_DTYPE_I32, CQSA_DTYPE_I64}), p.gap = pick<int64_t>(r, {0, 0, 3, 4});
  p.precision = int32_t(below(r, 3)), p.output = int32_t(below(r, 2)), p.biases = below(r, 2), p.mapped = below(r, 2);
  p.gate_formats = {any_format(r)}, p.up_formats = {any_format(r)}, p.down_formats = {any_format(r)};
  if (below(r, 3) == 0) p.gate_formats.push_back(any_format(r)), p.down_formats.push_back(any_format(r));
  if (p.activation == CQSA_MOE_SWIGLU && below(r, 2)) p.alpha = 1.702f, p.beta = 1, p.limit = 2;
  if (!p.slots() && below(r, 2)) p.shared_inter = pick<int64_t>(r, {256, 768}), p.shared_gate = int(below(r, 3));
}

std::string text_of(const problem& p) {
  std::string s;
  for (const int64_t n : {p.tokens, p.topk, p.experts, p.hidden, p.inter, int64_t(p.activation), int64_t(p.layout), int64_t(p.precision), int64_t(p.output),
                          int64_t(p.gate_formats[0]), int64_t(p.up_formats.empty() ? 0 : p.up_formats[0]), int64_t(p.down_formats[0]), p.shared_inter})
    s += std::to_string(n) + " ";
  return "tokens, k, experts, hidden, inter, activation, layout, precision, output, formats, shared: " + s;
}

std::string mistake(const simt_run& r, problem& p, uint32_t flags = 0) {
  if (p.own.down.values.empty()) p.decode();
  const std::vector<double> exact = p.exact(), model = p.exact(true);
  const std::string failed = run_simt(r, p, flags);
  return failed.empty() ? wrong_errors(p, exact, model) : failed;
}

}  // namespace

TEST_CASE("simt moe: random layers") {
  const uint32_t first = uint32_t(std::getenv("CQSA_SEED") ? std::atoi(std::getenv("CQSA_SEED")) : 1);
  for (uint32_t seed = first; seed < first + cqsa::test::random_count(30, 2); ++seed) {
    engine r(seed);
    problem p;
    shape_at_random(r, p);
    INFO("seed " << seed << ": " << text_of(p));
    p.make(seed);
    simt_run run;
    run.lanes = below(r, 2) ? 64 : 32, run.units = int(1 + below(r, 4)), run.seed = seed, run.chunk = pick<int64_t>(r, {0, 0, 1, 3}), run.on_device = below(r, 2);
    const std::string text = mistake(run, p, below(r, 3) == 0 ? uint32_t(CQSA_MOE_BATCH_INVARIANT) : 0u);
    if (!text.empty()) FAIL_CHECK(text);
  }
}

TEST_CASE("simt moe: every format, as tiles and as few tokens") {
  for (const bool tiles : {false, true})
    for (cqsa_quant_format f = 1; f < quant_format_count; ++f) {
      problem p;
      p.tokens = tiles ? 9 : 3, p.experts = 2, p.topk = 1, p.gate_formats = {f}, p.down_formats = {f}, p.precision = f % 2 ? CQSA_MOE_PRECISION_Q8 : CQSA_MOE_PRECISION_F16;
      INFO(quant_formats[f].name << (tiles ? " tiles" : " few"));
      p.make(uint32_t(f));
      for (const int lanes : {32, 64}) {
        simt_run run;
        run.lanes = lanes;
        const std::string text = mistake(run, p, tiles ? uint32_t(CQSA_MOE_BATCH_INVARIANT) : 0u);
        if (!text.empty()) FAIL_CHECK(text);
      }
    }
}

TEST_CASE("simt moe: a token's bits do not go by the others, where that is asked for") {
  problem p;
  p.tokens = 70, p.topk = 2, p.experts = 3;
  p.make(5);
  simt_run run;
  REQUIRE(run_simt(run, p, CQSA_MOE_BATCH_INVARIANT) == "");
  const std::vector<double> all = p.result();
  for (const int64_t chunk : {1, 3, 64}) {
    run.chunk = chunk;
    REQUIRE(run_simt(run, p, CQSA_MOE_BATCH_INVARIANT) == "");
    CHECK(p.result() == all);
  }
}

TEST_CASE("simt moe: ids that mean nothing are skipped and counted, and so are experts that are not here") {
  for (const int64_t tokens : {int64_t{2}, int64_t{40}}) {
    problem p;
    p.tokens = tokens, p.topk = 2, p.experts = 3;
    p.make(9);
    p.counters = array(CQSA_DTYPE_I64, {2});
    for (int64_t t = 0; t < p.tokens; ++t) p.ids.set(t, 0, double(t % 3)), p.ids.set(t, 1, -1), p.weights.set(t, 0, 1);
    p.decode();
    const std::vector<double> exact = p.exact(), model = p.exact(true);
    for (int64_t t = 0; t < p.tokens; ++t) p.ids.set(t, 1, t % 2 ? 77 : -5);
    p.counters.set(0, 0, 0), p.counters.set(1, 0, 0);
    p.bind();
    p.args.counters = p.counters.tensor();
    simt_run run;
    REQUIRE(run_simt(run, p) == "");
    CHECK(wrong_errors(p, exact, model) == "");
    CHECK(p.counters.get(0) == double(tokens));
    CHECK(p.counters.get(1) == 0);
    p.own.down.list[1].data = nullptr;
    REQUIRE(run_simt(run, p) == "");
    CHECK(p.counters.get(0) == double(2 * tokens));
    CHECK(p.counters.get(1) == double((tokens + 1) / 3));
    for (int64_t t = 1; t < p.tokens; t += 3) CHECK(p.out.get(t, 5) == 0);
  }
}

TEST_CASE("simt moe: a NaN scale poisons the tokens of its expert and no other, and a weight of 0 adds nothing") {
  for (const int64_t tokens : {int64_t{3}, int64_t{60}}) {
    problem p;
    p.tokens = tokens, p.topk = 2, p.experts = 4, p.precision = CQSA_MOE_PRECISION_Q8;
    p.make(3);
    put_half(p.own.down.blobs[2].data() + 2, NAN);
    for (int64_t t = 0; t < tokens; ++t) p.ids.set(t, 0, double(t % 2)), p.ids.set(t, 1, t % 3 == 0 ? 2 : 3), p.weights.set(t, 1, t % 6 == 3 ? 0 : 1);
    simt_run run;
    REQUIRE(run_simt(run, p) == "");
    for (int64_t t = 0; t < tokens; ++t) CHECK(std::isnan(p.out.get(t, 0)) == (t % 3 == 0 && t % 6 != 3));
  }
}

// ---- parts --------------------------------------------------------------------------------------------------------------------

namespace {

cqsa_moe_rows rows_of(array& x) { return {x.memory.data(), x.view.dtype, 0, {x.strides[0], x.shape.size() > 1 ? x.strides[1] : 0}}; }

}  // namespace

TEST_CASE("simt moe: grouping is that of the CPU") {
  for (uint32_t seed = 1; seed < 20; ++seed) {
    engine r(seed);
    const int64_t tokens = pick<int64_t>(r, {1, 5, 300, 900}), k = pick<int64_t>(r, {1, 2, 7}), experts = pick<int64_t>(r, {1, 3, 40, 700});
    const cqsa_dtype type = pick(r, {CQSA_DTYPE_I32, CQSA_DTYPE_I64});
    array ids(pick(r, {CQSA_DTYPE_I32, CQSA_DTYPE_I64}), {tokens, k}, below(r, 2)), out[2][4], counters[2];
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t s = 0; s < k; ++s) ids.set(t, s, double(below(r, experts + 2) - 1));
    for (int n = 0; n < 2; ++n) {
      out[n][0] = array(type, {experts + 1}), out[n][1] = array(type, {tokens * k}), out[n][2] = array(type, {experts}), out[n][3] = array(type, {tokens, k}, 1);
      counters[n] = array(CQSA_DTYPE_I64, {2});
      counters[n].set(0, 0, 0), counters[n].set(1, 0, 0);
      cqsa_moe_group_leaf a{};
      a.tokens = tokens, a.topk = k, a.num_experts = a.num_ids = experts, a.ids = rows_of(ids), a.dtype = type;
      a.offsets = out[n][0].memory.data(), a.order = out[n][1].memory.data(), a.counts = out[n][2].memory.data(), a.places = out[n][3].memory.data();
      a.offsets_stride = a.order_stride = a.counts_stride = 1, a.places_stride[0] = out[n][3].strides[0], a.places_stride[1] = 1;
      a.counters = reinterpret_cast<int64_t*>(counters[n].memory.data()), a.counters_stride = 1;
      simt_run run;
      run.lanes = seed % 2 ? 32 : 64, run.units = int(seed % 5 + 1);
      simt::device device = device_of(run);
      if (n == 0) REQUIRE(cpu::moe_group(nullptr, &a, nullptr, nullptr) == CQSA_OK);
      else REQUIRE(gpu::portable_moe_group(&device, &a, nullptr, nullptr) == CQSA_OK);
    }
    INFO("seed " << seed);
    for (int i = 0; i < 4; ++i) CHECK(out[0][i].memory == out[1][i].memory);
    CHECK(counters[1].get(0) > -1);
  }
}

TEST_CASE("simt moe: codes and combinations have the bits of the CPU") {
  for (uint32_t seed = 1; seed < 20; ++seed) {
    engine r(seed);
    const int64_t rows = pick<int64_t>(r, {1, 3, 40}), n = 32 * pick<int64_t>(r, {1, 3, 16});
    array x(pick(r, {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16}), {rows, n}, below(r, 2) * 3);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < n; ++j) x.set(i, j, r() % 200 == 0 ? pick<double>(r, {INFINITY, NAN, 1e-42}) : i % 5 == 1 ? 0 : normal(r));
    array codes[2], scales[2];
    for (int b = 0; b < 2; ++b) {
      codes[b] = array(CQSA_DTYPE_I8, {rows, n}), scales[b] = array(CQSA_DTYPE_F32, {rows, n / 32});
      const cqsa_moe_quantize_leaf a{rows, n, rows_of(x), rows_of(codes[b]), rows_of(scales[b])};
      simt_run run;
      run.lanes = seed % 2 ? 32 : 64;
      simt::device device = device_of(run);
      REQUIRE((b ? gpu::portable_moe_quantize(&device, &a, nullptr, nullptr) : cpu::moe_quantize(nullptr, &a, nullptr, nullptr)) == CQSA_OK);
    }
    INFO("seed " << seed);
    CHECK(codes[0].memory == codes[1].memory);
    CHECK(scales[0].memory == scales[1].memory);

    const int64_t k = pick<int64_t>(r, {1, 3, 8}), hidden = pick<int64_t>(r, {1, 7, 64});
    array y(CQSA_DTYPE_F32, {rows * k, hidden}, below(r, 2)), weights(CQSA_DTYPE_F32, {rows, k}), ids(CQSA_DTYPE_I32, {rows, k}), out[2];
    for (int64_t i = 0; i < rows * k; ++i) {
      weights.set(i / k, i % k, r() % 4 == 0 ? 0 : normal(r)), ids.set(i / k, i % k, double(below(r, 5)) - 1);
      for (int64_t j = 0; j < hidden; ++j) y.set(i, j, weights.get(i / k, i % k) == 0 ? NAN : normal(r));
    }
    const cqsa_dtype type = pick(r, {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16});
    for (int b = 0; b < 2; ++b) {
      out[b] = array(type, {rows, hidden}, 2);
      cqsa_moe_combine_leaf a{rows, k, hidden, rows_of(y), rows_of(weights), rows_of(ids), rows_of(out[b])};
      if (seed % 3 == 0) a.ids.data = nullptr;
      simt_run run;
      simt::device device = device_of(run);
      REQUIRE((b ? gpu::portable_moe_combine(&device, &a, nullptr, nullptr) : cpu::moe_combine(nullptr, &a, nullptr, nullptr)) == CQSA_OK);
    }
    CHECK(out[0].memory == out[1].memory);
  }
}

TEST_CASE("simt moe: the router chooses as the CPU does") {
  for (uint32_t seed = 1; seed < 40; ++seed) {
    engine r(seed);
    const int64_t tokens = pick<int64_t>(r, {1, 6, 20}), groups = pick<int64_t>(r, {1, 2, 4}), experts = groups * pick<int64_t>(r, {3, 16, 70});
    const int64_t open = pick<int64_t>(r, {1, groups}), k = std::min<int64_t>(pick<int64_t>(r, {1, 2, 8, 64}), experts / groups * open);
    array logits(pick(r, {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16}), {tokens, experts}, below(r, 2)), bias(CQSA_DTYPE_F32, {experts}), ids[2], weights[2];
    for (int64_t e = 0; e < experts; ++e) {
      bias.set(e, 0, double(below(r, 9)) / 8);
      for (int64_t t = 0; t < tokens; ++t) logits.set(t, e, r() % 50 == 0 ? NAN : std::round(normal(r) * 4) / 4);
    }
    cqsa_moe_route_leaf a{};
    a.tokens = tokens, a.num_experts = experts, a.topk = k, a.logits = rows_of(logits), a.scale = 2.5f, a.renormalise = int32_t(below(r, 2));
    a.scoring = int32_t(below(r, 2)), a.group_score = int32_t(below(r, 2)), a.num_groups = int32_t(groups), a.topk_groups = int32_t(open);
    if (below(r, 2) && a.scoring == CQSA_MOE_SIGMOID) a.bias = reinterpret_cast<const float*>(bias.memory.data()), a.bias_stride = 1;
    INFO("seed " << seed);
    for (int b = 0; b < 2; ++b) {
      ids[b] = array(CQSA_DTYPE_I64, {tokens, k}), weights[b] = array(CQSA_DTYPE_F32, {tokens, k});
      a.ids = rows_of(ids[b]), a.weights = rows_of(weights[b]);
      simt_run run;
      run.lanes = seed % 2 ? 32 : 64;
      simt::device device = device_of(run);
      REQUIRE((b ? gpu::portable_moe_route(&device, &a, nullptr, nullptr) : cpu::moe_route(nullptr, &a, nullptr, nullptr)) == CQSA_OK);
    }
    CHECK(ids[0].memory == ids[1].memory);
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t s = 0; s < k; ++s) CHECK(std::fabs(weights[0].get(t, s) - weights[1].get(t, s)) <= 1e-5 * std::fabs(weights[0].get(t, s)));
  }
}

TEST_CASE("simt moe: every mutant shows") {
  problem p;
  p.tokens = 40, p.topk = 2, p.experts = 3, p.gate_formats = {CQSA_QUANT_Q4_K}, p.down_formats = {CQSA_QUANT_IQ2_S};
  p.make(4);
  simt_run run;
  REQUIRE(mistake(run, p, CQSA_MOE_BATCH_INVARIANT) == "");
  for (const int mutant : {71, 72}) {
    cqsa_simt_mutant = mutant;
    std::string text;
    for (run.seed = 1; run.seed < 6 && text.empty(); ++run.seed) text = mistake(run, p, CQSA_MOE_BATCH_INVARIANT);
    cqsa_simt_mutant = 0;
    INFO("mutant " << mutant);
    CHECK(!text.empty());
  }
}
