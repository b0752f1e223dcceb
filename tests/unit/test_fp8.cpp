// SPDX-License-Identifier: Apache-2.0
// FP8 on the CPU backend through the public API, against an oracle that is a loop over the elements: bit for bit, and beside the
// outputs nothing.
#include "fp8_problem.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

using namespace fp8_test;

namespace {

cqsa_context* cpu_context(int threads = 2) {
  static cqsa_context* made[3] = {};
  if (made[threads]) return made[threads];
  cqsa_context_params params = CQSA_CONTEXT_PARAMS_INIT;
  params.backend = "cpu", params.num_threads = threads;
  REQUIRE(cqsa_context_create(&params, &made[threads]) == CQSA_OK);
  return made[threads];
}

void must(cqsa_status status) {
  INFO(cqsa_last_error());
  REQUIRE(status == CQSA_OK);
}

std::vector<int64_t> counters_of(const problem& p) {
  std::vector<int64_t> out;
  for (int64_t n = 0; p.counters.there() && n < 4; ++n) out.push_back(load<int64_t>(p.counters.at(n)));
  return out;
}

struct aligned_memory {
  std::vector<char> bytes;
  explicit aligned_memory(uint64_t size, int fill = 0) : bytes(size + 64, static_cast<char>(fill)) {}
  char* data() { return bytes.data() + (64 - reinterpret_cast<uintptr_t>(bytes.data()) % 64) % 64; }
};

// A ring in memory of its own, and what it has to hold.
struct own_ring {
  cqsa_fp8_ring args = CQSA_FP8_RING_INIT;
  aligned_memory memory{0};
  ring_model model;

  own_ring(cqsa_dtype format, int32_t length, int32_t margin, bool pow2, bool recent, float amax)
      : model({format, margin, pow2, 0, 0}, length, recent, amax) {
    args.flags = pow2 ? CQSA_FP8_POW2 : 0, args.hist_len = length, args.format = format, args.margin = margin;
    args.algorithm = recent ? CQSA_FP8_RING_MOST_RECENT : CQSA_FP8_RING_MAX;
    must(cqsa_fp8_ring_bytes(&args, &args.bytes));
    memory = aligned_memory(args.bytes, 0xFF);
    args.state = memory.data();
    must(cqsa_fp8_ring_init(cpu_context(), &args, amax, nullptr));
  }
  own_ring(const own_ring&) = delete;

  std::string compare() {
    cqsa_fp8_ring_info info = CQSA_FP8_RING_INFO_INIT;
    std::vector<float> history(model.history.size(), -1.0f);
    must(cqsa_fp8_ring_read(cpu_context(), &args, &info, history.data(), nullptr));
    differences wrong;
    if (info.index != model.index) wrong.say("index ", info.index, " wanted ", model.index);
    if (info.refused != model.refused) wrong.say("refused ", info.refused, " wanted ", model.refused);
    if (!same(info.staged, model.staged)) wrong.say("staged ", info.staged, " wanted ", model.staged);
    if (!same(info.scale, model.now.scale)) wrong.say("scale ", info.scale, " wanted ", model.now.scale);
    if (!same(info.scale_inv, model.now.scale_inv)) wrong.say("scale_inv ", info.scale_inv, " wanted ", model.now.scale_inv);
    if (history != model.history) wrong.say("another history");
    return wrong.text.str();
  }
};

std::string run_and_compare(problem& p, const scales& ring_now = {1, 1}, int threads = 2) {
  const std::vector<int64_t> before = counters_of(p);
  const cqsa_status status = cqsa_fp8_quantize(cpu_context(threads), &p.bound(), nullptr);
  if (status != CQSA_OK) return std::string("refused: ") + cqsa_last_error();
  return compare(p, ring_now, before);
}

float amax_of(const problem& p) {
  float amax = 0;
  for (int64_t i = 0; i < p.bottom(); ++i)
    for (int64_t j = 0; j < p.cols; ++j) join(amax, p.element(i, j), p.nan_policy);
  return amax;
}

// A plain problem of one format for the cases that are stated.
problem plain(int64_t rows, int64_t cols, cqsa_dtype format = CQSA_DTYPE_E4M3FN, cqsa_dtype type = CQSA_DTYPE_F32) {
  dice d(static_cast<uint64_t>(rows * 1000 + cols));
  problem p;
  p.rows = rows, p.cols = cols;
  p.x = box(type, {rows, cols}, d, how::compact);
  for (int64_t n = 0; n < rows * cols; ++n) p.x.set(n, draw_value(d, 0, 1));
  p.row.wanted = true;
  p.row.out = box(format, {rows, cols}, d, how::compact);
  p.row.scale = box(CQSA_DTYPE_F32, {}, d), p.row.scale_inv = box(CQSA_DTYPE_F32, {}, d), p.amax = box(CQSA_DTYPE_F32, {}, d);
  for (box* b : p.boxes()) b->freeze();
  return p;
}

}  // namespace

