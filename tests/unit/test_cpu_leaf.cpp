// SPDX-License-Identifier: Apache-2.0
// The CPU backend behind its struct: every entry that this machine accepts against cpu_reference over a seeded sweep of
// everything that section 8 of cqsa.h allows, then the rules one by one, and the reference itself against closed forms.
#include "cpu_leaf_problem.h"
#include "tests/random_count.h"

TEST_CASE("cpu: every entry agrees with the reference on random problems", "[cpu]") {
  const char* repeat = std::getenv("CQSA_TEST_SEED");
  const uint32_t first = repeat ? uint32_t(std::atoi(repeat)) : 1;
  for (uint32_t seed = first; seed < first + (repeat ? 1 : cqsa::test::random_count(2500, 40)); ++seed) {
    INFO("CQSA_TEST_SEED=" << seed);
    problem p = random_problem(seed);
    check(p, 3e-5 * (p.leaf.scale_v ? 10 : 1));
  }
}

// Where all scores are equal every p is 1, and what rounds p has nothing to round: only the sums over values are left, so the
// bf16 entries are held to f32 here. Scales of single values go to p: powers of two.
TEST_CASE("cpu: products of bf16 are exact where p is", "[cpu]") {
  const uint32_t count = cqsa::test::random_count(2500, 40);
  uint32_t taken = 0;
  for (uint32_t seed = 1; seed < count; ++seed) {
    INFO("seed " << seed);
    problem p = random_problem(seed);
    if (p.leaf.q.dtype != CQSA_DTYPE_BF16) continue;
    p.bias = tensor(), p.slopes = tensor();
    p.q.fill([](auto...) { return 0.0; });
    dice d(seed);
    const double small = p.v.view.dtype == CQSA_DTYPE_I8 ? 1.0 / 64 : 1;
    if (p.leaf.scale_v) p.v_scale.fill([&](auto...) { return d.pick({0.25, 0.5, 1.0, 2.0}) * small; });
    run_reference(p);
    for (const cqsa_attention_impl* impl : fast_entries(p.with(p.out, p.lse))) {
      if (!rounds_p(*impl)) continue;
      ++taken;
      INFO(impl->name);
      REQUIRE(launch(*impl, p.with(p.out, p.lse)) == CQSA_OK);
      const std::string a = differs(p.out, p.exact_out, 3e-6 * std::max(1.0, largest_value(p)));
      const std::string b = differs(p.lse, p.exact_lse, 3e-6);
      if (!a.empty()) FAIL("out " << a);
      if (!b.empty()) FAIL("lse " << b);
    }
  }
  if (cqsa::cpu::this_cpu().avx512) REQUIRE(taken * 5 > count);
}

// The tolerance rule: twice the error of the naive computation that rounds p as well, and a few ulp.
TEST_CASE("cpu: products of bf16 are as good as naive ones", "[cpu]") {
  for (auto [d, dv, keys, size] : {std::tuple<int, int, int, double>{64, 64, 300, 1.0}, {128, 128, 1000, 1.0}, {40, 72, 513, 3.0}, {1, 1, 33, 1.0}})
    for (int32_t causal : {0, 2}) {
      problem p = plain(1, 2, 1, 150, keys, d, dv, CQSA_DTYPE_BF16, 3, size);
      p.leaf.causal = causal, p.leaf.tile_q = 256, p.leaf.tile_k = 128;
      run_reference(p);
      double naive2 = 0;
      const int64_t off = keys - 150;
      for (int64_t h = 0; h < 2; ++h)
        for (int64_t i = 0; i < 150; ++i) {
          const int64_t seen = causal ? std::min<int64_t>(keys, std::max<int64_t>(0, i + off + 1)) : keys;
          std::vector<double> sum(size_t(dv), 0.0);
          double total = 0, top = -inf;
          std::vector<double> s(static_cast<size_t>(seen), 0.0);
          for (int64_t j = 0; j < seen; ++j) {
            for (int64_t c = 0; c < d; ++c) s[size_t(j)] += p.q.read(0, h, i, c) * p.k.read(0, 0, j, c) * p.leaf.softmax_scale;
            top = std::max(top, s[size_t(j)]);
          }
          for (int64_t j = 0; j < seen; ++j) {
            const double w = std::exp(s[size_t(j)] - top), rounded = cqsa::bf16_to_f32(cqsa::f32_to_bf16(float(w)));
            total += w;
            for (int64_t c = 0; c < dv; ++c) sum[size_t(c)] += rounded * p.v.read(0, 0, j, c);
          }
          for (int64_t c = 0; c < dv && seen; ++c) naive2 += std::pow(sum[size_t(c)] / total - p.exact_out.read(0, h, i, c), 2);
        }
      for (const cqsa_attention_impl* impl : fast_entries(CQSA_DTYPE_BF16)) {
        REQUIRE(launch(*impl, p.with(p.out, p.lse)) == CQSA_OK);
        double got2 = 0;
        p.out.each([&](int64_t b, int64_t h, int64_t r, int64_t c) { got2 += std::pow(p.out.read(b, h, r, c) - p.exact_out.read(b, h, r, c), 2); });
        const double n = double(2 * 150 * dv);
        INFO(impl->name << " " << d << " causal " << causal << ": rms " << std::sqrt(got2 / n) << ", naive " << std::sqrt(naive2 / n));
        REQUIRE(std::sqrt(got2 / n) <= 1.3 * std::sqrt(naive2 / n) + 4e-7 * size);
      }
    }
}

