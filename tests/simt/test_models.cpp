// SPDX-License-Identifier: Apache-2.0
// The models of the matrix instructions: rounding as published for each chip, and the wrappers' semantics in the harness.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include "backends/cuda/sm80/mma.cuh"
#include "mma_model.h"
#include "simt_runtime.h"

#include "dtype.h"

#include <cmath>
#include <random>
#include <vector>

using namespace cqsa;
using namespace cqsa::simt;

namespace {

float dot_of(std::vector<double> a, std::vector<double> b, float c, mma_numerics how, half_kind kind = half_kind::f16) {
  uint16_t x[16], y[16];
  for (size_t i = 0; i < a.size(); ++i) {
    x[i] = kind == half_kind::f16 ? f32_to_f16(float(a[i])) : f32_to_bf16(float(a[i]));
    y[i] = kind == half_kind::f16 ? f32_to_f16(float(b[i])) : f32_to_bf16(float(b[i]));
  }
  return dot(x, y, int(a.size()), c, kind, how);
}
constexpr mma_numerics all[] = {sm70_numerics, sm75_numerics, sm80_numerics, sm90_numerics};
const double inf = INFINITY;

}  // namespace

TEST_CASE("bits below the largest addend are cut, at 2^-23, 2^-24 or 2^-25 of it") {
  const std::vector<double> a(4, 0x1p-12), ones(4, 0x1p-12), smaller(4, 0x1p-13);
  // Four times 2^-24: nothing on V100, 2^-22 where there is one more bit.
  CHECK(dot_of(a, ones, 1, sm70_numerics) == 1.0f);
  CHECK(dot_of(a, ones, 1, sm75_numerics) == 1.0f + 0x1p-22f);
  CHECK(dot_of(a, ones, 1, sm80_numerics) == 1.0f + 0x1p-22f);
  // Four times 2^-25.
  CHECK(dot_of(a, smaller, 1, sm80_numerics) == 1.0f);
  CHECK(dot_of(a, smaller, 1, sm90_numerics) == 1.0f + 0x1p-23f);
  CHECK(dot_of(a, smaller, 1, exact_numerics) == 1.0f + 0x1p-23f);
}

TEST_CASE("cut toward zero on both sides, also at the end") {
  CHECK(dot_of({0x1p-12, 0}, {1.5 * 0x1p-11, 0}, 1, sm70_numerics) == 1.0f + 0x1p-23f);
  CHECK(dot_of({-0x1p-12, 0}, {1.5 * 0x1p-11, 0}, -1, sm70_numerics) == -1.0f - 0x1p-23f);
  // 2^24 - 1 + 1.5 carries: 2^24 + 0.5, of which f32 holds 2^24.
  CHECK(dot_of({1.5, 0}, {1, 0}, 16777215.0f, sm80_numerics) == 16777216.0f);
}

TEST_CASE("no normalisation between the addends of a block, one between blocks") {
  // 1 + 2^-24 .. - 1: the small one is lost on V100 although the large ones cancel.
  CHECK(dot_of({1, -1, 0x1p-12, 0}, {1, 1, 0x1p-12, 0}, 0, sm70_numerics) == 0);
  CHECK(dot_of({1, -1, 0x1p-12, 0}, {1, 1, 0x1p-12, 0}, 0, sm75_numerics) == 0x1p-24f);
  // In the next block of four it is kept; a block of eight has them together.
  std::vector<double> a(8, 0), b(8, 1);
  a[0] = 1, a[1] = -1, a[4] = 0x1p-14, b[4] = 0x1p-13;
  CHECK(dot_of(a, b, 0, sm70_numerics) == 0x1p-27f);
  CHECK(dot_of(a, b, 0, sm80_numerics) == 0);
}

TEST_CASE("a product counts with the exponents of its factors") {
  // 1.5 * 1.5 = 2.25 counts as 2^0: the 2^-23 beside it stays.
  CHECK(dot_of({1.5, 0x1p-12}, {1.5, 0x1p-11}, -1.0f, sm70_numerics) == 1.25f + 0x1p-23f);
}