TEST_CASE("fp8 oracle: known answers", "[fp8]") {
  uint32_t words[4];
  philox(0, 0, words);  // Random123's kat_vectors
  CHECK((words[0] == 0x6627e8d5 && words[1] == 0xe169c58d && words[2] == 0xbc57ac4c && words[3] == 0x9b00dbd8));
  bool too_large = false;
  CHECK(round_at_random(1.03125f, CQSA_DTYPE_E4M3FN, 0xBFFFFFFF, too_large) == 1.0);
  CHECK(round_at_random(1.03125f, CQSA_DTYPE_E4M3FN, 0xC0000000, too_large) == 1.125);
  CHECK((round_at_random(-460.0f, CQSA_DTYPE_E4M3FN, 0xFFFFFFFF, too_large) == -480.0 && too_large));
  CHECK((round_at_random(-460.0f, CQSA_DTYPE_E4M3FN, 0, too_large) == -448.0 && !too_large));
  CHECK(scale_of(448, {CQSA_DTYPE_E4M3FN, 0, true, 0, 0}).scale_inv == 1);
  CHECK(scale_of(449, {CQSA_DTYPE_E4M3FN, 0, true, 0, 0}).scale_inv == 2);
}

TEST_CASE("fp8 quantize: random problems, current and static scales", "[fp8]") {
  for (uint64_t seed = 1; seed <= 2000; ++seed) {
    problem p = random_problem(seed);
    const std::string wrong = run_and_compare(p, {1, 1}, seed % 2 ? 2 : 1);
    INFO("seed " << seed << ": " << wrong);
    REQUIRE(wrong.empty());
  }
}

TEST_CASE("fp8 quantize: random rings", "[fp8]") {
  for (uint64_t seed = 1; seed <= 800; ++seed) {
    dice d(seed);
    problem p = random_problem(seed, 40, CQSA_FP8_RING);
    const cqsa_dtype format = p.row.wanted ? p.row.out.dtype : p.transposed.out.dtype;
    const bool stage = chance(d, 30);
    own_ring ring(format, static_cast<int32_t>(between(d, 1, 6)), static_cast<int32_t>(between(d, -2, 2)), chance(d, 30), chance(d, 30),
                  chance(d, 30) ? 0.0f : 1.5f);
    if (stage) p.flags |= CQSA_FP8_RING_STAGE;
    p.ring = ring.args;
    for (int step = 0; step < 4; ++step) {
      for (box* b : p.boxes()) b->freeze();
      const std::string wrong = run_and_compare(p, ring.model.now);
      stage ? ring.model.stage(amax_of(p)) : ring.model.take(amax_of(p));
      if (stage && step % 2) ring.model.fold(), must(cqsa_fp8_ring_fold(cpu_context(), &ring.args, 1, nullptr, nullptr));
      const std::string wrong_ring = ring.compare();
      INFO("seed " << seed << " step " << step << ": " << wrong << wrong_ring);
      REQUIRE((wrong.empty() && (wrong_ring.empty() || p.up.there())));
      if (p.up.there()) break;  // an amax within a few ulp
      for (int64_t n = 0; n < p.x.count(); ++n) p.x.set(n, draw_value(d, 1, std::exp2(static_cast<double>(between(d, -3, 3)))));
    }
  }
}

// One row: as many rows as groups, and blocks of one row as of the tensor.
TEST_CASE("fp8 quantize: the scale of a group without rows", "[fp8]") {
  for (const int64_t end : {0, 1}) {
    problem p = plain(1, 40);
    dice d(2);
    p.groups = box(CQSA_DTYPE_I32, {2}, d), p.groups.set(0, 0), p.groups.set(1, static_cast<double>(end));
    p.row.scale = box(CQSA_DTYPE_F32, {1, 1}, d), p.row.scale_inv = box(CQSA_DTYPE_F32, {1, 1}, d);
    for (box* b : p.boxes()) b->freeze();
    const std::string wrong = run_and_compare(p);
    INFO(wrong);
    CHECK(wrong.empty());
    CHECK((end || (p.row.scale.f32(0) == 1 && p.row.scale_inv.f32(0) == 1)));
  }
}