TEST_CASE("cpu: the reference against closed forms", "[cpu]") {
  SECTION("equal scores give the mean of the values") {
    problem p = plain(1, 1, 1, 3, 10, 4, 5, CQSA_DTYPE_F64);
    p.q.fill([](auto...) { return 0.0; });
    run_reference(p);
    for (int64_t c = 0; c < 5; ++c) {
      double mean = 0;
      for (int64_t j = 0; j < 10; ++j) mean += p.v.read(0, 0, j, c) / 10;
      REQUIRE(p.exact_out.read(0, 0, 2, c) == Approx(mean).epsilon(1e-13));
    }
    REQUIRE(p.exact_lse.read(0, 0, 1, 0) == Approx(std::log(10.0)).epsilon(1e-14));
  }
  SECTION("one key gives its value, whatever the score") {
    problem p = plain(2, 4, 2, 3, 1, 4, 5, CQSA_DTYPE_F64);
    run_reference(p);
    for (int64_t h = 0; h < 4; ++h) REQUIRE(p.exact_out.read(1, h, 2, 3) == p.v.read(1, h / 2, 0, 3));
    double s = 0;
    for (int64_t c = 0; c < 4; ++c) s += p.q.read(1, 3, 2, c) * p.k.read(1, 1, 0, c) / 2;
    REQUIRE(p.exact_lse.read(1, 3, 2, 0) == Approx(s).epsilon(1e-13));
  }
  SECTION("one-hot queries with huge scores pick a value") {
    problem p = plain(1, 1, 1, 4, 4, 4, 3, CQSA_DTYPE_F64);
    p.q.fill([](int64_t, int64_t, int64_t r, int64_t c) { return r == c ? 1e30 : 0.0; });
    p.k.fill([](int64_t, int64_t, int64_t r, int64_t c) { return r == c ? 1.0 : 0.0; });
    run_reference(p);
    for (int64_t r = 0; r < 4; ++r) {
      REQUIRE(p.exact_out.read(0, 0, r, 1) == p.v.read(0, 0, r, 1));
      REQUIRE(p.exact_lse.read(0, 0, r, 0) == Approx(5e29));
    }
  }
  SECTION("two keys: a sigmoid") {
    problem p = plain(1, 1, 1, 1, 2, 1, 1, CQSA_DTYPE_F64);
    p.leaf.softcap = 2;
    p.sinks = tensor(CQSA_DTYPE_F32, {1, 1, 1, 1});
    p.sinks.write(0, 0, 0, 0, 0.25);
    run_reference(p);
    const double a = std::exp(2 * std::tanh(p.q.read(0, 0, 0, 0) * p.k.read(0, 0, 0, 0) / 2));
    const double b = std::exp(2 * std::tanh(p.q.read(0, 0, 0, 0) * p.k.read(0, 0, 1, 0) / 2)), sum = a + b + std::exp(0.25);
    REQUIRE(p.exact_out.read(0, 0, 0, 0) == Approx((a * p.v.read(0, 0, 0, 0) + b * p.v.read(0, 0, 1, 0)) / sum));
    REQUIRE(p.exact_lse.read(0, 0, 0, 0) == Approx(std::log(sum)));
  }
}

