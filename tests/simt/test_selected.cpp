// SPDX-License-Identifier: Apache-2.0
// The portable kernels of selected-cell attention on the SIMT harness: random problems against fp64, bad lists, and that the tests bite.
#include "selected_problem.h"

using cqsa::gpu::portable_selected;

namespace {

constexpr cqsa_dtype floats[] = {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16};

selected_shape_of_problem draw(uint64_t seed) {
  std::mt19937_64 random(seed * 7919);
  auto between = [&](int64_t a, int64_t b) { return a + int64_t(random() % uint64_t(b - a + 1)); };
  selected_shape_of_problem s;
  s.total_q = between(1, 3), s.kv_heads = between(1, 2), s.group_heads = between(0, 5) ? between(1, 6) : between(16, 18);
  s.head_dim = between(0, 1) ? between(1, 100) : 4 * between(1, 40);
  s.head_dim_v = between(0, 1) ? s.head_dim : between(0, 4) ? between(1, 140) : between(250, 300);
  s.capacity = between(0, 3) ? between(1, 90) : between(100, 200), s.page_size = between(1, 20), s.pool = between(8, 24);
  s.q_type = floats[between(0, 2)], s.out_type = floats[between(0, 2)];
  constexpr cqsa_dtype own[] = {CQSA_DTYPE_I8, CQSA_DTYPE_F16};
  const int64_t kv = between(0, 3);
  s.kv_type = kv < 2 ? own[0] : kv == 2 ? own[1] : s.q_type;
  s.kv_group = 32 << between(0, 2);
  for (layout* how : {&s.q_layout, &s.kv_layout, &s.out_layout}) *how = layout(between(0, num_layouts - 1));
  s.own_tables = between(0, 1), s.wrong_ids = between(0, 3) > 0;
  s.precision = int32_t(between(CQSA_PRECISION_DEFAULT, CQSA_PRECISION_F32));
  return s;
}

std::string check_both(const selected_shape_of_problem& s, uint64_t seed) {
  for (const int lanes : {32, 64}) {
    selected_problem p(s, seed);
    const std::string text = selected_mistake(portable_selected, p, lanes, seed, 2e-6);
    if (!text.empty()) return std::to_string(lanes) + " lanes: " + text;
  }
  return "";
}

std::vector<selected_check> small_checks() {
  std::vector<selected_check> checks;
  for (const uint64_t seed : {1, 2, 3})
    checks.push_back([seed] {
      selected_shape_of_problem s;
      s.head_dim = seed == 2 ? 100 : 20, s.head_dim_v = seed == 1 ? 8 : 70, s.capacity = 150;
      selected_problem p(s, seed);
      return selected_mistake(portable_selected, p, seed == 3 ? 64 : 32, seed, 2e-6);
    });
  return checks;
}

}  // namespace

TEST_CASE("simt selected: random problems against fp64") {
  for (uint64_t seed = 1; seed <= 120; ++seed) {
    INFO("seed " << seed);
    const std::string text = check_both(draw(seed), seed);
    if (!text.empty()) FAIL(text);
  }
}

TEST_CASE("simt selected: the largest heads, and every instantiation") {
  const std::vector<std::pair<int64_t, int64_t>> sizes = {{576, 512}, {64, 64}, {128, 128}, {256, 256}, {1, 1}, {3, 257}};
  for (const auto& [dim, dim_v] : sizes) {
    INFO("head_dim " << dim << ", " << dim_v);
    selected_shape_of_problem s;
    s.head_dim = dim, s.head_dim_v = dim_v, s.total_q = 1, s.group_heads = 16;
    const std::string text = check_both(s, 5);
    if (!text.empty()) FAIL(text);
  }
}

TEST_CASE("simt selected: no cell is 0 and -inf, a NaN stays in its row") {
  selected_shape_of_problem s;
  s.total_q = 3, s.wrong_ids = false;
  selected_problem p(s, 9);
  p.counts = {0, -5, int32_t(s.capacity)};
  p.q.write(0, 1, 2, 5, nan64);
  REQUIRE(run_selected(portable_selected, p, 32, 1) == "");
  p.out.each([&](int64_t, int64_t h, int64_t i, int64_t c) {
    const double x = p.out.read(0, h, i, c);
    if (i < 2) REQUIRE(x == 0);
    else if (h == 1) REQUIRE(std::isnan(x));
    else REQUIRE(std::abs(x - p.exact_out[size_t((h * s.total_q + i) * s.head_dim_v + c)]) < 1e-4);
  });
  p.lse.each([&](int64_t, int64_t h, int64_t i, int64_t) {
    const double x = p.lse.read(0, h, i, 0);
    if (i < 2) REQUIRE(x == -inf);
    else REQUIRE(std::isnan(x) == (h == 1));
  });
}

TEST_CASE("simt selected: nothing to do, and what no GPU does") {
  selected_problem p({}, 1);
  cqsa::simt::device device;
  cqsa_selected_leaf leaf = p.leaf();
  leaf.total_q = 0;
  CHECK(portable_selected.launch(&device, &leaf, nullptr, 0, nullptr, nullptr) == CQSA_OK);
  CHECK(device.launches == 0);
  char reason[128] = "";
  leaf = p.leaf();
  CHECK(portable_selected.workspace(&leaf, 1) == 0);
  leaf.q.dtype = CQSA_DTYPE_F64;
  CHECK(portable_selected.probe(&leaf, reason, sizeof reason) == CQSA_ERROR_UNSUPPORTED);
  CHECK(std::string(reason) == "q must be f32, f16 or bf16, and k and v both one of these or int8");
  leaf = p.leaf(), leaf.head_dim = 577;
  CHECK(portable_selected.probe(&leaf, reason, sizeof reason) == CQSA_ERROR_UNSUPPORTED);
  CHECK(std::string(reason) == "head_dim is 1..576 and head_dim_v 1..512");
}

TEST_CASE("simt selected: every mutant and every meeting place is noticed") {
  const std::vector<selected_check> checks = small_checks();
  for (const selected_check& check : checks) REQUIRE(check() == "");
  size_t sites = 0;
  const std::string missed = unnoticed(checks, 3, "selected", &sites);
  CHECK(sites >= 8);
  CHECK(missed == "");
}
