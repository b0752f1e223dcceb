// SPDX-License-Identifier: Apache-2.0
// The harness itself: small kernels that are right must pass, and each kind of mistake must be seen.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include "simt_runtime.h"

#include <string>
#include <vector>

using namespace cqsa;

namespace {

struct sum_params {
  const int32_t* in;
  int64_t* out;  // one a block
};

template <int Lanes> void sum_kernel(const sum_params& p) {
  auto* part = reinterpret_cast<int64_t*>(gpu::shared_memory());
  const int t = gpu::thread_index();
  int64_t x = p.in[gpu::block_index_x() * gpu::block_threads() + t];
  for (int mask = Lanes / 2; mask > 0; mask /= 2) x += gpu::shuffle_xor<Lanes>(x, mask);
  if (t % Lanes == 0) part[t / Lanes] = x;
  if (!CQSA_MUTANT(1) || t >= Lanes) gpu::barrier();
  if (CQSA_MUTANT(2) && t == 5) return;
  if (CQSA_MUTANT(3) && t == 0) part[gpu::block_threads() / Lanes] = 1;
  gpu::lanes_barrier<Lanes>();
  if (t == 0) {
    int64_t all = 0;
    for (int i = 0; i < gpu::block_threads() / Lanes; ++i) all += part[i];
    p.out[gpu::block_index_x()] = all;
  }
  const uint64_t odd = gpu::ballot<Lanes>(t % 2 == 1);
  if (odd != (0xaaaaaaaaaaaaaaaaull & (Lanes == 64 ? ~0ull : 0xffffffffull))) p.out[gpu::block_index_x()] = -1;
}

template <int Lanes> std::string sums(int mutant, uint64_t seed) {
  cqsa_simt_mutant = mutant;
  const int threads = 256, blocks = 5;
  std::vector<int32_t> in(size_t(threads * blocks));
  for (size_t i = 0; i < in.size(); ++i) in[i] = int32_t(i * i % 1000);
  std::vector<int64_t> out(blocks, -7);
  simt::run_shape shape;
  shape.grid[0] = blocks, shape.threads = threads, shape.shared_bytes = threads / Lanes * 8;
  const sum_params p{in.data(), out.data()};
  std::string error = simt::run([](const void* q) { sum_kernel<Lanes>(*static_cast<const sum_params*>(q)); }, Lanes, shape, &p, sizeof p, seed);
  cqsa_simt_mutant = 0;
  for (int b = 0; b < blocks && error.empty(); ++b) {
    int64_t want = 0;
    for (int t = 0; t < threads; ++t) want += in[size_t(b * threads + t)];
    if (out[size_t(b)] != want) error = "sum " + std::to_string(out[size_t(b)]) + " want " + std::to_string(want);
  }
  return error;
}

}  // namespace

TEST_CASE("a sum by shuffles and shared memory is right under any schedule") {
  for (uint64_t seed = 1; seed < 50; ++seed) {
    CHECK(sums<32>(0, seed) == "");
    CHECK(sums<64>(0, seed) == "");
  }
}

TEST_CASE("a barrier that some threads pass by is a deadlock") {
  CHECK(sums<32>(1, 3).find("nobody can go on") != std::string::npos);
  CHECK(sums<64>(1, 3).find("nobody can go on") != std::string::npos);
}

TEST_CASE("a thread that has ended is missed by its lanes") {
  const std::string text = sums<64>(2, 4);
  CHECK(text.find("(first 5) has ended") != std::string::npos);
  CHECK(text.find("63 threads (first 0) waits for lanes_barrier") != std::string::npos);
}

#if !defined(CQSA_SIMT_ASAN)  // ASan would end the process there, which is as good
TEST_CASE("a write behind the shared memory is seen") {
  CHECK(sums<32>(3, 5).find("written 0 bytes behind the shared memory") != std::string::npos);
}
#endif

TEST_CASE("a kernel made for other lanes is refused") {
  cqsa::simt::run_shape shape;
  shape.threads = 64;
  const std::string text = simt::run([](const void*) { gpu::lanes_barrier<64>(); }, 32, shape, nullptr, 0, 1);
  CHECK(text.find("for 64 lanes where 32 run together") != std::string::npos);
}