#if defined(__SSE2__)
// Whatever the caller does with subnormal numbers and rounding: the same bits, and its mode is still there afterwards.
TEST_CASE("fp8 quantize: the caller's mode of floating point does not count", "[fp8]") {
  const unsigned own = _mm_getcsr();
  for (const unsigned mode : {0x8040u, 0x2000u, 0x4000u, 0xE040u})
    for (uint64_t seed = 1; seed <= 60; ++seed) {
      problem p = random_problem(seed);
      for (int64_t n = 0; n < p.x.count() && seed % 2; ++n) p.x.set(n, p.x.get(n) * 1e-38);
      p.x.freeze();
      const std::vector<int64_t> before = counters_of(p);
      const cqsa_fp8_quantize_args& args = p.bound();
      _mm_setcsr(own | mode);
      const cqsa_status status = cqsa_fp8_quantize(cpu_context(seed % 3 ? 1 : 2), &args, nullptr);
      const unsigned after = _mm_getcsr();
      _mm_setcsr(own);
      must(status);
      const std::string wrong = compare(p, {1, 1}, before);
      INFO("mode " << mode << " seed " << seed << ": " << wrong);
      REQUIRE(wrong.empty());
      REQUIRE(((after ^ own) & ~0x3Fu) == mode);
    }
}
#endif

TEST_CASE("fp8 quantize: many at once, as one by one", "[fp8]") {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    std::vector<problem> all;
    std::vector<const cqsa_fp8_quantize_args*> list;
    std::vector<std::vector<int64_t>> before;
    const auto count = static_cast<size_t>(seed % 13);
    for (size_t n = 0; n < count; ++n) all.push_back(random_problem(seed * 1000 + n));
    for (problem& p : all) list.push_back(&p.bound()), before.push_back(counters_of(p));
    must(cqsa_fp8_quantize_many(cpu_context(), list.data(), static_cast<int64_t>(count), nullptr));
    for (size_t n = 0; n < count; ++n) {
      const std::string wrong = compare(all[n], {1, 1}, before[n]);
      INFO("seed " << seed << " entry " << n << ": " << wrong);
      REQUIRE(wrong.empty());
    }
  }
}

TEST_CASE("fp8 quantize: large enough for several threads", "[fp8]") {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    problem p = random_problem(seed + 5000, 700);
    const std::string wrong = run_and_compare(p);
    INFO("seed " << seed << ": " << wrong);
    REQUIRE(wrong.empty());
  }
}

TEST_CASE("fp8 quantize: every f16 and bf16 number, every format", "[fp8]") {
  for (const cqsa_dtype type : {CQSA_DTYPE_F16, CQSA_DTYPE_BF16})
    for (const cqsa_dtype format : formats)
      for (const uint32_t flags : {0u, static_cast<uint32_t>(CQSA_FP8_NO_SATURATE)}) {
        problem p = plain(256, 256, format, type);
        for (int64_t n = 0; n < 65536; ++n) {
          const auto bits = static_cast<uint16_t>(n);
          std::memcpy(p.x.at(n), &bits, 2);
        }
        dice d(1);
        p.flags = flags, p.source = CQSA_FP8_STATIC;
        p.row.scale_in = box(CQSA_DTYPE_F32, {}, d), p.row.scale_in.set(0, type == CQSA_DTYPE_F16 ? 1.0 : 0.375);
        for (box* b : p.boxes()) b->freeze();
        const std::string wrong = run_and_compare(p);
        INFO(wrong);
        REQUIRE(wrong.empty());
      }
}

TEST_CASE("fp8 quantize: a step that is skipped leaves everything as it is", "[fp8]") {
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    problem p = random_problem(seed, 40, CQSA_FP8_RING);
    dice d(seed);
    own_ring ring(p.row.wanted ? p.row.out.dtype : p.transposed.out.dtype, 3, 0, false, false, 2.0f);
    p.ring = ring.args;
    p.skip = box(CQSA_DTYPE_I32, {1}, d), p.skip.set(0, seed % 2 ? 1 : -5), p.skip.freeze();
    must(cqsa_fp8_quantize(cpu_context(), &p.bound(), nullptr));
    for (box* b : p.boxes()) CHECK(b->unchanged());
    CHECK(ring.compare().empty());
  }
}

