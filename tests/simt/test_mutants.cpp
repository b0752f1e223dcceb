// SPDX-License-Identifier: Apache-2.0
// The proof that the harness bites: the kernels of reference_kernels.cuh are right under every seed, and each of their mutants
// fails under every seed.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include "reference_kernels.cuh"
#include "simt_runtime.h"

#include "dtype.h"

#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

using namespace cqsa;

namespace {

constexpr uint64_t seeds = 12;

template <class Params, void (*Kernel)(const Params&)> std::string launch(int lanes, simt::run_shape shape, const Params& p, uint64_t seed) {
  return simt::run([](const void* q) { Kernel(*static_cast<const Params*>(q)); }, lanes, shape, &p, sizeof p, seed);
}

simt::run_shape shape_of(int64_t x, int64_t y, int threads, int64_t shared_bytes) {
  simt::run_shape s;
  s.grid[0] = x, s.grid[1] = y, s.threads = threads, s.shared_bytes = shared_bytes;
  return s;
}

// The first element that differs. NaN differs from everything.
template <class T> std::string compare(const std::vector<T>& got, const std::vector<double>& want, double tolerance) {
  for (size_t i = 0; i < want.size(); ++i)
    if (!(std::fabs(double(got[i]) - want[i]) <= tolerance)) return "at " + std::to_string(i) + " got " + std::to_string(got[i]) + " want " + std::to_string(want[i]);
  return "";
}

template <int Lanes> std::string sum_case(uint64_t seed) {
  const int threads = 256, blocks = 5;
  std::vector<int32_t> in(size_t(threads * blocks));
  for (size_t i = 0; i < in.size(); ++i) in[i] = int32_t(i * i % 1009);
  std::vector<int64_t> out(blocks, -7);
  std::vector<double> want(blocks, 0);
  for (size_t i = 0; i < in.size(); ++i) want[i / threads] += in[i];
  const gpu::sum_params p{in.data(), out.data()};
  const std::string error = launch<gpu::sum_params, gpu::sum_kernel<Lanes>>(Lanes, shape_of(blocks, 1, threads, threads / Lanes * 8), p, seed);
  return error.empty() ? compare(out, want, 0) : error;
}

template <int Lanes> std::string transpose_case(uint64_t seed) {
  const int64_t n = 96;
  std::vector<float> in(size_t(n * n)), out(in.size(), NAN);
  std::vector<double> want(in.size());
  for (int64_t i = 0; i < n * n; ++i) in[size_t(i)] = float(i), want[size_t(i % n * n + i / n)] = double(i);
  const gpu::transpose_params p{in.data(), out.data(), n};
  const std::string error = launch<gpu::transpose_params, gpu::transpose_kernel<Lanes>>(Lanes, shape_of(3, 3, 256, 4096), p, seed);
  return error.empty() ? compare(out, want, 0) : error;
}

std::string matmul_case(uint64_t seed) {
  const int64_t m = 64, n = 32, k = 68;
  std::mt19937 rng{uint32_t(seed)};
  std::normal_distribution<float> normal;
  struct alignas(16) piece { float x[4]; };  // cp.async wants 16
  std::vector<piece> a(size_t(m * k / 4 + 4)), b(size_t(k * n / 4)), c(size_t(m * n / 4), piece{{NAN, NAN, NAN, NAN}});
  for (auto* v : {&a, &b})
    for (piece& x : *v)
      for (float& y : x.x) y = normal(rng);
  const gpu::matmul_params p{a[0].x, b[0].x, c[0].x, m, n, k};
  const std::string error = launch<gpu::matmul_params, gpu::matmul_kernel>(32, shape_of(n / 32, m / 32, 256, gpu::matmul_shared_bytes), p, seed);
  if (!error.empty()) return error;
  std::vector<double> want(size_t(m * n), 0);
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j)
      for (int64_t x = 0; x < k; ++x) want[size_t(i * n + j)] += double(p.a[i * k + x]) * double(p.b[x * n + j]);
  return compare(std::vector<float>(p.c, p.c + m * n), want, 1e-4);
}

struct halves {
  struct alignas(16) piece { uint16_t x[8]; };
  std::vector<piece> memory;
  bool bf16;
  halves(int64_t count, bool b, uint32_t seed) : memory(size_t(count / 8)), bf16(b) {
    std::mt19937 rng{seed};
    std::normal_distribution<float> normal;
    for (piece& p : memory)
      for (uint16_t& x : p.x) x = bf16 ? f32_to_bf16(normal(rng)) : f32_to_f16(normal(rng));
  }
  const uint16_t* data() const { return memory[0].x; }
  double operator[](int64_t i) const { return bf16 ? bf16_to_f32(data()[i]) : f16_to_f32(data()[i]); }
};

template <void (*Kernel)(const gpu::mma_params&)> std::string mma_case(uint64_t seed, bool bf16) {
  const halves a(64 * 64, bf16, uint32_t(seed)), b(64 * 32, bf16, uint32_t(seed + 100));
  const int blocks = 4;  // each draws a schedule of its own
  std::vector<float> c(64 * 32 * blocks, NAN);
  const gpu::mma_params p{a.data(), b.data(), c.data(), bf16};
  const std::string error = launch<gpu::mma_params, Kernel>(32, shape_of(blocks, 1, 128, gpu::mma_shared_bytes), p, seed);
  if (!error.empty()) return error;
  std::vector<double> want(c.size(), 0);
  for (int i = 0; i < 64 * 32 * blocks; ++i)
    for (int k = 0; k < 64; ++k) want[size_t(i)] += a[i / 32 % 64 * 64 + k] * b[k * 32 + i % 32];
  return compare(c, want, 1e-4);
}

