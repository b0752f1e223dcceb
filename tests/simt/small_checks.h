// SPDX-License-Identifier: Apache-2.0
// A few small problems that together come by all that the portable attention kernels do: for the tests that damage the kernels.
#pragma once

#include "simt_leaf.h"

#include <functional>
#include <memory>

namespace {

// "" when the kernels are right.
using check_function = std::function<std::string(int lanes, uint64_t seed)>;

check_function whole(problem p) {
  auto shared = std::make_shared<problem>(std::move(p));
  run_reference(*shared);
  return [shared](int lanes, uint64_t seed) { return mistake(*shared, lanes, seed, 2e-5); };
}

// By state: the first `cut` keys, then the others, then a rectangle without keys.
std::string by_state(problem& p, int64_t cut, int lanes, uint64_t seed) {
  cqsa::simt::device d = device_with(lanes, seed);
  cqsa_attention_leaf leaf = device_leaf(p, p.out, p.lse);
  const int64_t n = leaf.batch * leaf.num_heads * leaf.seqlen_q;
  std::vector<float> acc(size_t(n * leaf.head_dim_v), NAN), m(size_t(n), NAN), l(size_t(n), NAN);
  leaf.state_acc = acc.data(), leaf.state_m = m.data(), leaf.state_l = l.data(), leaf.state_rows = leaf.seqlen_q;
  const cqsa_rect parts[] = {{0, 0, leaf.seqlen_q, cut, 0, 0, 0}, {0, cut, leaf.seqlen_q, leaf.seqlen_k - cut, 0, cut, 0}, {0, 0, leaf.seqlen_q, 0, 0, 0, 0}};
  const uint32_t flags[] = {CQSA_LEAF_STATE_OUT, CQSA_LEAF_STATE_IN | CQSA_LEAF_STATE_OUT, CQSA_LEAF_STATE_IN};
  for (int i = 0; i < 3; ++i) {
    leaf.rects = &parts[i], leaf.num_rects = 1, leaf.flags = flags[i];
    if (launch_simt(d, leaf) != CQSA_OK) return cqsa::simt::last_error();
  }
  return differs(p.out, p.exact_out, 2e-5) + differs(p.lse, p.exact_lse, 2e-5);
}

// Small problems that together come by all that the kernels do.
std::vector<check_function> small_checks() {
  std::vector<check_function> all;
  auto add = [&](problem p, auto change) {
    change(p);
    all.push_back(whole(std::move(p)));
  };
  add(plain(1, 2, 1, 40, 150, 80, 128), [](problem& p) { p.leaf.causal = CQSA_CAUSAL_BOTTOM_RIGHT; });
  add(plain(1, 1, 1, 35, 70, 33, 33, CQSA_DTYPE_F16), [](problem& p) { p.leaf.causal = CQSA_CAUSAL_TOP_LEFT; });
  add(plain(1, 8, 1, 3, 130, 64, 64, CQSA_DTYPE_BF16), [](problem&) {});
  add(plain(1, 1, 1, 40, 140, 36, 256), [](problem&) {});
  add(plain(1, 1, 1, 20, 70, 40, 512), [](problem& p) { p.leaf.window_left = 9; });
  // NaN that some rows must not meet, in a tile behind which there is another.
  add(plain(1, 2, 2, 120, 140, 16, 16), [](problem& p) {
    p.leaf.causal = CQSA_CAUSAL_TOP_LEFT, p.leaf.softcap = 2;
    p.sinks = tensor(CQSA_DTYPE_F32, {1, 2, 1, 1});
    for (int64_t c = 0; c < 16; ++c) p.v.write(0, 0, 19, c, nan64);
  });
  // Ranges of very different lengths: what one says must not be read in the other.
  add(plain(1, 2, 1, 20, 150, 36, 24), [](problem& p) { p.rects = {{0, 0, 20, 10, 0, 0, 0}, {0, 10, 20, 140, 0, 10, 0}}; });
  auto state = std::make_shared<problem>(plain(1, 2, 1, 50, 100, 24, 20));
  run_reference(*state);
  all.push_back([state](int lanes, uint64_t seed) { return by_state(*state, 60, lanes, seed); });
  return all;
}

constexpr uint64_t seeds = 4;

// The first mistake in any of the checks, with both lane counts under some seeds.
std::string first_mistake(const std::vector<check_function>& checks) {
  for (uint64_t seed = 1; seed <= seeds; ++seed)
    for (const check_function& check : checks)
      for (const int lanes : {32, 64}) {
        const std::string text = check(lanes, seed);
        if (!text.empty()) return text;
      }
  return "";
}

}  // namespace