TEST_CASE("cpu: exp and tanh are good to 2 ulp", "[cpu]") {
  using cqsa::cpu::kernel_target;
  std::vector<const kernel_target*> targets = {&cqsa::cpu::target_baseline};
#if defined(CQSA_CPU_X86)
  for (const cqsa_attention_impl* impl : fast_entries()) {
    if (impl->name == std::string("cpu_avx2")) targets.push_back(&cqsa::cpu::target_avx2);
    if (impl->name == std::string("cpu_avx512")) targets.push_back(&cqsa::cpu::target_avx512);
  }
#endif
  std::vector<float> in;
  for (double x = -110; x < 92; x += 1.0 / 1024) in.push_back(float(x + 1e-5));
  for (float x = 1e-40f; x < 1e3f; x *= 1.01f) in.push_back(x), in.push_back(-x);
  while (in.size() % 16) in.push_back(0);
  auto ulp = [](double want) {
    int e;
    std::frexp(want, &e);
    return std::ldexp(1.0, std::max(e - 24, -149));
  };
  for (const kernel_target* t : targets) {
    std::vector<float> got(in.size());
    double worst[2] = {0, 0};
    for (int which : {0, 1}) {
      (which ? t->tanh : t->exp)(in.data(), got.data(), int64_t(in.size()));
      for (size_t i = 0; i < in.size(); ++i) {
        const double want = which ? std::tanh(double(in[i])) : std::exp(double(in[i]));
        if (want < 3.4028233e38) worst[which] = std::max(worst[which], std::fabs(got[i] - want) / ulp(want));
        else if (want > 3.41e38) REQUIRE(got[i] == float(inf));
      }
    }
    INFO("lanes " << t->lanes << " exp " << worst[0] << " tanh " << worst[1]);
    REQUIRE((worst[0] <= 2 && worst[1] <= 2));
    float special[16] = {float(-inf), float(nan64), float(inf), 0.0f, -0.0f, -1e30f, 1e30f};
    float result[16];
    t->exp(special, result, 16);
    REQUIRE(result[0] == 0.0f);
    REQUIRE(std::isnan(result[1]));
    REQUIRE(result[2] == float(inf));
    REQUIRE((result[3] == 1.0f && result[4] == 1.0f && result[5] == 0.0f && result[6] == float(inf)));
  }
}

TEST_CASE("cpu: what causality, windows and huge logits do", "[cpu]") {
  SECTION("more queries than keys, bottom right: the first rows are empty") {
    problem p = plain(1, 2, 1, 9, 4, 8, 8);
    p.leaf.causal = CQSA_CAUSAL_BOTTOM_RIGHT;
    check(p);
    for (int64_t r = 0; r < 5; ++r) {
      REQUIRE(p.out.read(0, 1, r, 0) == 0);
      REQUIRE(p.lse.read(0, 1, r, 0) == -inf);
    }
    p.sinks = tensor(CQSA_DTYPE_F32, {1, 2, 1, 1});
    p.sinks.fill([](auto...) { return 0.75; });
    check(p);
    REQUIRE(p.out.read(0, 1, 0, 0) == 0);
    REQUIRE(p.lse.read(0, 1, 0, 0) == 0.75);
  }
  SECTION("windows on either side, and none of it left") {
    for (cqsa_dtype type : {CQSA_DTYPE_F32, CQSA_DTYPE_BF16})
      for (int64_t left : {-1, 0, 3, 100})
        for (int64_t right : {-1, 0, 2})
          for (int32_t causal : {0, 1, 2}) {
            problem p = plain(1, 1, 1, 70, 50, 16, 16, type);
            p.leaf.window_left = left, p.leaf.window_right = right, p.leaf.causal = causal, p.leaf.tile_k = 16;
            check(p);
          }
  }
  SECTION("huge logits") {
    for (double size : {1e15, -1e15, 1e4}) {
      problem p = plain(1, 1, 1, 5, 40, 1, 4);
      p.q.fill([](auto...) { return 1e15; });
      p.k.fill([&](int64_t, int64_t, int64_t r, int64_t) { return size * (r == 17 ? 1.0 : r == 30 ? 0.5 : 1.5) - r; });
      check(p, 1e-4);
      problem bias = plain(1, 1, 1, 5, 40, 4, 4);
      bias.bias = tensor(CQSA_DTYPE_F32, {1, 1, 5, 40});
      bias.bias.fill([](auto...) { return double(std::numeric_limits<float>::lowest()) / 2; });
      run_reference(bias);
      check(bias, 1e30);
      REQUIRE(std::isfinite(bias.lse.read(0, 0, 0, 0)));
      REQUIRE(std::isfinite(bias.out.read(0, 0, 0, 0)));
    }
  }
}