TEST_CASE("fp8 ring: an outlier in the last rows of a tall tensor", "[fp8]") {
  problem p = plain(8192, 256, CQSA_DTYPE_E4M3FN, CQSA_DTYPE_BF16);
  p.source = CQSA_FP8_RING;
  p.x.set(8191 * 256 + 200, 1000), p.x.freeze();
  own_ring ring(CQSA_DTYPE_E4M3FN, 16, 0, false, false, 1.0f);
  p.ring = ring.args;
  must(cqsa_fp8_quantize(cpu_context(), &p.bound(), nullptr));
  ring.model.take(1000);
  CHECK(ring.compare().empty());
  CHECK(p.amax.f32(0) == 1000);
}

TEST_CASE("fp8 ring: amaxes that are not finite, zeros, bulk fold, staging, save and restore", "[fp8]") {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const bool recent : {false, true}) {
    std::vector<std::unique_ptr<own_ring>> rings;
    for (int n = 0; n < 5; ++n) rings.push_back(std::make_unique<own_ring>(formats[n % 4], 1 + n * 255, n - 2, n % 2 == 1, recent, n == 2 ? 0.0f : 3.0f));
    std::vector<cqsa_fp8_ring> args;
    for (auto& r : rings) args.push_back(r->args);
    dice d(7);
    box amaxes(CQSA_DTYPE_F32, {5}, d);
    for (const float amax : {1.0f, 0.0f, inf, 2.5f, nan, 0.0f, 1e-41f, 3e38f, 0.5f}) {
      for (int64_t n = 0; n < 5; ++n) amaxes.set(n, static_cast<double>(amax) * (n == 3 ? 0.5 : 1)), rings[static_cast<size_t>(n)]->model.take(amaxes.f32(n));
      must(cqsa_fp8_ring_fold(cpu_context(), args.data(), 5, amaxes.tensor(), nullptr));
      for (auto& r : rings) {
        const std::string wrong = r->compare();
        INFO("amax " << amax << ": " << wrong);
        REQUIRE(wrong.empty());
      }
    }
    own_ring& one = *rings[1];
    const std::vector<char> saved(one.memory.data(), one.memory.data() + one.args.bytes);
    const ring_model model = one.model;
    must(cqsa_fp8_ring_fold(cpu_context(), args.data(), 5, amaxes.tensor(), nullptr));
    std::memcpy(one.memory.data(), saved.data(), saved.size());
    one.model = model;
    CHECK(one.compare().empty());
  }
}

// Where the quotient of two formats would take a scale, or its reciprocal, out of f32.
TEST_CASE("fp8 ring: scales of both formats stay in range", "[fp8]") {
  const auto check = [](cqsa_dtype own, cqsa_dtype other, int32_t margin, float amax, float wanted) {
    problem p = plain(5, 7, own);
    dice d(9);
    p.transposed.wanted = true, p.transposed.out = box(other, {7, 5}, d), p.transposed.scale = box(CQSA_DTYPE_F32, {}, d);
    p.transposed.scale_inv = box(CQSA_DTYPE_F32, {}, d), p.source = CQSA_FP8_RING, p.x.set(3, 0);
    for (box* b : p.boxes()) b->freeze();
    own_ring ring(own, 2, margin, false, false, amax);
    p.ring = ring.args;
    const std::string wrong = run_and_compare(p, ring.model.now);
    INFO(wrong);
    CHECK(wrong.empty());
    CHECK(p.transposed.scale.f32(0) == wanted);
    CHECK((p.transposed.scale_inv.f32(0) > 0 && std::isfinite(p.transposed.scale_inv.f32(0))));
    CHECK(p.transposed.out.byte(3 * 5) == 0);
  };
  check(CQSA_DTYPE_E4M3FN, CQSA_DTYPE_E5M2, 0, 1e-40f, std::numeric_limits<float>::max());
  check(CQSA_DTYPE_E5M2, CQSA_DTYPE_E4M3FN, 64, 3e38f, 0x1p-126f);
}

