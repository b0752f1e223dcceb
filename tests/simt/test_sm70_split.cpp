// SPDX-License-Identifier: Apache-2.0
// What split precision is for, with the rounding of Volta's matrix unit: 24 / 2 heads of 256 over 2,051 selected cells, one key head of
// them, a few queries of the parity generator. One accumulator chain for both halves loses most of the low ones.
#include "sm70_selected.h"

namespace {

// The same sums in f32 in the order of an f32 kernel: fused multiply-adds over the channels and over the cells.
double error_of_f32(const selected_problem& p) {
  const cqsa_selected_leaf& x = p.leaf;
  double worst = 0;
  for (int64_t i = 0; i < x.total_q; ++i)
    for (int64_t h = 0; h < x.num_heads; ++h) {
      const int64_t count = p.counts[size_t(i)];
      std::vector<float> s(static_cast<size_t>(count)), o(size_t(x.head_dim_v), 0.0f);
      float m = -INFINITY, l = 0;
      int64_t page, row;
      for (int64_t n = 0; n < count; ++n) {
        REQUIRE(cell_at(p, i, n, &page, &row));
        float dot = 0;
        for (int64_t c = 0; c < x.head_dim; ++c)
          dot = std::fma(float(p.q.read(0, h, i, c)) * float(x.softmax_scale), float(scaled(p.k, p.k_scale, x.kv_group, page, 0, row, c)), dot);
        s[size_t(n)] = dot, m = std::max(m, dot);
      }
      for (int64_t n = 0; n < count; ++n) {
        cell_at(p, i, n, &page, &row);
        const float e = std::exp(s[size_t(n)] - m);
        l += e;
        for (int64_t c = 0; c < x.head_dim_v; ++c)
          o[size_t(c)] = std::fma(e, float(scaled(p.v, p.v_scale, x.kv_group, page, 0, row, c)), o[size_t(c)]);
      }
      for (int64_t c = 0; c < x.head_dim_v; ++c) worst = std::max(worst, std::fabs(o[size_t(c)] / l - p.exact_out.read(0, h, i, c)));
    }
  return worst;
}

constexpr int one_chain = 10;  // CQSA_MUTANT: hi and lo in one accumulator

struct errors {
  double f32, one, two, fast, most;
};
errors measure(int64_t context, cqsa_dtype kv, uint32_t seed) {
  selected_sizes s;
  s.context = context, s.kv = kv, s.queries = 2;
  selected_problem p = make_selected(s, seed);
  exact_selected(p);
  errors e{};
  e.f32 = error_of_f32(p);
  REQUIRE(run_selected(p, CQSA_PRECISION_SPLIT, seed) == "");
  e.two = error_of(p).out, e.most = error_of(p).most;
  REQUIRE(run_selected(p, CQSA_PRECISION_FAST, seed) == "");
  e.fast = error_of(p).out;
  cqsa_simt_mutant = one_chain;
  REQUIRE(run_selected(p, CQSA_PRECISION_SPLIT, seed) == "");
  cqsa_simt_mutant = 0;
  e.one = error_of(p).out;
  return e;
}

}  // namespace

TEST_CASE("simt sm70: hi and lo in chains of their own") {
  for (const int64_t context : {2100, 8192})
    for (const cqsa_dtype kv : {CQSA_DTYPE_I8, CQSA_DTYPE_F16}) {
      const errors e = measure(context, kv, uint32_t(context));
      const bool codes = kv == CQSA_DTYPE_I8;
      WARN("context " << context << (codes ? " int8" : " f16") << ", outputs to " << e.most << ": f32 " << e.f32 << ", one chain " << e.one
                      << ", two chains " << e.two << ", fast " << e.fast);
      CHECK(e.one >= 1.5 * e.two);
      CHECK(e.two <= std::max((codes ? 2 : 4) * e.f32, 1e-6 * e.most));
      CHECK(e.fast >= 20 * e.two);
    }
}