TEST_CASE("cpu: what is hidden is not looked at", "[cpu]") {
  SECTION("hidden keys and values may be NaN, at the edge of the causal triangle too") {
    for (cqsa_dtype type : {CQSA_DTYPE_F32, CQSA_DTYPE_BF16}) {
      problem clean = plain(1, 2, 1, 70, 70, 16, 16, type), dirty = plain(1, 2, 1, 70, 70, 16, 16, type);
      for (problem* p : {&clean, &dirty}) {
        p->leaf.causal = CQSA_CAUSAL_TOP_LEFT, p->leaf.tile_k = 32;
        p->mask = tensor(CQSA_DTYPE_BOOL, {1, 1, 1, 70});
        p->mask.view.stride[1] = p->mask.view.stride[2] = 0;
        p->mask.fill([](int64_t, int64_t, int64_t, int64_t j) { return j == 5 || j == 40 ? 0.0 : 1.0; });
      }
      for (int64_t j : {5, 40, 69})
        for (int64_t c = 0; c < 16; ++c) {
          dirty.v.write(0, 0, j, c, c % 2 ? nan64 : inf);
          if (j < 69) dirty.k.write(0, 0, j, c, nan64);
        }
      check(clean), check(dirty);
      for (const cqsa_attention_impl* impl : fast_entries(type)) {
        REQUIRE(launch(*impl, clean.with(clean.out, clean.lse)) == CQSA_OK);
        REQUIRE(launch(*impl, dirty.with(dirty.out, dirty.lse)) == CQSA_OK);
        for (int64_t r = 0; r < 69; ++r)  // all but the one that sees key 69: the same bits
          REQUIRE(std::memcmp(clean.out.at(0, 1, r, 0), dirty.out.at(0, 1, r, 0), 64) == 0);
        REQUIRE(std::isnan(dirty.out.read(0, 1, 69, 1)));
      }
    }
  }
  SECTION("hidden scales may be NaN") {
    for (cqsa_dtype type : {CQSA_DTYPE_E4M3FN, CQSA_DTYPE_E5M2, CQSA_DTYPE_I8}) {
      problem clean = plain(1, 1, 1, 40, 40, 64, 64, CQSA_DTYPE_BF16), dirty = plain(1, 1, 1, 40, 40, 64, 64, CQSA_DTYPE_BF16);
      for (problem* p : {&clean, &dirty}) {
        p->leaf.causal = CQSA_CAUSAL_TOP_LEFT;
        const bool grouped = type == CQSA_DTYPE_I8;
        p->leaf.scale_k = p->leaf.scale_v = grouped ? CQSA_SCALE_GROUP : CQSA_SCALE_TOKEN, p->leaf.kv_group = grouped ? 32 : 0;
        dice d(5);
        for (tensor* x : {&p->k, &p->v}) {
          *x = tensor(type, {1, 1, 40, 64});
          x->fill([&](auto...) { return grouped ? double(d.upto(254) - 127) : d.normal(); });
        }
        for (tensor* x : {&p->k_scale, &p->v_scale}) {
          *x = grouped ? tensor(CQSA_DTYPE_F16, {1, 1, 40, 2}) : tensor(CQSA_DTYPE_F32, {1, 1, 40, 1});
          x->fill([&](auto...) { return (0.5 + double(d.upto(9)) / 10) * (grouped ? 0.01 : 1); });
        }
      }
      for (tensor* x : {&dirty.k_scale, &dirty.v_scale})
        for (int64_t c = 0; c < x->shape[3]; ++c) x->write(0, 0, 39, c, nan64);
      check(clean), check(dirty);
      for (const cqsa_attention_impl* impl : fast_entries(clean.with(clean.out, clean.lse))) {
        REQUIRE(launch(*impl, clean.with(clean.out, clean.lse)) == CQSA_OK);
        REQUIRE(launch(*impl, dirty.with(dirty.out, dirty.lse)) == CQSA_OK);
        REQUIRE(std::memcmp(clean.out.at(0, 0, 0, 0), dirty.out.at(0, 0, 0, 0), 39 * 64 * 4) == 0);
        REQUIRE(std::isnan(dirty.out.read(0, 0, 39, 1)));
      }
    }
  }
  SECTION("a logit that is really -inf hides its key") {
    problem p = plain(1, 1, 1, 4, 6, 8, 8);
    p.q.fill([](auto...) { return 1.0; });
    p.k.write(0, 0, 2, 0, -inf);
    for (int64_t c = 0; c < 8; ++c) p.v.write(0, 0, 2, c, nan64);
    check(p);
    REQUIRE(std::isfinite(p.out.read(0, 0, 0, 0)));
  }
}