template <gpu::order A, gpu::order B> std::string mma884_case(uint64_t seed) {
  const halves a(16 * 32, false, uint32_t(seed)), b(32 * 16, false, uint32_t(seed + 100));
  std::vector<float> c(256, NAN);
  const gpu::mma884_params p{a.data(), b.data(), c.data()};
  const std::string error = launch<gpu::mma884_params, gpu::mma884_kernel<A, B>>(32, shape_of(1, 1, 32, gpu::mma884_shared_bytes), p, seed);
  if (!error.empty()) return error;
  std::vector<double> want(256, 0);
  for (int i = 0; i < 256; ++i)
    for (int k = 0; k < 32; ++k) {
      const int row = i / 16, col = i % 16;
      want[size_t(i)] += a[A == gpu::order::row ? row * 32 + k : k * 16 + row] * b[B == gpu::order::row ? k * 16 + col : col * 32 + k];
    }
  return compare(c, want, 1e-4);
}

using case_function = std::function<std::string(uint64_t)>;

void passes(const case_function& run) {
  cqsa_simt_mutant = gpu::none;
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    INFO("seed " << seed);
    CHECK(run(seed) == "");
  }
}

int killed = 0;

// Every mutant from first to last must fail under every seed.
void kills(const case_function& run, int first, int last) {
  for (int mutant = first; mutant <= last; ++mutant) {
    int alive = 0;
    for (uint64_t seed = 1; seed <= seeds; ++seed) {
      cqsa_simt_mutant = mutant;
      alive += run(seed).empty();
    }
    cqsa_simt_mutant = gpu::none;
    INFO("mutant " << mutant << " lived under " << alive << " of " << seeds << " seeds");
    CHECK(alive == 0);
    ++killed;
  }
}

}  // namespace

using enum gpu::mutant_number;

TEST_CASE("block sum") {
  passes(sum_case<32>), passes(sum_case<64>);
  for (const case_function& run : {case_function(sum_case<32>), case_function(sum_case<64>)}) {
    kills(run, sum_no_barrier, sum_wrong_mask);
#if !defined(CQSA_SIMT_ASAN)  // ASan ends the process at such a write
    kills(run, sum_behind_the_end, sum_behind_the_end);
#endif
    kills(run, sum_thread_leaves, sum_half_ballot);
  }
}

TEST_CASE("transposition with a swizzle") {
  passes(transpose_case<32>), passes(transpose_case<64>);
  kills(transpose_case<64>, transpose_no_barrier, transpose_swapped_block);
  kills(transpose_case<32>, transpose_no_barrier, transpose_swapped_block);
#if !defined(CQSA_SIMT_ASAN)
  kills(transpose_case<64>, transpose_behind_the_end, transpose_behind_the_end);
#endif
}

TEST_CASE("matrix product with copies one step ahead") {
  passes(matmul_case);
  kills(matmul_case, copy_no_wait, copy_misaligned);
}

TEST_CASE("matrix product by mma_m16n8k16 and ldmatrix") {
  const case_function f16 = [](uint64_t seed) { return mma_case<gpu::mma16_kernel>(seed, false); };
  const case_function bf16 = [](uint64_t seed) { return mma_case<gpu::mma16_kernel>(seed, true); };
  passes(f16), passes(bf16);
  kills(f16, mma16_no_barrier, mma16_row_behind_the_end);
  kills(bf16, mma16_no_barrier, mma16_row_behind_the_end);
}

TEST_CASE("matrix product by mma_m16n8k8 and ldmatrix") {
  const case_function f16 = [](uint64_t seed) { return mma_case<gpu::mma8_kernel>(seed, false); };
  passes(f16);
  kills(f16, mma8_no_barrier, mma8_c_row);
}

TEST_CASE("matrix product by mma_m8n8k4 in all four orders") {
  using gpu::order;
  for (const case_function& run : {case_function(mma884_case<order::row, order::row>), case_function(mma884_case<order::row, order::col>),
                                   case_function(mma884_case<order::col, order::row>), case_function(mma884_case<order::col, order::col>)}) {
    passes(run);
    kills(run, mma884_a_half, mma884_no_barrier);
  }
}

// Without a word in the kernel: each place where threads meet is left out in turn.
TEST_CASE("each meeting place of each kernel is needed") {
  const std::pair<const char*, case_function> kernels[] = {
      {"sum 32", sum_case<32>}, {"sum 64", sum_case<64>}, {"transpose", transpose_case<32>}, {"matmul", matmul_case},
      {"mma16", [](uint64_t seed) { return mma_case<gpu::mma16_kernel>(seed, false); }},
      {"mma8", [](uint64_t seed) { return mma_case<gpu::mma8_kernel>(seed, false); }},
      {"mma884", mma884_case<gpu::order::row, gpu::order::col>}};
  for (const auto& [name, run] : kernels) {
    simt::record_sites(true);
    REQUIRE(run(1) == "");
    const std::vector<simt::call_site> sites = simt::recorded_sites();
    simt::record_sites(false);
    CHECK(!sites.empty());
    for (const simt::call_site& site : sites) {
      if (site.what == "ldmatrix") continue;  // would leave registers without a value
      if (site.what == "ballot") continue;    // the sum only checks itself by it
      INFO(name << ": " << site.what << " at " << site.file << ":" << site.line);
      simt::leave_out(&site);
      int alive = 0;
      for (uint64_t seed = 1; seed <= seeds; ++seed) alive += run(seed).empty();
      simt::leave_out(nullptr);
      CHECK(alive == 0);
      ++killed;
    }
  }
}

TEST_CASE("how many mutants") {
  WARN(killed << " mutants, each under " << seeds << " seeds");
  CHECK(killed > 0);
}