TEST_CASE("fp8 scales: a margin counts where the quotient without it overflows", "[fp8]") {
  problem p = plain(4, 4);
  for (int64_t n = 0; n < 16; ++n) p.x.set(n, 1e-36);
  p.x.freeze(), p.margin = 4;
  const std::string wrong = run_and_compare(p);
  INFO(wrong);
  CHECK(wrong.empty());
  CHECK(p.row.scale.f32(0) == 28.0f / 1e-36f);
}

TEST_CASE("fp8 ring: what a restored ring may hold, and what it takes in", "[fp8]") {
  own_ring ring(CQSA_DTYPE_E4M3FN, 4, 0, false, false, 1.0f);
  problem p = plain(6, 6);
  p.source = CQSA_FP8_RING, p.ring = ring.args;
  const auto put = [&](int64_t at, float x) { std::memcpy(ring.memory.data() + at, &x, sizeof x); };
  const float inf = std::numeric_limits<float>::infinity();
  for (const float bad : {0.0f, -1.0f, inf, std::nanf(""), 1e-40f}) {
    put(40, bad);  // scale
    for (box* b : p.boxes()) b->freeze();
    CHECK(cqsa_fp8_quantize(cpu_context(), &p.bound(), nullptr) == CQSA_ERROR_INVALID_ARGUMENT);
    CHECK(std::string(cqsa_last_error()).find("args->ring->state is a ring whose scale is ") == 0);
    for (box* b : p.boxes()) CHECK(b->unchanged());
    CHECK(cqsa_fp8_ring_fold(cpu_context(), &ring.args, 1, nullptr, nullptr) == CQSA_ERROR_INVALID_ARGUMENT);
  }
  put(40, 448.0f);
  put(64 + 4, inf), put(64 + 8, std::nanf("")), put(64 + 12, -5.0f);  // of the history
  dice d(1);
  box amax(CQSA_DTYPE_F32, {1}, d);
  const auto fold = [&](float x) {
    amax.set(0, x);
    must(cqsa_fp8_ring_fold(cpu_context(), &ring.args, 1, amax.tensor(), nullptr));
    cqsa_fp8_ring_info info = CQSA_FP8_RING_INFO_INIT;
    must(cqsa_fp8_ring_read(cpu_context(), &ring.args, &info, nullptr, nullptr));
    return info;
  };
  cqsa_fp8_ring_info info = fold(2.0f);
  CHECK((info.index == 1 && info.refused == 0 && info.scale == 224.0f));
  info = fold(-3.0f);
  CHECK((info.index == 1 && info.refused == 1 && info.scale == 224.0f));
}

TEST_CASE("fp8 ring: staged amaxes are read and folded once", "[fp8]") {
  own_ring a(CQSA_DTYPE_E4M3FN, 4, 0, false, false, 1.0f), b(CQSA_DTYPE_E4M3FN, 4, 0, false, false, 1.0f);
  const cqsa_fp8_ring both[] = {a.args, b.args};
  problem p = plain(6, 6);
  p.source = CQSA_FP8_RING, p.flags = CQSA_FP8_RING_STAGE, p.ring = a.args;
  for (const double top : {7.0, 9.0, 3.0}) {
    p.x.set(0, top);
    must(cqsa_fp8_quantize(cpu_context(), &p.bound(), nullptr));
    a.model.stage(static_cast<float>(top));
    CHECK(a.compare().empty());
  }
  dice d(3);
  box staged(CQSA_DTYPE_F32, {2}, d);
  must(cqsa_fp8_ring_staged(cpu_context(), both, 2, staged.tensor(), nullptr));
  CHECK((staged.f32(0) == 9 && staged.f32(1) == 0));
  must(cqsa_fp8_ring_fold(cpu_context(), both, 2, nullptr, nullptr));
  a.model.fold();
  CHECK((a.compare().empty() && b.compare().empty()));
  must(cqsa_fp8_ring_fold(cpu_context(), both, 2, nullptr, nullptr));
  CHECK((a.compare().empty() && b.compare().empty()));
  staged.set(0, 5), staged.set(1, 6);  // with amaxes from elsewhere what is staged is dropped
  must(cqsa_fp8_quantize(cpu_context(), &p.bound(), nullptr));
  must(cqsa_fp8_ring_fold(cpu_context(), both, 2, staged.tensor(), nullptr));
  a.model.take(5), b.model.take(6);
  CHECK((a.compare().empty() && b.compare().empty()));
}