TEST_CASE("cpu: shapes, offsets and types at their ends", "[cpu]") {
  SECTION("no keys, no queries, no batch") {
    problem p = plain(2, 2, 2, 3, 0, 8, 8);
    check(p);
    REQUIRE(p.lse.read(1, 1, 2, 0) == -inf);
    problem q = plain(2, 2, 2, 0, 5, 8, 8);
    for (const cqsa_attention_impl* impl : fast_entries()) REQUIRE(launch(*impl, q.with(q.out, q.lse)) == CQSA_OK);
    problem b = plain(0, 2, 2, 3, 5, 8, 8);
    for (const cqsa_attention_impl* impl : fast_entries()) REQUIRE(launch(*impl, b.with(b.out, b.lse)) == CQSA_OK);
  }
  SECTION("head dims from 1 to 576") {
    for (auto [d, dv] : {std::pair<int, int>{1, 1}, {2, 5}, {31, 33}, {64, 64}, {65, 64}, {96, 96}, {128, 128}, {192, 128},
                         {256, 256}, {576, 512}, {576, 511}}) {
      for (cqsa_dtype type : {CQSA_DTYPE_F32, CQSA_DTYPE_BF16}) {
        problem p = plain(1, 2, 1, 20, 37, d, dv, type);
        check(p);
      }
    }
  }
  SECTION("offsets beyond 32 bits") {
    problem p = plain(1, 1, 1, 2, 2, 8, 8);
    // Two keys 3 * 2^30 elements apart, in memory that is never touched in between.
    const size_t far = size_t(3) << 30;
    float* memory = static_cast<float*>(std::calloc(far + 64, 4));
    if (memory) {
      std::memcpy(memory, p.k.at(0, 0, 0, 0), 32), std::memcpy(memory + far, p.k.at(0, 0, 1, 0), 32);
      run_reference(p);
      for (const cqsa_attention_impl* impl : fast_entries()) {
        cqsa_attention_leaf leaf = p.with(p.out, p.lse);
        leaf.k.data = memory, leaf.k.stride[2] = int64_t(far);
        REQUIRE(launch(*impl, leaf) == CQSA_OK);
        REQUIRE(differs(p.out, p.exact_out, 1e-5).empty());
      }
      std::free(memory);
    }
  }
  SECTION("the output's type is its own, rounded once") {
    for (cqsa_dtype type : {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16}) {
      problem p = plain(1, 1, 1, 3, 1, 8, 40, CQSA_DTYPE_F32);
      p.out = tensor(type, {1, 1, 3, 40});
      for (const cqsa_attention_impl* impl : fast_entries()) {
        REQUIRE(launch(*impl, p.with(p.out, p.lse)) == CQSA_OK);
        p.out.each([&](int64_t b, int64_t h, int64_t r, int64_t c) {
          char want[8];
          put(want, type, get(p.v.at(0, 0, 0, c), CQSA_DTYPE_F32));
          if (std::memcmp(want, p.out.at(b, h, r, c), size_t(bytes_of(type)))) FAIL(impl->name << " rounds otherwise");
        });
      }
    }
  }
}

TEST_CASE("cpu: what probe declines", "[cpu]") {
  for (const cqsa_attention_impl* impl : fast_entries()) {
    problem p = plain(1, 1, 1, 2, 2, 4, 4, CQSA_DTYPE_F64);
    char reason[128] = "";
    const cqsa_attention_leaf leaf = p.with(p.out, p.lse);
    REQUIRE(impl->probe(&leaf, reason, sizeof reason) == CQSA_ERROR_UNSUPPORTED);
    REQUIRE(std::string(reason) == "f64 is computed by cpu_reference only");
  }
  problem p = plain(1, 1, 1, 2, 2, 4, 4);
  cqsa_attention_leaf leaf = p.with(p.out, p.lse);
  for (const cqsa_attention_impl* impl : fast_entries(CQSA_DTYPE_BF16))
    if (rounds_p(*impl)) {  // f32 and f16 are never narrowed
      char reason[128] = "";
      REQUIRE(impl->probe(&leaf, reason, sizeof reason) == CQSA_ERROR_UNSUPPORTED);
      REQUIRE(std::string(reason) == "q must be bf16: f32 and f16 are not narrowed");
      leaf.q.dtype = CQSA_DTYPE_BF16, leaf.k.dtype = CQSA_DTYPE_F16;
      REQUIRE(impl->probe(&leaf, reason, sizeof reason) == CQSA_ERROR_UNSUPPORTED);
      leaf.q.dtype = leaf.k.dtype = CQSA_DTYPE_F32;
    }
  REQUIRE(reference().probe(&leaf, nullptr, 0) == CQSA_OK);
  leaf.flags = CQSA_LEAF_STATE_IN;
  REQUIRE(reference().probe(&leaf, nullptr, 0) == CQSA_ERROR_UNSUPPORTED);
}

