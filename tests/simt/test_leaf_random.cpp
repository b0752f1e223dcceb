// SPDX-License-Identifier: Apache-2.0
// The random problems of the device check (benchmarks/gpu_leaf_random.h) in the harness, and proof that they bite: a barrier, an
// index, a mask test and the careful product are damaged in turn, and each must be noticed.
#include "random_checks.h"

namespace {

std::string check(heap& h, uint64_t seed) {
  simt::device device;
  device.facts.lanes = seed % 2 ? 32 : 64, device.seed = seed;
  return random_leaf::check(seed, h.memory(), 200, &device, nullptr, nullptr);
}

}  // namespace

TEST_CASE("simt leaf: random problems") { check_random(check, 150, 1, 4); }

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