// ---- amax and scales --------------------------------------------------------------------------------------------------------

TEST_CASE("fp8 amax: of blocks of any kind", "[fp8]") {
  for (uint64_t seed = 1; seed <= 600; ++seed) {
    dice d(seed);
    problem p = random_problem(seed + 90000);
    if (is_format(p.x.dtype) || p.up.there()) continue;
    p.groups = box();
    side_problem s;
    draw_block(d, p, s.block);
    const grid wanted = amaxes(p, s);
    box out = draw_grid(d, CQSA_DTYPE_F32, wanted.rows, wanted.cols);
    must(cqsa_fp8_amax(cpu_context(), p.x.tensor(), s.block, p.nan_policy, out.tensor(), nullptr, 0, nullptr));
    INFO("seed " << seed);
    int64_t differ = 0;
    for (int64_t n = 0; n < out.count(); ++n) differ += !same(out.f32(n), wanted.amax[static_cast<size_t>(n)]);
    REQUIRE(differ == 0);
    REQUIRE(out.padding_is_whole());
    REQUIRE(p.x.unchanged());
  }
}

TEST_CASE("fp8 scales: from amaxes, into every layout", "[fp8]") {
  for (uint64_t seed = 1; seed <= 600; ++seed) {
    dice d(seed);
    problem p;  // so many blocks of one row and column each
    p.rows = between(d, 0, 140), p.cols = between(d, 0, 9);
    draw_numbers(d, p);
    side_problem s;
    s.wanted = true, s.block[0] = s.block[1] = 1;
    s.out = box(formats[between(d, 0, 3)], {}, d);
    box amax = draw_grid(d, CQSA_DTYPE_F32, p.rows, p.cols);
    for (int64_t n = 0; n < amax.count(); ++n) amax.set(n, std::fabs(draw_value(d, 10, std::exp2(static_cast<double>(between(d, -100, 100))))));
    if (chance(d, 60)) s.scale = draw_grid(d, CQSA_DTYPE_F32, p.rows, p.cols);
    draw_scale_inv(d, p, s);
    amax.freeze();
    cqsa_fp8_scale_args args = CQSA_FP8_SCALE_ARGS_INIT;
    args.flags = p.flags & CQSA_FP8_POW2, args.amax = amax.tensor(), args.scale = s.scale.tensor(), args.scale_inv = s.scale_inv.tensor();
    args.format = s.out.dtype, args.scale_layout = s.layout, args.margin = p.margin, args.eps = p.eps, args.amax_limit = p.limit;
    must(cqsa_fp8_scale_from_amax(cpu_context(), &args, nullptr));
    p.row = s;
    expectation e{p};
    grid g{p.rows, p.cols, {}};
    for (int64_t n = 0; n < amax.count(); ++n) g.amax.push_back(amax.f32(n));
    e.check_scales(p.row, g);
    INFO("seed " << seed << ": " << e.wrong.text.str());
    REQUIRE(e.wrong.count == 0);
    REQUIRE((amax.unchanged() && (!s.scale.there() || s.scale.padding_is_whole()) && s.scale_inv.padding_is_whole()));
  }
}

TEST_CASE("fp8 scales: from layout to layout", "[fp8]") {
  const auto draw = [](dice& d, int layout, bool bytes, int64_t r, int64_t c) {
    if (layout == CQSA_FP8_SCALES_PACKED) return box(CQSA_DTYPE_I32, {r, (c + 3) / 4}, d);
    if (layout == CQSA_FP8_SCALES_TILED) return box(CQSA_DTYPE_U8, {(r + 127) / 128 * ((c + 3) / 4) * 512}, d, how::compact);
    return box(bytes ? CQSA_DTYPE_E8M0FNU : CQSA_DTYPE_F32, {r, c}, d);
  };
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    dice d(seed);
    const int64_t r = between(d, 0, 300), c = between(d, 0, 9);
    const int middle = static_cast<int>(between(d, 0, 2)), last = static_cast<int>(between(d, 0, 2));
    box from = draw(d, 0, false, r, c), between_them = draw(d, middle, true, r, c), to = draw(d, last, true, r, c), back = draw(d, 0, false, r, c);
    for (int64_t n = 0; n < from.count(); ++n) from.set(n, std::exp2(static_cast<double>(between(d, -140, 126))) * (chance(d, 50) ? 1 : 1.3));
    const auto move = [&](box& a, int la, box& b, int lb) { must(cqsa_fp8_scale_relayout(cpu_context(), a.tensor(), la, b.tensor(), lb, r, c, nullptr)); };
    move(from, 0, between_them, middle), move(between_them, middle, to, last), move(to, last, back, 0);
    int64_t differ = 0;
    for (int64_t n = 0; n < from.count(); ++n) differ += back.f32(n) != cqsa::e8m0fnu_to_f32(cqsa::f32_to_e8m0fnu(from.f32(n)));
    REQUIRE(differ == 0);
    problem p;
    p.rows = r, p.cols = c;
    p.row.layout = last, p.row.scale_inv = to;
    expectation e{p};
    e.check_filling(p.row, {r, c, {}});
    REQUIRE((e.wrong.count == 0 && to.padding_is_whole() && back.padding_is_whole()));
  }
}