namespace {

// Attention through the state: windows of keys, `step` at a time, then a rectangle without keys that finishes.
void run_by_state(const cqsa_attention_impl& impl, problem& p, int64_t step, bool finish_apart) {
  cqsa_attention_leaf leaf = p.with(p.out, p.lse);
  const int64_t rows = leaf.seqlen_q + 3, n = leaf.batch * leaf.num_heads * rows;
  std::vector<float> acc(size_t(n * leaf.head_dim_v), NAN), m(size_t(n), NAN), l(size_t(n), NAN);
  leaf.state_acc = acc.data(), leaf.state_m = m.data(), leaf.state_l = l.data(), leaf.state_rows = rows;
  for (int64_t k = 0; k < leaf.seqlen_k || k == 0; k += step) {
    const int64_t keys = std::min(step, leaf.seqlen_k - k);
    const bool last = k + step >= leaf.seqlen_k && !finish_apart;
    const cqsa_rect rect{0, k, leaf.seqlen_q, keys, 0, k, 2};
    leaf.rects = &rect, leaf.num_rects = 1;
    leaf.flags = (k ? CQSA_LEAF_STATE_IN : 0) | (last ? 0 : CQSA_LEAF_STATE_OUT);
    REQUIRE(launch(impl, leaf) == CQSA_OK);
  }
  if (!finish_apart) return;
  const cqsa_rect rect{0, 0, leaf.seqlen_q, 0, 0, 0, 2};
  leaf.rects = &rect, leaf.num_rects = 1, leaf.flags = CQSA_LEAF_STATE_IN;
  REQUIRE(launch(impl, leaf) == CQSA_OK);
}
bool same_bits(const problem& p, const tensor& out, const tensor& lse) {
  return p.out.memory == out.memory && p.lse.memory == lse.memory;
}

}  // namespace

TEST_CASE("cpu: state in and out", "[cpu]") {
  for (cqsa_dtype type : {CQSA_DTYPE_F32, CQSA_DTYPE_BF16})
    for (const cqsa_attention_impl* impl : fast_entries(type))
      for (int32_t causal : {0, 2})
        for (int64_t step : {17, 32, 64, 1000}) {
          INFO(impl->name << " causal " << causal << " step " << step);
          problem p = plain(2, 6, 2, 21, 130, 24, 20, type);
          p.leaf.causal = causal, p.leaf.tile_k = 32, p.leaf.tile_q = 16;
          p.sinks = tensor(CQSA_DTYPE_F32, {1, 6, 1, 1});
          p.sinks.fill([](int64_t, int64_t h, int64_t, int64_t) { return double(h) - 3; });
          run_reference(p);
          run_by_state(*impl, p, step, false);
          REQUIRE(differs(p.out, p.exact_out, allowed_error(*impl, p, 1e-5)).empty());
          REQUIRE(differs(p.lse, p.exact_lse, 1e-5).empty());
          const std::vector<char> out = p.out.memory, lse = p.lse.memory;
          run_by_state(*impl, p, step, true);
          REQUIRE((p.out.memory == out && p.lse.memory == lse));
          if (step % 32) continue;
          REQUIRE(launch(*impl, p.with(p.out, p.lse)) == CQSA_OK);  // cut at tile borders: the bits of one call
          REQUIRE((p.out.memory == out && p.lse.memory == lse));
        }
}

TEST_CASE("cpu: bits depend on neither workers nor tiles of queries nor neighbours", "[cpu]") {
  for (const cqsa_attention_impl* impl : fast_entries(CQSA_DTYPE_BF16))
    for (int32_t causal : {0, 1, 2}) {
      INFO(impl->name << " causal " << causal);
      problem p = plain(2, 4, 2, 150, 300, 40, 24, CQSA_DTYPE_BF16);
      p.leaf.causal = causal;
      p.leaf.window_left = causal == 1 ? 90 : -1;
      cqsa_attention_leaf leaf = p.with(p.out, p.lse);
      REQUIRE(launch(*impl, leaf) == CQSA_OK);
      tensor out(CQSA_DTYPE_F32, {2, 4, 150, 24}), lse(CQSA_DTYPE_F32, {2, 4, 150, 1});
      const cqsa_exec execs[] = {{nullptr, run_threads, nullptr, 1}, {nullptr, run_threads, nullptr, 2},
                                 {nullptr, run_threads, nullptr, 5}, {nullptr, run_backwards, nullptr, 5}};
      for (const cqsa_exec& exec : execs) {
        REQUIRE(launch(*impl, p.with(out, lse), &exec) == CQSA_OK);
        REQUIRE(same_bits(p, out, lse));
      }
      for (int64_t tile_q : {1, 16, 48, 128, 256}) {
        cqsa_attention_leaf other = p.with(out, lse);
        other.tile_q = tile_q;
        std::fill(out.memory.begin(), out.memory.end(), 0);
        REQUIRE(launch(*impl, other) == CQSA_OK);
        REQUIRE(same_bits(p, out, lse));
      }
      // Some rows of one batch item alone.
      std::fill(out.memory.begin(), out.memory.end(), 0);
      cqsa_attention_leaf part = p.with(out, lse);
      part.batch = 1;
      const cqsa_rect rect{37, 0, 5, 300, 37, 0, 0};
      part.rects = &rect, part.num_rects = 1;
      REQUIRE(launch(*impl, part) == CQSA_OK);
      for (int64_t h = 0; h < 4; ++h) REQUIRE(std::memcmp(out.at(0, h, 37, 0), p.out.at(0, h, 37, 0), 5 * 24 * 4) == 0);
    }
}