TEST_CASE("subnormals count in full, Inf and NaN as in IEEE") {
  for (const mma_numerics& how : all) {
    CHECK(dot_of({0x1p-24}, {1}, 0, how) == 0x1p-24f);
    CHECK(dot_of({0x1p-24}, {0x1p-24}, 0, how) == 0x1p-48f);
    CHECK(dot_of({0x1p-70}, {0x1p-70}, 0x1p-139f, how, half_kind::bf16) == 0x1.8p-139f);
    CHECK(dot_of({inf, 1}, {1, 1}, 1, how) == INFINITY);
    CHECK(std::isnan(dot_of({inf}, {0}, 1, how)));
    CHECK(std::isnan(dot_of({inf, -inf}, {1, 1}, 1, how)));
    CHECK(std::isnan(dot_of({1}, {1}, NAN, how)));
  }
}

TEST_CASE("sums of small integers are exact under any rounding") {
  std::mt19937 rng(3);
  for (int n = 0; n < 200; ++n) {
    std::vector<double> a(16), b(16);
    double want = int(rng() % 100);
    const float c = float(want);
    for (int i = 0; i < 16; ++i) a[size_t(i)] = int(rng() % 31) - 15, b[size_t(i)] = int(rng() % 31) - 15, want += a[size_t(i)] * b[size_t(i)];
    for (const mma_numerics& how : {sm70_numerics, sm75_numerics, sm80_numerics, sm90_numerics, exact_numerics, chain_numerics}) CHECK(dot_of(a, b, c, how) == want);
  }
}

// ---- copies in the harness

namespace {

struct copy_params {
  const uint32_t* in;
  uint32_t* out;  // 4 a thread: before the wait, after it, after a wait for all, zero-filled
};
void copy_kernel(const void* q) {
  const auto& p = *static_cast<const copy_params*>(q);
  const int t = gpu::thread_index();
  auto* shared = reinterpret_cast<uint32_t*>(gpu::shared_memory());
  uint32_t* mine = shared + 4 * t;
  mine[0] = 1;
  gpu::cp_async_4(mine, p.in + t);
  gpu::cp_async_commit();
  gpu::cp_async_4(mine + 1, p.in + t);
  gpu::cp_async_commit();
  gpu::cp_async_8(mine + 2, p.in, 4);
  gpu::cp_async_commit();
  p.out[4 * t] = mine[0];
  gpu::cp_async_wait<2>();
  p.out[4 * t + 1] = mine[0] == p.in[t] && mine[1] == 0xffffffffu;
  gpu::cp_async_wait<0>();
  p.out[4 * t + 2] = mine[1];
  p.out[4 * t + 3] = mine[2] == p.in[0] && mine[3] == 0;
}

}  // namespace

TEST_CASE("a copy is there after its wait, and NaN until then") {
  alignas(16) uint32_t in[32];
  uint32_t out[128];
  for (uint32_t i = 0; i < 32; ++i) in[i] = 100 + i;
  run_shape shape;
  shape.threads = 32, shape.shared_bytes = 512;
  const copy_params p{in, out};
  for (uint64_t seed = 1; seed < 20; ++seed) {
    CHECK(run(copy_kernel, 32, shape, &p, sizeof p, seed) == "");
    for (uint32_t t = 0; t < 32; ++t) {
      CHECK(out[4 * t] == 0xffffffffu);
      CHECK(out[4 * t + 1] == 1);
      CHECK(out[4 * t + 2] == 100 + t);
      CHECK(out[4 * t + 3] == 1);
    }
  }
}

TEST_CASE("a copy that nobody waits for is a mistake, and so is one into other memory") {
  run_shape shape;
  shape.threads = 32, shape.shared_bytes = 512;
  alignas(16) static uint32_t memory[8];
  CHECK(run([](const void*) { gpu::cp_async_4(gpu::shared_memory() + 4 * gpu::thread_index(), memory); }, 32, shape, nullptr, 0, 1).find("never waited for") != std::string::npos);
  CHECK(run([](const void*) { gpu::cp_async_4(memory, memory); }, 32, shape, nullptr, 0, 1).find("of 512 bytes of shared memory") != std::string::npos);
  CHECK(run([](const void*) { gpu::cp_async_16(gpu::shared_memory() + 8, memory); }, 32, shape, nullptr, 0, 1).find("not aligned") != std::string::npos);
}
