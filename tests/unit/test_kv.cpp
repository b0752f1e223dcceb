// SPDX-License-Identifier: Apache-2.0
// Key-value caches of the CPU backend against the text of section 12 of cqsa.h, to the bit, on every instruction set; and closed
// forms of the oracle itself.
#include "kv_oracle.h"

#include "backends/cpu/kv_job.h"
#include "tests/random_count.h"

using namespace cqsa::cpu;

namespace {

std::vector<std::pair<const char*, const kv_target*>> targets() {
  std::vector<std::pair<const char*, const kv_target*>> all{{"baseline", &kv_baseline}};
#if defined(CQSA_CPU_X86)
  if (this_cpu().avx2) all.push_back({"avx2", &kv_avx2});
#endif
  return all;
}

// One row of one head in a cache of one page.
kv_problem one_row(cqsa_dtype x, cqsa_dtype pool, int64_t head_dim, int32_t format = CQSA_KV_FORMAT_ELEMENTS) {
  kv_problem p;
  cqsa_kv_leaf& a = p.leaf;
  a.format = format, a.rows = a.num_kv_heads = a.num_pages = a.page_size = a.pages = 1, a.head_dim = head_dim;
  a.kv_group = pool == CQSA_DTYPE_I8 ? 64 : 0;
  a.cells_dtype = CQSA_DTYPE_I32, a.cells_stride = 1;
  p.x = tensor(x, {1, 1, 1, head_dim});
  p.pool = tensor(pool, {1, 1, 1, format ? head_dim / 32 * 18 : head_dim});
  if (a.kv_group) p.scale = tensor(CQSA_DTYPE_F16, {1, 1, 1, (head_dim + 63) / 64});
  p.table = {0}, p.cells = {0};
  return p;
}

uint16_t half_at(const tensor& t, size_t i) {
  uint16_t bits;
  std::memcpy(&bits, t.memory.data() + 2 * i, 2);
  return bits;
}

}  // namespace

TEST_CASE("kv: append and gather have the bits of the text, whatever threads and instructions", "[kv]") {
  for (uint32_t seed = 1; seed <= cqsa::test::random_count(1500, 40); ++seed) {
    kv_problem p = random_kv(seed);
    const cqsa_exec execs[] = {{nullptr, run_threads, nullptr, 3}, {nullptr, run_backwards, nullptr, 5}};
    const cqsa_exec* const exec = seed % 3 ? &execs[seed % 2] : nullptr;
    for (const auto& [name, target] : targets()) {
      INFO("seed " << seed << " " << name << ": " << text_of(p));
      const std::string wrong = wrong_cache(p, seed, [&, t = target](const cqsa_kv_leaf& a) { return kv_append_on(*t, &a, exec); },
                                            [&, t = target](const cqsa_kv_leaf& a) { return kv_gather_on(*t, &a, exec); });
      REQUIRE(wrong == "");
    }
  }
}

TEST_CASE("kv: large calls use all workers, each row once", "[kv]") {
  for (uint32_t seed = 1; seed <= 12; ++seed) {
    kv_problem p = random_kv(seed, 2000);
    p.leaf.cells_stride = 1, p.leaf.page_table_stride[0] = 0, p.leaf.page_table_stride[1] = 1;
    p.leaf.pages = p.leaf.num_pages, p.leaf.cells_dtype = CQSA_DTYPE_I32;
    p.table.resize(size_t(p.leaf.pages));
    for (size_t i = 0; i < p.table.size(); ++i) p.table[i] = int32_t(i);
    p.cells.resize(size_t(p.leaf.rows) + 1), p.wide_cells.clear();
    const int64_t there = p.leaf.num_pages * p.leaf.page_size;  // more rows than cells: the others name none
    for (size_t i = 0; i < p.cells.size(); ++i) p.cells[i] = int64_t(i) < there ? int32_t(i) : -1;
    const cqsa_exec exec{nullptr, run_threads, nullptr, 4};
    INFO("seed " << seed << ": " << text_of(p));
    REQUIRE(wrong_cache(p, seed, [&](const cqsa_kv_leaf& a) { return kv_append(nullptr, &a, &exec, nullptr); },
                        [&](const cqsa_kv_leaf& a) { return kv_gather(nullptr, &a, &exec, nullptr); }) == "");
    const cqsa_exec failing{nullptr, run_fails, nullptr, 4};
    const cqsa_kv_leaf leaf = p.with();
    const bool large = leaf.rows * leaf.num_kv_heads > 32768 / (leaf.head_dim + 16);
    CHECK(kv_gather(nullptr, &leaf, &failing, nullptr) == (large ? CQSA_ERROR_CALLBACK : CQSA_OK));
  }
}