TEST_CASE("cpu: progress, cancellation and failing executors", "[cpu]") {
  std::vector<const cqsa_attention_impl*> all = fast_entries(CQSA_DTYPE_BF16);
  all.push_back(&reference());
  for (const cqsa_attention_impl* impl : all) {
    INFO(impl->name);
    for (int causal : {0, 2}) {
      problem p = plain(2, 4, 2, 70, 90, 16, 16, CQSA_DTYPE_BF16);
      p.leaf.causal = causal;
      p.cu_q = {0, 30, 70}, p.cu_k = {0, 50, 90};
      cqsa_attention_leaf leaf = p.with(p.out, p.lse);
      counter count;
      cqsa_exec exec{&count, run_threads, count_poll, 3};
      REQUIRE(launch(*impl, leaf, &exec) == CQSA_OK);
      REQUIRE(count.done == impl->units(&leaf));
      REQUIRE(count.done > 0);
      counter stop;
      stop.stop_at = 2;
      exec = {&stop, run_threads, count_poll, 2};
      REQUIRE(launch(*impl, leaf, &exec) == CQSA_ERROR_CANCELLED);
      exec = {nullptr, run_fails, nullptr, 2};
      REQUIRE(launch(*impl, leaf, &exec) == CQSA_ERROR_CALLBACK);
    }
  }
}

#if defined(CQSA_TEST_AMX_MODEL)
TEST_CASE("cpu: the caller's thread is left without tile state", "[cpu]") {
  if (!cqsa::cpu::this_cpu().avx512) return;
  problem p = plain(1, 2, 2, 70, 90, 16, 16, CQSA_DTYPE_BF16);
  REQUIRE(launch(amx_model, p.with(p.out, p.lse)) == CQSA_OK);
  REQUIRE(cqsa::cpu::model_tiles_released());
  counter stop;
  stop.stop_at = 1;
  const cqsa_exec exec{&stop, run_threads, count_poll, 1};
  REQUIRE(launch(amx_model, p.with(p.out, p.lse), &exec) == CQSA_ERROR_CANCELLED);
  REQUIRE(cqsa::cpu::model_tiles_released());

  // A progress function that itself computes attention on this thread, in the middle of a unit.
  problem inner = plain(1, 1, 1, 20, 30, 16, 16, CQSA_DTYPE_BF16), outer = plain(1, 1, 1, 20, 1300, 16, 16, CQSA_DTYPE_BF16);
  outer.leaf.tile_k = 16;
  REQUIRE(launch(amx_model, outer.with(outer.out, outer.lse)) == CQSA_OK);
  const std::vector<char> alone = outer.out.memory;
  const cqsa_exec nested{&inner, run_threads, [](void* user, int64_t) {
    problem& x = *static_cast<problem*>(user);
    REQUIRE(cqsa::cpu::model_tiles_released());
    REQUIRE(launch(amx_model, x.with(x.out, x.lse)) == CQSA_OK);
    return int32_t(0);
  }, 1};
  REQUIRE(launch(amx_model, outer.with(outer.out, outer.lse), &nested) == CQSA_OK);
  REQUIRE(outer.out.memory == alone);
}
#endif

TEST_CASE("cpu: tiles and workspace", "[cpu]") {
  for (cqsa_dtype type : {CQSA_DTYPE_F32, CQSA_DTYPE_BF16})
    for (const cqsa_attention_impl* impl : fast_entries(type))
      for (int invariant : {0, 1})
        for (int64_t n : {1, 5, 100, 8192}) {
          INFO(impl->name << " " << n);
          problem p = plain(1, 2, 1, 1, 1, 64, 64, type);
          p.leaf.seqlen_q = p.leaf.seqlen_k = n;
          p.leaf.batch_invariant = invariant;
          cqsa_attention_leaf leaf = p.with(p.out, p.lse);
          cqsa_leaf_tile tiles[16];
          const int32_t count = impl->tiles(&leaf, tiles, 16);
          REQUIRE(count >= 1);
          uint64_t last = UINT64_MAX;
          for (int32_t i = 0; i < count; ++i) {
            leaf.tile_q = tiles[i].tile_q, leaf.tile_k = tiles[i].tile_k;
            const uint64_t bytes = impl->workspace(&leaf, 1);
            REQUIRE(bytes < last);
            REQUIRE(impl->workspace(&leaf, 3) == 3 * bytes);
            REQUIRE((tiles[i].efficiency > 0 && tiles[i].efficiency <= 1));
            if (invariant) REQUIRE(tiles[i].tile_k == tiles[0].tile_k);
            last = bytes;
          }
          REQUIRE(last < 100 * 1024);
          if (!invariant) REQUIRE(last < 32 * 1024);
          REQUIRE(impl->launch(nullptr, &leaf, nullptr, 0, nullptr, nullptr) == CQSA_ERROR_WORKSPACE);
        }
}

