// SPDX-License-Identifier: Apache-2.0
#include "fma_peak.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int chains = 12;  // independent accumulators: latency 4 x 2 units, with slack
constexpr long rounds = 2'000'000;

// Each returns the FLOPs it did; the sink keeps the work alive.
volatile float sink;

#if defined(__x86_64__)
__attribute__((target("avx512f"))) double spin_avx512() {
  __m512 sum[chains];
  for (int i = 0; i < chains; ++i) sum[i] = _mm512_set1_ps(static_cast<float>(i));
  const __m512 a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(0.001f);
  for (long r = 0; r < rounds; ++r)
    for (int i = 0; i < chains; ++i) sum[i] = _mm512_fmadd_ps(sum[i], a, b);
  for (int i = 1; i < chains; ++i) sum[0] = _mm512_add_ps(sum[0], sum[i]);
  sink = _mm512_reduce_add_ps(sum[0]);
  return 2.0 * 16 * chains * rounds;
}

__attribute__((target("avx2,fma"))) double spin_avx2() {
  __m256 sum[chains];
  for (int i = 0; i < chains; ++i) sum[i] = _mm256_set1_ps(static_cast<float>(i));
  const __m256 a = _mm256_set1_ps(0.999f), b = _mm256_set1_ps(0.001f);
  for (long r = 0; r < rounds; ++r)
    for (int i = 0; i < chains; ++i) sum[i] = _mm256_fmadd_ps(sum[i], a, b);
  for (int i = 1; i < chains; ++i) sum[0] = _mm256_add_ps(sum[0], sum[i]);
  sink = _mm_cvtss_f32(_mm256_castps256_ps128(sum[0]));
  return 2.0 * 8 * chains * rounds;
}
#endif

double spin_plain() {
  float sum[chains] = {};
  for (long r = 0; r < rounds; ++r)
    for (int i = 0; i < chains; ++i) sum[i] = sum[i] * 0.999f + 0.001f;
  sink = sum[0] + sum[chains - 1];
  return 2.0 * chains * rounds;
}

using spin = double (*)();

spin widest() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return spin_avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return spin_avx2;
#endif
  return spin_plain;
}

}  // namespace

const char* fma_peak_isa() {
#if defined(__x86_64__)
  if (widest() == spin_avx512) return "AVX-512";
  if (widest() == spin_avx2) return "AVX2";
#endif
  return "baseline";
}

double fma_peak(int threads, double seconds) {
  double best = 0;
  const auto begin = std::chrono::steady_clock::now();
  do {
    const auto start = std::chrono::steady_clock::now();
    std::vector<double> flops(static_cast<size_t>(threads));
    std::vector<std::thread> others;
    for (int t = 1; t < threads; ++t) others.emplace_back([&flops, t] { flops[static_cast<size_t>(t)] = widest()(); });
    flops[0] = widest()();
    for (std::thread& other : others) other.join();
    double total = 0;
    for (double f : flops) total += f;
    best = std::max(best, total / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  } while (std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() < seconds);
  return best;
}
