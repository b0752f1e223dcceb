// SPDX-License-Identifier: Apache-2.0
// The random problems of the device check (benchmarks/gpu_leaf_random.h) in the harness, and proof that they bite: a barrier, an
// index, a mask test and the careful product are damaged in turn, and each must be noticed.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include "benchmarks/gpu_leaf_random.h"
#include "simt_port.h"
#include "simt_runtime.h"
#include "tests/random_count.h"

#include <cstdlib>

using namespace cqsa;

namespace {

class heap {
 public:
  heap() : memory_{[this](size_t n) { return take(n); }, [this] { clear(); }} {}
  ~heap() { clear(); }
  random_leaf::memory& memory() { return memory_; }

 private:
  void* take(size_t n) {
    all_.push_back(std::aligned_alloc(64, (n + 63) / 64 * 64));
    return all_.back();
  }
  void clear() {
    for (void* p : all_) std::free(p);
    all_.clear();
  }
  std::vector<void*> all_;
  random_leaf::memory memory_;
};

std::string check(heap& h, uint64_t seed) {
  simt::device device;
  device.facts.lanes = seed % 2 ? 32 : 64, device.seed = seed;
  return random_leaf::check(seed, h.memory(), 200, &device, nullptr, nullptr);
}

}  // namespace

TEST_CASE("simt leaf: random problems") {
  heap h;
  for (uint64_t seed = 1; seed <= test::random_count(150, 4); ++seed) REQUIRE(check(h, seed) == "");
}

TEST_CASE("simt leaf: every mutant is noticed") {
  heap h;
  for (int mutant = 1; mutant <= 4; ++mutant) {
    cqsa_simt_mutant = mutant;
    int noticed = 0;
    for (uint64_t seed = 1; seed <= 80 && noticed == 0; ++seed) noticed += !check(h, seed).empty();
    cqsa_simt_mutant = 0;
    INFO("mutant " << mutant);
    CHECK(noticed > 0);
  }
}