TEST_CASE("cpu: merge", "[cpu]") {
  const cqsa_backend_v1* cpu = cqsa_cpu_backend();
  const int64_t rows = 40, n = 9;
  std::mt19937 rng(3);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> a(rows * n), b(rows * n), la(rows), lb(rows), o1(rows * n), o2(rows * n), l1(rows), l2(rows);
  for (float& x : a) x = normal(rng);
  for (float& x : b) x = normal(rng);
  for (float& x : la) x = normal(rng);
  for (float& x : lb) x = normal(rng);
  const float empties[] = {float(-inf), float(inf), float(nan64)};
  for (int i = 0; i < 3; ++i) la[i] = lb[10 + i] = la[20 + i] = lb[20 + i] = empties[i];
  a[0] = float(nan64), b[10 * n] = float(nan64);  // under an empty side
  auto leaf = [&](std::vector<float>& x, std::vector<float>& lx, std::vector<float>& y, std::vector<float>& ly,
                  std::vector<float>& o, std::vector<float>& l) {
    cqsa_merge_leaf m{};
    m.shape[0] = m.shape[1] = 1, m.shape[2] = 5, m.shape[3] = 8, m.head_dim_v = n;
    m.out_a = x.data(), m.lse_a = lx.data(), m.out_b = y.data(), m.lse_b = ly.data(), m.out = o.data(), m.lse = l.data();
    for (int64_t* s : {m.out_a_stride, m.out_b_stride, m.out_stride}) s[2] = 8 * n, s[3] = n, s[4] = 1;
    for (int64_t* s : {m.lse_a_stride, m.lse_b_stride, m.lse_stride}) s[2] = 8, s[3] = 1;
    return m;
  };
  cqsa_merge_leaf m = leaf(a, la, b, lb, o1, l1);
  REQUIRE(cpu->merge(nullptr, &m, nullptr, nullptr) == CQSA_OK);
  m = leaf(b, lb, a, la, o2, l2);
  const cqsa_exec exec{nullptr, run_backwards, nullptr, 3};
  REQUIRE(cpu->merge(nullptr, &m, &exec, nullptr) == CQSA_OK);
  REQUIRE(std::memcmp(o1.data(), o2.data(), o1.size() * 4) == 0);
  REQUIRE(std::memcmp(l1.data(), l2.data(), l1.size() * 4) == 0);
  REQUIRE(std::memcmp(&o1[1 * n], &b[1 * n], n * 4) == 0);
  REQUIRE(std::memcmp(&o1[11 * n], &a[11 * n], n * 4) == 0);
  REQUIRE((l1[0] == lb[0] && l1[10] == la[10] && l1[21] == float(-inf) && o1[21 * n] == 0));
  for (int64_t r = 30; r < rows; ++r) {
    const double wa = std::exp(la[r]), wb = std::exp(lb[r]);
    REQUIRE(o1[r * n + 3] == Approx((wa * a[r * n + 3] + wb * b[r * n + 3]) / (wa + wb)).epsilon(1e-6));
    REQUIRE(l1[r] == Approx(std::log(wa + wb)).epsilon(1e-6));
  }
  m = leaf(a, la, b, lb, a, la);  // in place
  REQUIRE(cpu->merge(nullptr, &m, nullptr, nullptr) == CQSA_OK);
  REQUIRE(std::memcmp(o1.data(), a.data(), o1.size() * 4) == 0);
}

TEST_CASE("cpu: the machine", "[cpu]") {
  const cqsa_backend_v1* cpu = cqsa_cpu_backend();
  REQUIRE(cpu->struct_size == sizeof(cqsa_backend_v1));
  REQUIRE(std::string(cpu->name) == "cpu");
  cqsa_device_properties properties;
  REQUIRE(cpu->device_properties(0, &properties) == CQSA_OK);
  REQUIRE(properties.chip.compute_units >= 1);
  REQUIRE((properties.total_bytes >= properties.free_bytes && properties.free_bytes > 0));
  REQUIRE(properties.name[0] != 0);
  REQUIRE(cpu->device_properties(1, &properties) == CQSA_ERROR_NO_DEVICE);
  REQUIRE(std::string(cpu->last_error()).size() > 0);
  REQUIRE(cpu->compute_rate(0, 64, CQSA_DTYPE_F32, nullptr) > 1e8);
  REQUIRE(cpu->compute_rate(0, 576, CQSA_DTYPE_BF16, nullptr) > 1e8);
  REQUIRE(cpu->compute_rate(0, 64, CQSA_DTYPE_F64, nullptr) == 0);
}
