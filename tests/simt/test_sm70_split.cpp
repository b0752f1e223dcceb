// SPDX-License-Identifier: Apache-2.0
// What split precision is for, with the rounding of Volta's matrix unit: 24 / 2 heads of 256 over 2,051 selected cells, one key head of
// them, a few queries of the parity generator. One accumulator chain for both halves loses most of the low ones.
#include "sm70_selected.h"

namespace {

// The f32 kernel of every GPU on the cells of a query, gathered.
double error_of_f32(const selected_problem& p) {
  const cqsa_selected_leaf& x = p.leaf;
  double worst = 0;
  for (int64_t i = 0; i < x.total_q; ++i) {
    const int64_t count = p.counts[size_t(i)];
    problem g = plain(1, int(x.num_heads), 1, 1, int(count), int(x.head_dim), int(x.head_dim_v), CQSA_DTYPE_F32);
    auto gather = [&](const tensor& from, tensor& to) {
      to = tensor(from.view.dtype, {1, 1, count, from.shape[3]});
      int64_t page = 0, row = 0;
      for (int64_t n = 0; n < count; ++n) {
        REQUIRE(cell_at(p, i, n, &page, &row));
        for (int64_t c = 0; c < from.shape[3]; ++c) std::memcpy(to.at(0, 0, n, c), from.at(page, 0, row, c), size_t(bytes_of(from.view.dtype)));
      }
    };
    gather(p.k, g.k), gather(p.v, g.v);
    if (x.kv_group) {
      gather(p.k_scale, g.k_scale), gather(p.v_scale, g.v_scale);
      g.leaf.scale_k = g.leaf.scale_v = CQSA_SCALE_GROUP, g.leaf.kv_group = x.kv_group;
    }
    g.q.fill([&](int64_t, int64_t h, int64_t, int64_t c) { return p.q.read(0, h, i, c); });
    cqsa::simt::device device = volta(1);
    const cqsa_attention_leaf leaf = g.with(g.out, g.lse);
    REQUIRE(cqsa::gpu::portable_attention.launch(&device, &leaf, nullptr, 0, nullptr, nullptr) == CQSA_OK);
    for (int64_t h = 0; h < x.num_heads; ++h)
      for (int64_t c = 0; c < x.head_dim_v; ++c) worst = std::max(worst, std::fabs(g.out.read(0, h, 0, c) - p.exact_out.read(0, h, i, c)));
  }
  return worst;
}

// CQSA_MUTANT: hi and lo in one accumulator; and that one for all tiles.
constexpr int short_chain = 10, one_chain = 11;

struct errors {
  double f32, short_one, one, two, fast, most;
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
  for (const int mutant : {short_chain, one_chain}) {
    cqsa_simt_mutant = mutant;
    REQUIRE(run_selected(p, CQSA_PRECISION_SPLIT, seed) == "");
    cqsa_simt_mutant = 0;
    (mutant == one_chain ? e.one : e.short_one) = error_of(p).out;
  }
  return e;
}

}  // namespace

TEST_CASE("simt sm70: hi and lo in chains of their own") {
  for (const int64_t context : {2100, 8192})
    for (const cqsa_dtype kv : {CQSA_DTYPE_I8, CQSA_DTYPE_F16}) {
      const errors e = measure(context, kv, uint32_t(context));
      const bool codes = kv == CQSA_DTYPE_I8;
      WARN("context " << context << (codes ? " int8" : " f16") << ", outputs to " << e.most << ": f32 " << e.f32 << ", one chain " << e.one << " (short ones: " << e.short_one << ")"
                      << ", two chains " << e.two << ", fast " << e.fast);
      CHECK(e.one >= 1.5 * e.two);
      CHECK(e.two <= std::max((codes ? 2 : 4) * e.f32, 1e-6 * e.most));
      CHECK(e.fast >= 20 * e.two);
    }
}
