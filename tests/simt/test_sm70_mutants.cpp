// SPDX-License-Identifier: Apache-2.0
// The tests of the sm_70 kernels bite: each deliberate mistake in them (CQSA_MUTANT) and each meeting place of their threads that is
// left out gives a failure in one of a few small problems.
#include "apart.h"
#include "sm70_selected.h"

#include <functional>

using namespace cqsa::simt;

namespace {

using check_function = std::function<std::string(uint64_t seed)>;

check_function dense(problem p, int32_t precision) {
  auto shared = std::make_shared<problem>(std::move(p));
  run_reference(*shared);
  return [shared, precision](uint64_t seed) { return volta_mistake(*shared, precision, seed); };
}
check_function selected(selected_problem p, int32_t precision) {
  auto shared = std::make_shared<selected_problem>(std::move(p));
  exact_selected(*shared);
  return [shared, precision](uint64_t seed) { return selected_mistake(*shared, precision, seed); };
}

// The first keys, then the others, then a rectangle without keys.
std::string by_state(problem& p, int64_t cut, uint64_t seed) {
  device d = volta(seed);
  cqsa_attention_leaf leaf = volta_leaf(p, p.out, p.lse, CQSA_PRECISION_SPLIT);
  const int64_t n = leaf.batch * leaf.num_heads * leaf.seqlen_q;
  std::vector<float> acc(size_t(n * leaf.head_dim_v), NAN), m(size_t(n), NAN), l(size_t(n), NAN);
  leaf.state_acc = acc.data(), leaf.state_m = m.data(), leaf.state_l = l.data(), leaf.state_rows = leaf.seqlen_q;
  const cqsa_rect parts[] = {{0, 0, leaf.seqlen_q, cut, 0, 0, 0}, {0, cut, leaf.seqlen_q, leaf.seqlen_k - cut, 0, cut, 0}, {0, 0, leaf.seqlen_q, 0, 0, 0, 0}};
  const uint32_t flags[] = {CQSA_LEAF_STATE_OUT, CQSA_LEAF_STATE_IN | CQSA_LEAF_STATE_OUT, CQSA_LEAF_STATE_IN};
  for (int i = 0; i < 3; ++i) {
    leaf.rects = &parts[i], leaf.num_rects = 1, leaf.flags = flags[i];
    if (launch_volta(d, leaf) != CQSA_OK) return last_error();
  }
  return differs(p.out, p.exact_out, 2e-5) + differs(p.lse, p.exact_lse, 2e-5);
}

std::vector<check_function> small_checks() {
  std::vector<check_function> all;
  auto add = [&](int32_t precision, problem p, auto change) {
    change(p);
    all.push_back(dense(std::move(p), precision));
  };
  add(CQSA_PRECISION_FAST, plain(1, 2, 1, 40, 100, 80, 128, CQSA_DTYPE_F16), [](problem& p) { p.leaf.causal = CQSA_CAUSAL_BOTTOM_RIGHT; });
  add(CQSA_PRECISION_SPLIT, plain(1, 1, 1, 35, 70, 64, 64, CQSA_DTYPE_F32), [](problem& p) { set_int8(p, 32, 3); });
  add(CQSA_PRECISION_SPLIT, plain(1, 2, 2, 50, 75, 64, 64, CQSA_DTYPE_F16), [](problem& p) {
    p.leaf.causal = CQSA_CAUSAL_TOP_LEFT, p.leaf.softcap = 2;
    for (int64_t c = 0; c < 64; ++c) p.v.write(0, 0, 19, c, nan64), p.v.write(0, 1, 60, c, inf);
  });
  add(CQSA_PRECISION_SPLIT, plain(1, 1, 1, 20, 110, 256, 256, CQSA_DTYPE_F32), [](problem& p) {
    set_int8(p, 64, 3);
    for (int64_t r = 0; r < 20; r += 4) p.q.write(0, 0, r, 5, 130);  // more than f16 holds, but for the row's power of two
  });
  add(CQSA_PRECISION_FAST, plain(1, 2, 1, 20, 90, 36, 24, CQSA_DTYPE_F16), [](problem& p) { p.rects = {{0, 0, 20, 10, 0, 0, 0}, {0, 10, 20, 80, 0, 10, 0}}; });
  auto state = std::make_shared<problem>(plain(1, 2, 1, 50, 100, 24, 20, CQSA_DTYPE_F16));
  run_reference(*state);
  all.push_back([state](uint64_t seed) { return by_state(*state, 60, seed); });
  selected_sizes s;
  s.queries = 2, s.context = 130, s.budget = 80, s.page_size = 16;
  selected_problem lists = make_selected(s, 4);
  lists.cells[7] = lists.cells[6], lists.cells[90] = -1;
  all.push_back(selected(std::move(lists), CQSA_PRECISION_SPLIT));
  return all;
}

std::string first_mistake(const std::vector<check_function>& checks, uint64_t seeds) {
  for (uint64_t seed = 1; seed <= seeds; ++seed)
    for (const check_function& check : checks) {
      const std::string text = check(seed);
      if (!text.empty()) return text;
    }
  return "";
}

bool any_fails(const std::vector<check_function>& checks, uint64_t seeds) {
  return fails_apart([&] { return !first_mistake(checks, seeds).empty(); });
}

}  // namespace

TEST_CASE("simt sm70: every mutant is noticed") {
  const std::vector<check_function> checks = small_checks();
  REQUIRE(first_mistake(checks, 1) == "");
  for (int mutant = 1; mutant <= 9; ++mutant) {
    INFO("CQSA_MUTANT(" << mutant << ")");
    cqsa_simt_mutant = mutant;
    CHECK(any_fails(checks, 4));
    cqsa_simt_mutant = 0;
  }
}

TEST_CASE("simt sm70: every meeting place is needed") {
  const std::vector<check_function> checks = small_checks();
  record_sites(true);
  REQUIRE(first_mistake(checks, 1) == "");
  const std::vector<call_site> sites = recorded_sites();
  record_sites(false);
  CHECK(sites.size() > 8);
  std::string missed;
  int num_missed = 0;
  for (const call_site& site : sites) {
    leave_out(&site);
    if (!any_fails(checks, 3)) missed += " " + site.what + " at " + site.file + ":" + std::to_string(site.line), ++num_missed;
    leave_out(nullptr);
  }
  WARN(sites.size() << " meeting places, not needed:" << missed);
  CHECK(num_missed == 0);
}
