// SPDX-License-Identifier: Apache-2.0
// The attention of sm_75, which is that of sm_80 on instructions of Turing, through its host part: random problems against the fp64
// reference, and proof that they bite.
#include "backends/cuda/tuned.h"
#include "random_checks.h"

namespace {

// Every fourth problem is one for the plain kernels.
std::string check_sm75(heap& h, uint64_t seed) {
  simt::device device;
  const cqsa_chip chip{75, 1, 65536, 0};
  device.facts = {32, 1, 65536, 75, 75}, device.seed = seed + (schedule << 32);
  return random_leaf::check(seed, h.memory(), 200, &device, nullptr, nullptr, gpu::sm75_attention, chip, seed % 4 == 0);
}

const std::vector<known_problem>& problems() {
  static const std::vector<known_problem> all = find_problems(check_sm75, 64, "attention");
  return all;
}

}  // namespace

TEST_CASE("simt sm75 attention: random problems") { check_random(check_sm75, 140, 6, 6); }

TEST_CASE("simt sm75 attention: half of a product left out is noticed", "[mutants]") {
  REQUIRE(!any_fails(check_sm75, problems()));
  CHECK(unnoticed_mutants(check_sm75, problems(), 21, 21) == "");
}

TEST_CASE("simt sm75 attention: every meeting place is needed", "[mutants]") {
  size_t count = 0;
  CHECK(needless_places(check_sm75, problems(), {"ballot at attention_math.cuh"}, &count) == "");  // why: test_sm80_attention.cpp
  CHECK(count > 25);
}

TEST_CASE("simt sm75 attention: what is declined") {
  cqsa_attention_leaf leaf{};
  leaf.batch = leaf.num_heads = leaf.num_kv_heads = 1, leaf.seqlen_q = leaf.seqlen_k = 8, leaf.head_dim = leaf.head_dim_v = 64;
  leaf.q.dtype = leaf.k.dtype = leaf.v.dtype = leaf.out.dtype = CQSA_DTYPE_F16;
  leaf.chip = {75, 1, 65536, 0};
  char reason[256] = "";
  CHECK(gpu::sm75_attention.probe(&leaf, reason, sizeof reason) == CQSA_OK);
  leaf.chip.tier = 80;
  CHECK(gpu::sm75_attention.probe(&leaf, reason, sizeof reason) == CQSA_ERROR_UNSUPPORTED);
  leaf.chip.tier = 75;
  leaf.q.dtype = leaf.k.dtype = leaf.v.dtype = CQSA_DTYPE_BF16;
  CHECK(gpu::sm75_attention.probe(&leaf, reason, sizeof reason) == CQSA_ERROR_UNSUPPORTED);
  CHECK(std::string(reason) == "q must be f16: the matrix units of sm_75 have no bf16");
}
