// SPDX-License-Identifier: Apache-2.0
// The attention of sm_75, which is that of sm_80 on instructions of Turing, through its host part: random problems against the fp64
// reference, and proof that they bite.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include "backends/cuda/tuned.h"
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
  const cqsa_chip chip{75, 1, 65536, 0};
  device.facts = {32, 1, 65536, 75, 75}, device.seed = seed;
  return random_leaf::check(seed, h.memory(), 200, &device, nullptr, nullptr, gpu::sm75_attention, chip);
}

}  // namespace

TEST_CASE("simt sm75 attention: random problems") {
  const char* text = std::getenv("CQSA_SEED");
  const uint64_t begin = text ? std::strtoull(text, nullptr, 10) : 1;
  const uint64_t count = test::random_count(250, 6);
  heap h;
  uint64_t taken = 0;
  for (uint64_t seed = begin; seed < begin + count; ++seed) {
    const std::string wrong = check(h, seed);
    if (wrong == "declined") continue;
    ++taken;
    CHECK(wrong == "");
  }
  CHECK(taken * 6 > count);
}

TEST_CASE("simt sm75 attention: half of a product left out is noticed") {
  heap h;
  cqsa_simt_mutant = 21;
  int noticed = 0;
  for (uint64_t seed = 1; seed <= 40 && noticed == 0; ++seed) {
    const std::string wrong = check(h, seed);
    noticed += wrong != "" && wrong != "declined";
  }
  cqsa_simt_mutant = 0;
  CHECK(noticed > 0);
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
