// SPDX-License-Identifier: Apache-2.0
// The attention of sm_80 through its host part, on random problems against the fp64 reference, and proof that they bite.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include "backends/cuda/tuned.h"
#include "benchmarks/gpu_leaf_random.h"
#include "simt_port.h"
#include "simt_runtime.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>

#include <sys/wait.h>
#include <unistd.h>

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

// Every second problem is one for the plain kernels. compute_units 1 keeps the plain kernels in use where a real device would take smaller tiles.
std::string check(heap& h, uint64_t seed) {
  simt::device device;
  const cqsa_chip chip{80, 1, 232448, 0};
  device.facts = {32, 1, 232448, 80, 80}, device.seed = seed;
  return random_leaf::check(seed, h.memory(), 200, &device, nullptr, nullptr, gpu::sm80_attention, chip, seed % 2 == 0);
}

}  // namespace

TEST_CASE("simt sm80 attention: random problems") {
  const char* text = std::getenv("CQSA_SEED");
  const uint64_t begin = text ? std::strtoull(text, nullptr, 10) : 1;
  const char* number = std::getenv("CQSA_PROPERTY_COUNT");
  const uint64_t count = number ? std::strtoull(number, nullptr, 10) : 150;
  heap h;
  int taken = 0;
  for (uint64_t seed = begin; seed < begin + count; ++seed) {
    const std::string wrong = check(h, seed);
    if (wrong == "declined") continue;
    ++taken;
    CHECK(wrong == "");
  }
  CHECK(taken * 3 >= int(count));
}

namespace {

// Problems for the mutants: few, but each form of kernel, hidden pairs with NaN under them, and a state.
const std::vector<uint64_t>& mutant_seeds() {
  static const std::vector<uint64_t> seeds = [] {
    heap h;
    std::vector<uint64_t> out;
    for (uint64_t seed = 1; seed <= 60; ++seed)
      if (check(h, seed) == "") out.push_back(seed);
    return out;
  }();
  return seeds;
}

// Whether one of them fails, in a process of its own, which a mutant may crash.
bool fails_apart() {
  const std::vector<uint64_t>& seeds = mutant_seeds();
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    if (!std::freopen("/dev/null", "w", stderr)) _exit(2);
    std::signal(SIGSEGV, SIG_DFL), std::signal(SIGABRT, SIG_DFL), std::signal(SIGFPE, SIG_DFL);  // not Catch's report
    heap h;
    for (const uint64_t seed : seeds)
      if (!check(h, seed).empty()) _exit(1);
    _exit(0);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace

TEST_CASE("simt sm80 attention: every mutant is noticed") {
  REQUIRE(!fails_apart());
  for (int mutant = 11; mutant <= 13; ++mutant) {
    INFO("CQSA_MUTANT(" << mutant << ")");
    cqsa_simt_mutant = mutant;
    CHECK(fails_apart());
    cqsa_simt_mutant = 0;
  }
}
