// SPDX-License-Identifier: Apache-2.0
// The sm_80 kernels of selected-cell attention on the SIMT harness: random problems against fp64, what SPLIT keeps, and that the tests
// bite.
#include "selected_problem.h"

#include "backends/cuda/tuned.h"
#include "simt_mma.h"

using cqsa::gpu::portable_selected;
using cqsa::gpu::sm80_selected;

namespace {

constexpr double fast_error = 3e-3, split_error = 4e-6;
double tolerance_of(const selected_shape_of_problem& s) { return s.precision == CQSA_PRECISION_SPLIT ? split_error : fast_error; }

selected_shape_of_problem draw(uint64_t seed) {
  std::mt19937_64 random(seed * 104729);
  auto between = [&](int64_t a, int64_t b) { return a + int64_t(random() % uint64_t(b - a + 1)); };
  selected_shape_of_problem s;
  constexpr int64_t dims[] = {64, 128, 256, 80, 96, 192, 20, 131};
  s.total_q = between(1, 2), s.kv_heads = between(1, 2), s.group_heads = between(0, 5) ? between(1, 12) : between(16, 20);
  s.head_dim = dims[between(0, 7)], s.head_dim_v = between(0, 2) ? s.head_dim : dims[between(0, 7)];
  s.capacity = between(0, 3) ? between(1, 150) : between(200, 400), s.page_size = between(1, 20), s.pool = between(8, 40);
  s.kv_type = between(0, 2) ? CQSA_DTYPE_I8 : CQSA_DTYPE_F16, s.kv_group = 64 << between(0, 1);
  constexpr cqsa_dtype floats[] = {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16};
  s.q_type = floats[between(0, 2)], s.out_type = floats[between(0, 2)];
  s.precision = between(0, 1) ? CQSA_PRECISION_SPLIT : CQSA_PRECISION_FAST;
  s.q_layout = layout(between(0, num_layouts - 1)), s.out_layout = layout(between(0, num_layouts - 1));
  s.kv_layout = between(0, 1) ? compact : layout(between(0, num_layouts - 1));
  s.own_tables = between(0, 1), s.wrong_ids = between(0, 3) > 0;
  s.q_size = std::ldexp(1.0, int(between(-2, 0)));
  return s;
}

std::string check(const selected_shape_of_problem& s, uint64_t seed) {
  selected_problem p(s, seed);
  return selected_mistake(sm80_selected, p, 32, seed, tolerance_of(s));
}

std::vector<selected_check> small_checks() {
  std::vector<selected_check> checks;
  for (const auto& [type, dim, capacity] : std::vector<std::tuple<cqsa_dtype, int64_t, int64_t>>{
           {CQSA_DTYPE_I8, 128, 300}, {CQSA_DTYPE_F16, 64, 200}, {CQSA_DTYPE_I8, 131, 290}})
    checks.push_back([type = type, dim = dim, capacity = capacity] {
      selected_shape_of_problem s;
      s.kv_type = type, s.head_dim = s.head_dim_v = dim, s.capacity = capacity;
      s.total_q = 1, s.kv_heads = 1, s.group_heads = 11, s.pool = 60;
      s.precision = CQSA_PRECISION_SPLIT;
      std::string text;
      for (uint64_t seed = 1; seed <= 2 && text.empty(); ++seed) text = check(s, seed);
      return text;
    });
  return checks;
}

// The generator of sparse.md 2, for one query.
selected_shape_of_problem published(cqsa_dtype type, int32_t precision) {
  selected_shape_of_problem s;
  s.total_q = 1, s.kv_heads = 1, s.group_heads = 12, s.head_dim = s.head_dim_v = 256, s.capacity = 2051, s.page_size = 64, s.pool = 66;
  s.kv_type = type, s.wrong_ids = false, s.q_size = 2.0, s.precision = precision;
  return s;
}

}  // namespace

TEST_CASE("simt selected sm_80: random problems against fp64") {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    INFO("seed " << seed);
    const std::string text = check(draw(seed), seed);
    if (!text.empty()) FAIL(text);
  }
}

