// SPDX-License-Identifier: Apache-2.0
// The sm_70 attention kernels and their host part in the harness, in FAST and SPLIT, against cpu_reference.
#include "sm70_checks.h"

TEST_CASE("simt sm70: head dims, f16") {
  int n = 0;
  for (const auto& [d, dv] : {std::pair<int, int>{64, 64}, {1, 3}, {40, 64}, {80, 80}, {128, 128}, {128, 65}, {192, 128}, {256, 256}, {256, 40}}) {
    INFO("head_dim " << d << " head_dim_v " << dv);
    problem p = plain(1, 2, 1, 21, 75, d, dv, CQSA_DTYPE_F16, uint32_t(++n));
    if (n % 2) p.leaf.causal = CQSA_CAUSAL_BOTTOM_RIGHT;
    check_volta(p);
  }
}

TEST_CASE("simt sm70: int8 keys and values, f16 and f32 q") {
  int n = 0;
  for (const cqsa_dtype type : {CQSA_DTYPE_F16, CQSA_DTYPE_F32})
    for (const int64_t group : {32, 64, 128})
      for (const auto& [d, dv] : {std::pair<int, int>{256, 256}, {80, 128}, {33, 64}}) {
        INFO("type " << type << " group " << group << " head_dim " << d << " head_dim_v " << dv);
        problem p = plain(1, 4, 2, 9, 70, d, dv, type, uint32_t(++n));
        set_int8(p, group, uint32_t(n) + 50);
        check_volta(p);
      }
}

TEST_CASE("simt sm70: random problems") {
  const char* repeat = std::getenv("CQSA_TEST_SEED");
  const char* count = std::getenv("CQSA_PROPERTY_COUNT");
  const uint32_t first = repeat ? uint32_t(std::atoi(repeat)) : 1, n = repeat ? 1 : count ? 6 * uint32_t(std::atoi(count)) : 500;
  int taken = 0;
  for (uint32_t seed = first; seed < first + n; ++seed) {
    INFO("CQSA_TEST_SEED=" << seed);
    problem p = random_problem(seed);
    bool ran = false;
    for (const int32_t precision : {CQSA_PRECISION_DEFAULT, CQSA_PRECISION_SPLIT}) {
      const cqsa_attention_leaf leaf = volta_leaf(p, p.out, p.lse, precision);
      if (sm70_attention_impl.probe(&leaf, nullptr, 0) != CQSA_OK) continue;
      if (!ran) run_reference(p);
      ran = true, ++taken;
      INFO("precision " << precision);
      const std::string text = volta_mistake(p, precision, seed);
      if (!text.empty()) FAIL(text);
    }
  }
  if (!repeat) CHECK(taken > int(n) / 5);
}
