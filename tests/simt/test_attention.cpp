// SPDX-License-Identifier: Apache-2.0
// The portable attention kernels and their host part, executed by the harness with 32 and with 64 lanes, against cpu_reference.
#include "simt_leaf.h"

using cqsa::simt::device;

TEST_CASE("simt attention: head dims from 1 to 576 in all types of q") {
  const std::pair<int, int> dims[] = {{1, 1}, {33, 33}, {64, 64}, {80, 80}, {128, 128}, {192, 128}, {256, 256}, {576, 512}, {65, 511}};
  const cqsa_dtype types[] = {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16};
  int n = 0;
  for (const auto& [d, dv] : dims)
    for (const cqsa_dtype type : types) {
      INFO("head_dim " << d << " head_dim_v " << dv << " type " << n % 3);
      problem p = plain(1, 2, 1, 5, 67, d, dv, type, uint32_t(++n));
      if (n % 2) p.leaf.causal = CQSA_CAUSAL_BOTTOM_RIGHT;
      check_simt(p);
    }
}

TEST_CASE("simt attention: types of k and v, and their scales") {
  int n = 0;
  for (const cqsa_dtype type : {CQSA_DTYPE_I8, CQSA_DTYPE_E4M3FN, CQSA_DTYPE_E5M2})
    for (const int32_t scale : {CQSA_SCALE_NONE, CQSA_SCALE_TENSOR, CQSA_SCALE_HEAD, CQSA_SCALE_TOKEN, CQSA_SCALE_GROUP})
      for (const auto& [d, dv] : {std::pair<int, int>{80, 80}, {128, 64}}) {
        INFO("type " << type << " scale " << scale << " head_dim " << d);
        problem p = plain(1, 4, 2, 3, 70, d, dv, CQSA_DTYPE_BF16, uint32_t(++n));
        dice random(uint32_t(n) + 50);
        p.k = tensor(type, {1, 2, 70, d}), p.v = tensor(type, {1, 2, 70, dv});
        auto draw = [&](auto...) { return type == CQSA_DTYPE_I8 ? double(random.upto(254) - 127) / (scale ? 1 : 64) : random.normal(); };
        p.k.fill(draw), p.v.fill(draw);
        p.leaf.scale_k = p.leaf.scale_v = scale, p.leaf.kv_group = 32;
        auto scales = [&](int64_t channels) {
          tensor t;
          if (scale == CQSA_SCALE_TENSOR) t = tensor(CQSA_DTYPE_F32, {1, 1, 1, 1});
          if (scale == CQSA_SCALE_HEAD) t = tensor(CQSA_DTYPE_F32, {1, 2, 1, 1});
          if (scale == CQSA_SCALE_TOKEN) t = tensor(CQSA_DTYPE_F32, {1, 2, 70, 1}, spread);
          if (scale == CQSA_SCALE_GROUP) t = tensor(CQSA_DTYPE_F16, {1, 2, 70, (channels + 31) / 32});
          t.fill([&](auto...) { return (0.5 + double(random.upto(10)) / 10) * (type == CQSA_DTYPE_I8 ? 0.01 : 1); });
          return t;
        };
        p.k_scale = scales(d), p.v_scale = scales(dv);
        check_simt(p, 2e-4);
      }
}

TEST_CASE("simt attention: causal and windows") {
  for (const int64_t left : {-1, 0, 3, 100})
    for (const int64_t right : {-1, 0, 2})
      for (const int32_t causal : {0, 1, 2}) {
        INFO("left " << left << " right " << right << " causal " << causal);
        problem p = plain(1, 1, 1, 150, 130, 16, 16);
        p.leaf.window_left = left, p.leaf.window_right = right, p.leaf.causal = causal;
        check_simt(p);
      }
}

TEST_CASE("simt attention: rows without keys, sinks") {
  problem p = plain(1, 2, 1, 9, 4, 8, 8);
  p.leaf.causal = CQSA_CAUSAL_BOTTOM_RIGHT;
  check_simt(p);
  REQUIRE(p.out.read(0, 1, 0, 0) == 0);
  REQUIRE(p.lse.read(0, 1, 0, 0) == -inf);
  p.sinks = tensor(CQSA_DTYPE_F32, {1, 2, 1, 1});
  p.sinks.fill([](int64_t, int64_t h, int64_t, int64_t) { return h ? 0.75 : -inf; });
  check_simt(p);
  REQUIRE(p.lse.read(0, 1, 0, 0) == 0.75);
  problem none = plain(2, 2, 2, 3, 0, 8, 8);
  check_simt(none);
}