TEST_CASE("simt selected sm_80: SPLIT is as exact as f32, with the rounding of sm_80 and of sm_90", "[accuracy]") {
  for (const cqsa_dtype type : {CQSA_DTYPE_I8, CQSA_DTYPE_F16})
    for (const auto& numerics : {cqsa::simt::sm80_numerics, cqsa::simt::sm90_numerics}) {
      cqsa::simt::numerics_m16n8k16 = numerics;
      selected_problem split(published(type, CQSA_PRECISION_SPLIT), 3), plain(published(type, CQSA_PRECISION_F32), 3);
      REQUIRE(run_selected(sm80_selected, split, 32, 1) == "");
      REQUIRE(run_selected(portable_selected, plain, 32, 1) == "");
      const double a = error_of(split).out, b = error_of(plain).out;
      WARN((type == CQSA_DTYPE_I8 ? "int8" : "f16") << ", sums of blocks of " << numerics.block << ": split " << a << ", f32 " << b);
      CHECK(a <= std::max(4 * b, 1e-6));
    }
  cqsa::simt::numerics_m16n8k16 = cqsa::simt::sm80_numerics;
}

TEST_CASE("simt selected sm_80: no cell is 0 and -inf, a NaN stays in its row") {
  selected_shape_of_problem s;
  s.total_q = 3, s.wrong_ids = false, s.precision = CQSA_PRECISION_SPLIT;
  selected_problem p(s, 9);
  p.counts = {0, -5, int32_t(s.capacity)};
  p.q.write(0, 1, 2, 5, nan64);
  REQUIRE(run_selected(sm80_selected, p, 32, 1) == "");
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

TEST_CASE("simt selected sm_80: queries and scales of any size") {
  for (const double size : {1e-30, 1e-6, 1e4, 1e30}) {
    INFO("q times " << size);
    selected_shape_of_problem s;
    s.precision = CQSA_PRECISION_SPLIT, s.q_type = CQSA_DTYPE_BF16;
    selected_problem p(s, 4);
    const auto grow = [&](int64_t, int64_t h, int64_t i, int64_t c) { return p.q.read(0, h, i, c) * size; };
    p.q.fill(grow);
    // Scales of k that bring the logits back, as far as halves go, and of v that differ by 2^20 among the tiles.
    p.scale_scales(std::min(6e4 / 0.03, std::max(1e-6, 1 / size)), 1000.0);
    const std::string text = selected_mistake(sm80_selected, p, 32, 1, 2e-5);
    if (!text.empty()) FAIL(text);
  }
}

TEST_CASE("simt selected sm_80: what is left to the portable kernel") {
  const auto why = [](const std::function<void(cqsa_selected_leaf&)>& change) {
    selected_shape_of_problem s;
    s.precision = CQSA_PRECISION_SPLIT;
    const selected_problem p(s, 1);
    cqsa_selected_leaf leaf = p.leaf();
    change(leaf);
    char reason[160] = "";
    const cqsa_status status = sm80_selected.probe(&leaf, reason, sizeof reason);
    CHECK((status == CQSA_OK) == (reason[0] == 0));
    return std::string(reason);
  };
  CHECK(why([](auto&) {}) == "");
  CHECK(why([](auto& x) { x.chip.tier = 75; }) == "the device has no sm_80 code");
  CHECK(why([](auto& x) { x.chip.shared_bytes = 20000; }) == "the device has too little shared memory");
  CHECK(why([](auto& x) { x.precision = CQSA_PRECISION_F32; }) == "f32 products were asked for");
  CHECK(why([](auto& x) { x.precision = CQSA_PRECISION_DEFAULT; }) == "f32 queries are multiplied in f32 unless asked otherwise");
  CHECK(why([](auto& x) { x.precision = CQSA_PRECISION_DEFAULT, x.q.dtype = CQSA_DTYPE_F16; }) == "");
  CHECK(why([](auto& x) { x.head_dim = 257; }) == "head_dim must be 1..256");
  CHECK(why([](auto& x) { x.kv_group = 32; }) == "kv_group must be 64 or 128");
  CHECK(why([](auto& x) { x.k.dtype = x.v.dtype = CQSA_DTYPE_BF16; }) == "k and v must be f16 or int8");
}

TEST_CASE("simt selected sm_80: every mutant and every meeting place is noticed") {
  const std::vector<selected_check> checks = small_checks();
  for (const selected_check& one : checks) REQUIRE(one() == "");
  size_t sites = 0;
  const std::string missed = unnoticed(checks, 4, "selected", &sites);
  CHECK(sites >= 12);
  CHECK(missed == "");
}