TEST_CASE("kv: int8 by hand", "[kv]") {
  kv_problem p = one_row(CQSA_DTYPE_F32, CQSA_DTYPE_I8, 130);
  p.x.fill([](int64_t, int64_t, int64_t, int64_t c) { return c < 64 ? double(c) * 2 - 1 : c < 128 ? 0.0 : c == 128 ? 2.5 : -127.0; });
  const cqsa_kv_leaf leaf = p.with();
  REQUIRE(kv_append(nullptr, &leaf, nullptr, nullptr) == CQSA_OK);
  const auto* codes = reinterpret_cast<const int8_t*>(p.pool.memory.data());
  CHECK(half_at(p.scale, 0) == cqsa::f32_to_f16(125.0f / 127.0f));
  CHECK(half_at(p.scale, 1) == 0);
  CHECK(half_at(p.scale, 2) == 0x3c00);  // a group of two
  CHECK(int(codes[63]) == 127);          // 125 / f16(125 / 127)
  CHECK(std::all_of(codes + 64, codes + 128, [](int8_t c) { return c == 0; }));
  CHECK(int(codes[128]) == 2);  // ties go to even
  CHECK(int(codes[129]) == -127);
}

TEST_CASE("kv: where a scale ends", "[kv]") {
  struct row {
    double first, second;
    uint16_t scale;
    int code_first, code_second;
  };
  const row rows[] = {
      {3e38, -1.0, 0x7bff, 127, 0},               // the scale stays finite, codes are cut
      {8.4e6, -8.4e6, 0x7bff, 127, -127},         // 66141: rounded it would be infinite
      {127 * 0x1p-26, 1e-9, 0, 0, 0},             // the scale rounds to 0
      {190.0 * 0x1p-24, -1.0, 0x2008, 0, -127},   // (an ordinary one)
      {nan64, 5.0, 0x7e00, 0, 0},
      {-inf, 5.0, 0x7e00, 0, 0},
  };
  for (const row& r : rows) {
    kv_problem p = one_row(CQSA_DTYPE_F32, CQSA_DTYPE_I8, 2);
    p.x.write(0, 0, 0, 0, r.first), p.x.write(0, 0, 0, 1, r.second);
    const cqsa_kv_leaf leaf = p.with();
    REQUIRE(kv_append(nullptr, &leaf, nullptr, nullptr) == CQSA_OK);
    INFO(r.first << ", " << r.second);
    CHECK(half_at(p.scale, 0) == r.scale);
    CHECK(int(static_cast<signed char>(p.pool.memory[0])) == r.code_first);
    CHECK(int(static_cast<signed char>(p.pool.memory[1])) == r.code_second);
    REQUIRE(kv_gather(nullptr, &leaf, nullptr, nullptr) == CQSA_OK);
    CHECK(std::isnan(p.x.read(0, 0, 0, 1)) == (r.scale == 0x7e00));
  }
}

TEST_CASE("kv: a NaN spoils its group and nothing else", "[kv]") {
  kv_problem p = one_row(CQSA_DTYPE_F32, CQSA_DTYPE_I8, 192);
  p.x.fill([](int64_t, int64_t, int64_t, int64_t c) { return c == 70 ? nan64 : 127.0 - double(c % 64); });
  const cqsa_kv_leaf leaf = p.with();
  REQUIRE(kv_append(nullptr, &leaf, nullptr, nullptr) == CQSA_OK);
  REQUIRE(kv_gather(nullptr, &leaf, nullptr, nullptr) == CQSA_OK);
  for (int64_t c = 0; c < 192; ++c) {
    const double got = p.x.read(0, 0, 0, c);
    REQUIRE((c / 64 == 1 ? std::isnan(got) : got == 127.0 - double(c % 64)));
  }
}

