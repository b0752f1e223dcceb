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

TEST_CASE("simt sm70: what is declined, and why") {
  const problem p = plain(1, 1, 1, 4, 4, 64, 64, CQSA_DTYPE_F16);
  char reason[256] = "";
  auto probe = [&](const cqsa_attention_impl& impl, int32_t precision, auto change) {
    cqsa_attention_leaf x = volta_leaf(p, p.out, p.lse, precision);
    change(x);
    return impl.probe(&x, reason, sizeof reason) == CQSA_OK ? std::string() : std::string(reason);
  };
  auto says = [&](int32_t precision, const char* part, auto change) {
    const std::string text = probe(sm70_attention_impl, precision, change);
    INFO(text);
    CHECK(text.find(part) != std::string::npos);
  };
  CHECK(probe(sm70_attention_impl, CQSA_PRECISION_DEFAULT, [](auto&) {}) == "");
  says(CQSA_PRECISION_FAST, "no sm_70 code", [](auto& x) { x.chip.tier = 75; });
  says(CQSA_PRECISION_F32, "f32 products", [](auto&) {});
  says(CQSA_PRECISION_DEFAULT, "FAST or SPLIT", [](auto& x) { x.q.dtype = CQSA_DTYPE_F32; });
  says(CQSA_PRECISION_FAST, "f16 or int8", [](auto& x) { x.q.dtype = x.k.dtype = x.v.dtype = CQSA_DTYPE_F32; });
  says(CQSA_PRECISION_FAST, "at most 256", [](auto& x) { x.head_dim = 257; });
  says(CQSA_PRECISION_FAST, "no scales", [](auto& x) { x.scale_k = CQSA_SCALE_TOKEN; });
  says(CQSA_PRECISION_SPLIT, "bf16", [](auto& x) { x.q.dtype = x.k.dtype = x.v.dtype = CQSA_DTYPE_BF16; });
  // FAST means the matrix unit: bf16 is not handed on to the portable kernel there, and everywhere else it is.
  auto bf16 = [](auto& x) { x.q.dtype = x.k.dtype = x.v.dtype = CQSA_DTYPE_BF16; };
  says(CQSA_PRECISION_FAST, "precision is FAST and q is bf16", bf16);
  CHECK(probe(cqsa::gpu::portable_attention, CQSA_PRECISION_FAST, bf16).find("precision is FAST and q is bf16") == 0);
  CHECK(probe(cqsa::gpu::portable_attention, CQSA_PRECISION_SPLIT, bf16) == "");
}

TEST_CASE("simt sm70: hidden values may be NaN, and change no bit") {
  for (const int32_t precision : {CQSA_PRECISION_FAST, CQSA_PRECISION_SPLIT}) {
    problem p = plain(1, 2, 1, 40, 90, 64, 64, CQSA_DTYPE_F16);
    p.leaf.causal = CQSA_CAUSAL_TOP_LEFT;
    cqsa::simt::device device = volta(3);
    REQUIRE(launch_volta(device, volta_leaf(p, p.out, p.lse, precision)) == CQSA_OK);
    const std::vector<char> clean = p.out.memory;
    for (const int64_t j : {20, 39, 40, 70})
      for (int64_t c = 0; c < 64; ++c) p.v.write(0, 0, j, c, c % 2 ? nan64 : inf), p.k.write(0, 0, j, c, nan64);
    REQUIRE(launch_volta(device, volta_leaf(p, p.out, p.lse, precision)) == CQSA_OK);
    const size_t row = 64 * 4;
    for (size_t h = 0; h < 2; ++h) {
      REQUIRE(std::memcmp(p.out.memory.data() + h * 40 * row, clean.data() + h * 40 * row, 20 * row) == 0);
      for (int64_t r = 20; r < 40; ++r) REQUIRE(std::isnan(p.out.read(0, int64_t(h), r, 1)));
    }
  }
}

TEST_CASE("simt sm70: the bits of a row depend neither on the tile it is in nor on the batch") {
  for (const int32_t precision : {CQSA_PRECISION_FAST, CQSA_PRECISION_SPLIT})
    for (const bool codes : {false, true}) {
      problem all = plain(2, 2, 1, 50, 110, 64, 64, CQSA_DTYPE_F16);
      if (codes) set_int8(all, 32, 5);
      all.leaf.causal = CQSA_CAUSAL_TOP_LEFT;
      cqsa::simt::device device = volta(1);
      REQUIRE(launch_volta(device, volta_leaf(all, all.out, all.lse, precision)) == CQSA_OK);
      const tensor whole = std::move(all.out);
      for (const int64_t row : {0, 13, 31, 32, 49}) {
        all.out = tensor(CQSA_DTYPE_F32, {2, 2, 50, 64});
        cqsa_attention_leaf leaf = volta_leaf(all, all.out, all.lse, precision);
        const cqsa_rect rect{row, 0, 1, 110, row, 0, 0};
        leaf.rects = &rect, leaf.num_rects = 1, leaf.batch = 1;
        REQUIRE(launch_volta(device, leaf) == CQSA_OK);
        for (int64_t h = 0; h < 2; ++h) REQUIRE(std::memcmp(all.out.at(0, h, row, 0), whole.at(0, h, row, 0), 64 * 4) == 0);
      }
    }
}