// ---- back to numbers --------------------------------------------------------------------------------------------------------

TEST_CASE("fp8 dequantize: what was quantized, and any codes", "[fp8]") {
  int done = 0;
  for (uint64_t seed = 1; seed <= 1500; ++seed) {
    dice d(seed);
    problem p = random_problem(seed + 70000);
    if (!p.row.wanted || !p.row.scale_inv.there() || p.row.block[0] + p.row.block[1] < 0) continue;
    must(cqsa_fp8_quantize(cpu_context(), &p.bound(), nullptr));
    box out(one_of(d, {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16}), p.x.shape, d);
    for (int64_t n = 0; n < p.row.out.count(); ++n)
      if (chance(d, 10)) *p.row.out.at(n) = static_cast<char>(d());
    cqsa_fp8_dequantize_args args = CQSA_FP8_DEQUANTIZE_ARGS_INIT;
    args.codes = p.row.out.tensor(), args.scale_inv = p.row.scale_inv.tensor(), args.groups = p.groups.tensor(), args.out = out.tensor();
    std::copy_n(p.row.block, 2, args.block), args.scale_layout = p.row.layout;
    must(cqsa_fp8_dequantize(cpu_context(), &args, nullptr));
    // The scales once more as F32.
    const int64_t r = p.grid_rows(p.row), c = p.grid_cols(p.row);
    box scales(CQSA_DTYPE_F32, {r, c}, d);
    must(cqsa_fp8_scale_relayout(cpu_context(), p.row.scale_inv.tensor(), p.row.layout, scales.tensor(), 0, r, c, nullptr));
    box wanted = out;
    wanted.memory = out.before;
    for (int64_t i = 0; i < p.bottom(); ++i)
      for (int64_t j = 0; j < p.cols; ++j) {
        const float scale = scales.f32(p.block_row(p.row, i) * c + p.block_col(p.row, j));
        const volatile float product = decode_code(p.row.out.dtype, p.row.out.byte(i * p.cols + j)) * scale;
        wanted.set(i * p.cols + j, static_cast<double>(product));
      }
    INFO("seed " << seed);
    int64_t differ = 0;
    for (int64_t n = 0; n < out.count(); ++n) differ += !(std::isnan(out.get(n)) && std::isnan(wanted.get(n))) && out.get(n) != wanted.get(n);
    REQUIRE(differ == 0);
    REQUIRE(out.padding_is_whole());
    ++done;
  }
  CHECK(done > 500);
}

TEST_CASE("fp8 transpose: bytes of any strides", "[fp8]") {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    dice d(seed);
    const int64_t r = between(d, 0, 200), c = between(d, 0, 200);
    box x(one_of(d, {CQSA_DTYPE_U8, CQSA_DTYPE_E4M3FN, CQSA_DTYPE_E5M2FNUZ, CQSA_DTYPE_E8M0FNU}), {r, c}, d), out(x.dtype, {c, r}, d);
    must(cqsa_fp8_transpose(cpu_context(), x.tensor(), out.tensor(), nullptr));
    int64_t differ = 0;
    for (int64_t i = 0; i < r; ++i)
      for (int64_t j = 0; j < c; ++j) differ += out.byte(j * r + i) != x.byte(i * c + j);
    REQUIRE(differ == 0);
    REQUIRE((x.unchanged() && out.padding_is_whole()));
  }
}