TEST_CASE("simt attention: heads that share keys, few queries and many") {
  for (const auto& [heads, kv] : {std::pair<int, int>{8, 1}, {6, 2}, {16, 1}, {5, 5}, {40, 1}})
    for (const int64_t queries : {1, 2, 40}) {
      INFO(heads << " heads on " << kv << ", " << queries << " queries");
      problem p = plain(2, heads, kv, queries, 90, 64, 40, CQSA_DTYPE_F16);
      p.leaf.causal = CQSA_CAUSAL_BOTTOM_RIGHT;
      p.slopes = tensor(CQSA_DTYPE_F32, {2, heads, 1, 1});
      p.slopes.fill([](int64_t b, int64_t h, int64_t, int64_t) { return double(h + b) / 16; });
      check_simt(p, 4e-5);
    }
}

TEST_CASE("simt attention: softcap, bias and mask together") {
  for (const cqsa_dtype type : {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16}) {
    problem p = plain(2, 2, 1, 33, 75, 32, 32);
    dice random(9);
    p.leaf.softcap = 2;
    p.bias = tensor(type, {2, 2, 33, 75}, spread);
    p.bias.fill([&](auto...) { return random.once_in(6) ? -inf : random.normal(); });
    p.mask = tensor(CQSA_DTYPE_BOOL, {2, 2, 33, 75});
    p.mask.fill([&](auto...) { return random.once_in(3) ? 0.0 : 1.0; });
    p.mask.view.stride[1] = 0;
    check_simt(p);
  }
}

TEST_CASE("simt attention: hidden keys and values may be NaN") {
  problem p = plain(1, 2, 1, 140, 140, 16, 16);
  p.leaf.causal = CQSA_CAUSAL_TOP_LEFT;
  p.mask = tensor(CQSA_DTYPE_BOOL, {1, 1, 1, 140});
  p.mask.view.stride[1] = p.mask.view.stride[2] = 0;
  p.mask.fill([](int64_t, int64_t, int64_t, int64_t j) { return j == 5 || j == 70 ? 0.0 : 1.0; });
  for (const int64_t j : {5, 70, 139})
    for (int64_t c = 0; c < 16; ++c) {
      p.v.write(0, 0, j, c, c % 2 ? nan64 : inf);
      if (j < 139) p.k.write(0, 0, j, c, nan64);
    }
  check_simt(p);
  REQUIRE(std::isfinite(p.out.read(0, 1, 138, 1)));
  REQUIRE(std::isnan(p.out.read(0, 1, 139, 1)));
}

TEST_CASE("simt attention: strides and addresses of every kind") {
  for (int how = 0; how < num_layouts; ++how)
    for (const cqsa_dtype type : {CQSA_DTYPE_F32, CQSA_DTYPE_BF16}) {
      INFO("layout " << how);
      problem p = plain(2, 2, 2, 20, 70, 40, 36, type);
      auto again = [&](tensor& t, layout l) {
        tensor other(t.view.dtype, {t.shape[0], t.shape[1], t.shape[2], t.shape[3]}, l);
        other.fill([&](int64_t b, int64_t h, int64_t r, int64_t c) { return t.read(b, h, r, c); });
        t = std::move(other);
      };
      again(p.q, layout(how)), again(p.k, layout((how + 1) % num_layouts)), again(p.v, layout((how + 2) % num_layouts));
      p.out = tensor(type, {2, 2, 20, 36}, layout((how + 3) % num_layouts));
      p.lse = tensor(CQSA_DTYPE_F32, {2, 2, 20, 1}, layout(how));
      check_simt(p);
    }
}

TEST_CASE("simt attention: rows past the last segment are cleared when asked") {
  for (const int lanes : {32, 64}) {
    problem p = plain(1, 2, 1, 30, 40, 24, 24);
    p.leaf.batch = 2, p.leaf.seqlen_q = 15, p.leaf.seqlen_k = 25;
    p.cu_q = {0, 7, 20}, p.cu_k = {0, 25, 40};
    run_reference(p);
    device d = device_with(lanes, 1);
    cqsa_attention_leaf leaf = device_leaf(p, p.out, p.lse);
    leaf.flags = CQSA_LEAF_CLEAR_TAIL;
    for (tensor* t : {&p.out, &p.lse}) t->fill([](auto...) { return nan64; });
    REQUIRE(launch_simt(d, leaf) == CQSA_OK);
    for (int64_t r = 0; r < 30; ++r)
      for (int64_t h = 0; h < 2; ++h) {
        REQUIRE(p.lse.read(0, h, r, 0) == (r < 20 ? Approx(p.exact_lse.read(0, h, r, 0)) : Approx(-inf)));
        REQUIRE(p.out.read(0, h, r, 23) == (r < 20 ? Approx(p.exact_out.read(0, h, r, 23)).margin(1e-5) : Approx(0)));
      }
  }
}