TEST_CASE("simt sm70: state in and out") {
  for (const int32_t precision : {CQSA_PRECISION_FAST, CQSA_PRECISION_SPLIT})
    for (const int64_t step : {32, 45, 1000}) {
      INFO("precision " << precision << " step " << step);
      problem p = plain(2, 6, 2, 21, 130, 24, 20, CQSA_DTYPE_F16);
      p.leaf.causal = CQSA_CAUSAL_BOTTOM_RIGHT;
      p.sinks = tensor(CQSA_DTYPE_F32, {1, 6, 1, 1});
      p.sinks.fill([](int64_t, int64_t h, int64_t, int64_t) { return double(h) - 3; });
      run_reference(p);
      cqsa::simt::device d = volta(uint64_t(step));
      cqsa_attention_leaf leaf = volta_leaf(p, p.out, p.lse, precision);
      const int64_t rows = leaf.seqlen_q + 3, n = leaf.batch * leaf.num_heads * rows;
      std::vector<float> acc(size_t(n * leaf.head_dim_v), NAN), m(size_t(n), NAN), l(size_t(n), NAN);
      leaf.state_acc = acc.data(), leaf.state_m = m.data(), leaf.state_l = l.data(), leaf.state_rows = rows;
      auto part = [&](int64_t k, int64_t keys, uint32_t flags) {
        const cqsa_rect rect{0, k, leaf.seqlen_q, keys, 0, k, 2};
        leaf.rects = &rect, leaf.num_rects = 1, leaf.flags = flags;
        REQUIRE(launch_volta(d, leaf) == CQSA_OK);
      };
      for (int64_t k = 0; k < 130; k += step) part(k, std::min<int64_t>(step, 130 - k), (k ? CQSA_LEAF_STATE_IN : 0) | CQSA_LEAF_STATE_OUT);
      part(0, 0, CQSA_LEAF_STATE_IN);
      REQUIRE(differs(p.out, p.exact_out, tolerance_of(p, precision)) == "");
      REQUIRE(differs(p.lse, p.exact_lse, 2e-5) == "");
      for (int64_t i = 0; i < n; ++i)
        if (i % rows < 2 || i % rows == rows - 1) REQUIRE((std::isnan(m[size_t(i)]) && std::isnan(acc[size_t(i * leaf.head_dim_v)])));
      if (step != 32) continue;
      // At a multiple of the tile a state goes out and comes back without a trace.
      const std::vector<char> in_parts = p.out.memory;
      REQUIRE(launch_volta(d, volta_leaf(p, p.out, p.lse, precision)) == CQSA_OK);
      REQUIRE(p.out.memory == in_parts);
    }
}

TEST_CASE("simt sm70: rows of q that hold NaN or Inf spoil themselves alone") {
  for (const cqsa_dtype type : {CQSA_DTYPE_F16, CQSA_DTYPE_F32}) {
    problem p = plain(1, 1, 1, 20, 50, 64, 64, type);
    set_int8(p, 64, 8);
    p.q.write(0, 0, 3, 5, nan64), p.q.write(0, 0, 11, 60, inf);
    run_reference(p);
    for (const int32_t precision : {CQSA_PRECISION_FAST, CQSA_PRECISION_SPLIT}) {
      cqsa::simt::device device = volta(1);
      REQUIRE(launch_volta(device, volta_leaf(p, p.out, p.lse, precision)) == CQSA_OK);
      for (int64_t r = 0; r < 20; ++r) {
        if (r == 11) continue;
        const double got = p.out.read(0, 0, r, 7), want = p.exact_out.read(0, 0, r, 7);
        REQUIRE((r == 3 ? std::isnan(got) : std::fabs(got - want) < tolerance_of(p, precision)));
      }
    }
  }
}

TEST_CASE("simt sm70: rows of f32 q of any magnitude, scales of v of any") {
  problem p = plain(1, 1, 1, 20, 50, 64, 64, CQSA_DTYPE_F32);
  set_int8(p, 64, 8);
  for (int64_t r = 0; r < 20; ++r)
    for (int64_t c = 0; c < 64; ++c) p.q.write(0, 0, r, c, std::ldexp(p.q.read(0, 0, r, c), r % 2 ? -60 : 3));
  p.v_scale.fill([](int64_t, int64_t, int64_t r, int64_t) { return r % 3 ? 6e-6 : 300.0; });
  run_reference(p);
  const std::string text = volta_mistake(p, CQSA_PRECISION_SPLIT, 1);
  if (!text.empty()) FAIL(text);
}