TEST_CASE("kv: q4_0 by hand", "[kv]") {
  // A row whose rotation is known: x = y H gives back y. Powers of two, so nothing is rounded on the way.
  kv_problem p = one_row(CQSA_DTYPE_F32, CQSA_DTYPE_U8, 64, CQSA_KV_FORMAT_Q4_0);
  std::vector<float> y(64, 0.0f);
  y[3] = 8, y[5] = -8, y[20] = 1, y[21] = 0.5f;  // the first of equals: d = -1
  y[32] = -4, y[40] = 3.75f, y[41] = 4;          // d = 0.5
  std::vector<float> x = y;
  oracle::rotate(x);
  p.x.fill([&](int64_t, int64_t, int64_t, int64_t c) { return double(x[size_t(c)]); });
  const cqsa_kv_leaf leaf = p.with();
  REQUIRE(kv_append(nullptr, &leaf, nullptr, nullptr) == CQSA_OK);
  const auto* bytes = reinterpret_cast<const unsigned char*>(p.pool.memory.data());
  CHECK(half_at(p.pool, 0) == 0xbc00);
  CHECK(int(bytes[2 + 3] & 15) == 0);        // 8 / -1 + 8
  CHECK(int(bytes[2 + 5] & 15) == 15);       // 16, of which there is none
  CHECK(int(bytes[2 + 4] >> 4) == 7);        // 1 / -1 + 8
  CHECK(int(bytes[2 + 5] >> 4) == 8);        // -0.5 + 8.5
  CHECK(int(bytes[2 + 0] & 15) == 8);
  CHECK(half_at(p.pool, 9) == 0x3800);
  CHECK(int(bytes[20 + 0] & 15) == 0);
  CHECK(int(bytes[20 + 8] & 15) == 15);      // 7.5 + 8.5
  CHECK(int(bytes[20 + 9] & 15) == 15);
  REQUIRE(kv_gather(nullptr, &leaf, nullptr, nullptr) == CQSA_OK);
  for (const auto& [c, value] : {std::pair<int64_t, double>{3, 8}, {5, -7}, {20, 1}, {21, 0}, {32, -4}, {40, 3.5}, {41, 3.5}, {63, 0}})
    CHECK(p.x.read(0, 0, 0, c) == value);
}

TEST_CASE("kv: rotations have the bits of the text", "[kv]") {
  for (uint32_t seed = 1; seed <= cqsa::test::random_count(400, 20); ++seed) {
    const cqsa_exec exec{nullptr, run_threads, nullptr, 3};
    for (const auto& [name, target] : targets()) {
      rotation_problem p = random_rotation(seed);
      INFO("seed " << seed << " " << name << " n " << p.leaf.n << " in place " << p.in_place);
      const std::string wrong = wrong_bytes(p.result(), p.with(), oracle::hadamard, [&, t = target](const cqsa_hadamard_leaf& a) {
        return hadamard_on(*t, &a, seed % 2 ? &exec : nullptr);
      });
      REQUIRE(wrong == "");
    }
  }
}

TEST_CASE("kv: the rotation is the Walsh-Hadamard matrix, and its own inverse", "[kv]") {
  for (int64_t n = 1; n <= 1024; n *= 2) {
    dice d(static_cast<uint32_t>(n));
    rotation_problem p;
    p.leaf.n = n;
    std::fill_n(p.leaf.shape, 3, 1);
    p.x = tensor(CQSA_DTYPE_F32, {1, 1, 1, n}), p.out = tensor(CQSA_DTYPE_F32, {1, 1, 1, n});
    p.x.fill([&](auto...) { return d.normal(); });
    const cqsa_hadamard_leaf there = p.with();
    REQUIRE(hadamard(nullptr, &there, nullptr, nullptr) == CQSA_OK);
    for (int64_t b = 0; b < n; ++b) {
      double want = 0;
      for (int64_t a = 0; a < n; ++a) want += (__builtin_popcountll(uint64_t(a & b)) % 2 ? -1 : 1) * p.x.read(0, 0, 0, a);
      CHECK(std::fabs(p.out.read(0, 0, 0, b) - want / std::sqrt(double(n))) < 2e-6);
    }
    cqsa_hadamard_leaf back = there;
    back.x = p.out.view.data;
    REQUIRE(hadamard(nullptr, &back, nullptr, nullptr) == CQSA_OK);
    for (int64_t b = 0; b < n; ++b) CHECK(std::fabs(p.out.read(0, 0, 0, b) - p.x.read(0, 0, 0, b)) < 4e-6);
  }
}