TEST_CASE("simt attention: index arrays of the device with any values stay in bounds") {
  // Nobody has looked at them. ASan or the guards see what is touched beside the operands; the result is whatever.
  for (uint32_t seed = 1; seed <= 6; ++seed) {
    dice random(seed);
    problem p = plain(1, 2, 1, 30, 48, 16, 16);
    p.leaf.batch = 3, p.leaf.seqlen_q = 15, p.leaf.seqlen_k = 25;
    auto any = [&](auto...) { return int32_t(random.pick({-1, -1000000, 0, 7, 29, 30, 31, 48, 100, INT32_MAX, INT32_MIN})); };
    for (int i = 0; i < 4; ++i) p.cu_q.push_back(any()), p.cu_k.push_back(any());
    device d = device_with(seed % 2 ? 32 : 64, seed);
    guarded out(p.out), lse(p.lse);
    cqsa_attention_leaf leaf = device_leaf(p, p.out, p.lse);
    leaf.flags = seed % 3 ? 0 : CQSA_LEAF_CLEAR_TAIL;
    REQUIRE(launch_simt(d, leaf) == CQSA_OK);
    REQUIRE((out.intact() && lse.intact()));
  }
}

TEST_CASE("simt attention: pages in any order, some of them missing") {
  for (const int64_t page : {1, 3, 16}) {
    INFO("pages of " << page);
    problem p = plain(2, 2, 1, 4, 50, 24, 24);
    dice random{uint32_t(page)};
    const int64_t each = (50 + page - 1) / page, pool = 2 * each + 1;
    p.k = tensor(CQSA_DTYPE_F32, {pool, 1, page, 24}), p.v = tensor(CQSA_DTYPE_F32, {pool, 1, page, 24}, bshd);
    auto draw = [&](auto...) { return random.normal(); };
    p.k.fill(draw), p.v.fill(draw);
    for (int64_t i = 0; i < 2 * each; ++i) p.pages.push_back(random.once_in(8) ? -1 : int32_t(random.upto(pool - 1)));
    p.leaf.page_size = page, p.leaf.page_table_stride[0] = each, p.leaf.page_table_stride[1] = 1;
    p.used = {50, 37};
    check_simt(p);
  }
}

TEST_CASE("simt attention: random problems") {
  const char* repeat = std::getenv("CQSA_TEST_SEED");
  const char* count = std::getenv("CQSA_PROPERTY_COUNT");  // how many where each takes long, under a sanitizer
  const uint32_t first = repeat ? uint32_t(std::atoi(repeat)) : 1, n = repeat ? 1 : count ? 3 * uint32_t(std::atoi(count)) : 250;
  for (uint32_t seed = first; seed < first + n; ++seed) {
    INFO("CQSA_TEST_SEED=" << seed);
    problem p = random_problem(seed);
    check_simt(p, 3e-5 * (p.leaf.scale_v ? 10 : 1), seed);
  }
}

TEST_CASE("simt attention: state in and out") {
  for (const int lanes : {32, 64})
    for (const int32_t causal : {0, 2})
      for (const int64_t step : {17, 64, 1000}) {
        INFO("lanes " << lanes << " causal " << causal << " step " << step);
        problem p = plain(2, 6, 2, 21, 130, 24, 20);
        p.leaf.causal = causal;
        p.sinks = tensor(CQSA_DTYPE_F32, {1, 6, 1, 1});
        p.sinks.fill([](int64_t, int64_t h, int64_t, int64_t) { return double(h) - 3; });
        run_reference(p);
        device d = device_with(lanes, uint64_t(step));
        cqsa_attention_leaf leaf = device_leaf(p, p.out, p.lse);
        const int64_t rows = leaf.seqlen_q + 3, n = leaf.batch * leaf.num_heads * rows;
        std::vector<float> acc(size_t(n * leaf.head_dim_v), NAN), m(size_t(n), NAN), l(size_t(n), NAN);
        leaf.state_acc = acc.data(), leaf.state_m = m.data(), leaf.state_l = l.data(), leaf.state_rows = rows;
        auto part = [&](int64_t k, int64_t keys, uint32_t flags) {
          const cqsa_rect rect{0, k, leaf.seqlen_q, keys, 0, k, 2};
          leaf.rects = &rect, leaf.num_rects = 1, leaf.flags = flags;
          REQUIRE(launch_simt(d, leaf) == CQSA_OK);
        };
        for (int64_t k = 0; k < 130; k += step) part(k, std::min<int64_t>(step, 130 - k), (k ? CQSA_LEAF_STATE_IN : 0) | CQSA_LEAF_STATE_OUT);
        part(0, 0, CQSA_LEAF_STATE_IN);
        REQUIRE(differs(p.out, p.exact_out, 1e-5) == "");
        REQUIRE(differs(p.lse, p.exact_lse, 1e-5) == "");
        for (int64_t i = 0; i < n; ++i)
          if (i % rows < 2 || i % rows == rows - 1) REQUIRE((std::isnan(m[size_t(i)]) && std::isnan(acc[size_t(i * leaf.head_dim_v)])));
      }
}

TEST_CASE("simt attention: the empty state of rectangles without keys") {
  device d = device_with(64, 1);
  problem p = plain(1, 2, 1, 3, 4, 8, 8);
  cqsa_attention_leaf leaf = device_leaf(p, p.out, p.lse);
  std::vector<float> acc(2 * 3 * 8, NAN), m(6, NAN), l(6, NAN);
  leaf.state_acc = acc.data(), leaf.state_m = m.data(), leaf.state_l = l.data(), leaf.state_rows = 3;
  const cqsa_rect rect{0, 0, 3, 0, 0, 0, 0};
  leaf.rects = &rect, leaf.num_rects = 1, leaf.flags = CQSA_LEAF_STATE_OUT;
  REQUIRE(launch_simt(d, leaf) == CQSA_OK);
  for (int i = 0; i < 6; ++i) REQUIRE((m[size_t(i)] == -inf && l[size_t(i)] == 0 && acc[size_t(i * 8)] == 0));
}

TEST_CASE("simt attention: the bits are the same for every schedule and lane count") {
  problem p = plain(1, 3, 1, 40, 150, 48, 40, CQSA_DTYPE_BF16);
  p.leaf.causal = CQSA_CAUSAL_BOTTOM_RIGHT;
  device first = device_with(32, 1);
  REQUIRE(launch_simt(first, device_leaf(p, p.out, p.lse)) == CQSA_OK);
  const std::vector<char> out = p.out.memory;
  for (uint64_t seed = 2; seed < 8; ++seed) {
    device other = device_with(seed % 2 ? 32 : 64, seed);
    REQUIRE(launch_simt(other, device_leaf(p, p.out, p.lse)) == CQSA_OK);
    REQUIRE(p.out.memory == out);
  }
}

TEST_CASE("simt merge") {
  const int64_t rows = 700, n = 9;
  std::mt19937 rng(3);
  std::normal_distribution<float> normal(0, 3);
  auto draw = [&](int64_t count) {
    std::vector<float> x(static_cast<size_t>(count));
    for (float& y : x) y = normal(rng);
    return x;
  };
  std::vector<float> a = draw(rows * n), b = draw(rows * n), la = draw(rows), lb = draw(rows);
  const float empties[] = {float(-inf), float(inf), float(nan64)};
  for (size_t i = 0; i < 3; ++i) la[i] = lb[10 + i] = la[20 + i] = lb[20 + i] = empties[i];
  a[0] = b[10 * n] = float(nan64);  // under an empty side
  auto leaf = [&](std::vector<float>& o, std::vector<float>& l) {
    cqsa_merge_leaf m{};
    m.shape[0] = 1, m.shape[1] = 2, m.shape[2] = 50, m.shape[3] = 7, m.head_dim_v = n;
    m.out_a = a.data(), m.lse_a = la.data(), m.out_b = b.data(), m.lse_b = lb.data(), m.out = o.data(), m.lse = l.data();
    for (int64_t* s : {m.out_a_stride, m.out_b_stride, m.out_stride}) s[1] = 350 * n, s[2] = 7 * n, s[3] = n, s[4] = 1;
    for (int64_t* s : {m.lse_a_stride, m.lse_b_stride, m.lse_stride}) s[1] = 350, s[2] = 7, s[3] = 1;
    return m;
  };
  std::vector<float> want(size_t(rows * n)), want_lse(static_cast<size_t>(rows)), got(want.size(), NAN), got_lse(want_lse.size(), NAN);
  cqsa_merge_leaf m = leaf(want, want_lse);
  REQUIRE(cqsa_cpu_backend()->merge(nullptr, &m, nullptr, nullptr) == CQSA_OK);
  auto close = [](float x, float y) { return x == y || std::fabs(x - y) <= 1e-6f + 1e-6f * std::fabs(y); };
  for (const int lanes : {32, 64}) {
    device d = device_with(lanes, 5);
    m = leaf(got, got_lse);
    REQUIRE(cqsa::gpu::portable_merge(&d, &m, nullptr, nullptr) == CQSA_OK);
    for (size_t i = 0; i < want.size(); ++i) REQUIRE(close(got[i], want[i]));
    for (size_t i = 0; i < want_lse.size(); ++i) REQUIRE(close(got_lse[i], want_lse[i]));
  }
  device d = device_with(64, 6);
  m = leaf(a, la);  // in place
  REQUIRE(cqsa::gpu::portable_merge(&d, &m, nullptr, nullptr) == CQSA_OK);
  REQUIRE(std::memcmp(a.data(), got.data(), got.size() * 4) == 0);
}
