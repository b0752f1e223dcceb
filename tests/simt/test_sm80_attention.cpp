// SPDX-License-Identifier: Apache-2.0
// The attention of sm_80 through its host part, on random problems and a few special ones against the fp64 reference, and proof that
// they bite.
#include "backends/cuda/tuned.h"
#include "random_checks.h"
#include "tests/unit/cpu_leaf_problem.h"

namespace {

// A device that has compute_units: with one, big tiles are in use for the smallest grid; with many, those of the general kernels.
simt::device ampere(uint64_t seed, int32_t compute_units = 1) {
  simt::device d;
  d.facts = {32, compute_units, 232448, 80, 80}, d.seed = seed + (schedule << 32);
  return d;
}
constexpr cqsa_chip chip{80, 1, 232448, 0};

// Every second problem is one for the plain kernels; of those a quarter is given to the general ones, as it would be for its size.
std::string check_sm80(heap& h, uint64_t seed) {
  simt::device device = ampere(seed, seed % 8 == 6 ? 1000 : 1);
  return random_leaf::check(seed, h.memory(), 200, &device, nullptr, nullptr, gpu::sm80_attention, chip, seed % 2 == 0);
}

// "" where the kernels give what the reference gives for out; NaN must meet NaN.
std::string mistake(problem& p, double tolerance) {
  run_reference(p);
  guarded out(p.out), lse(p.lse);
  cqsa_attention_leaf leaf = p.with(p.out, p.lse);
  leaf.chip = chip;
  char reason[256] = "";
  if (gpu::sm80_attention.probe(&leaf, reason, sizeof reason) != CQSA_OK) return reason;
  simt::device device = ampere(1);
  std::vector<char> memory(size_t(gpu::sm80_attention.workspace(&leaf, 1) + 1));
  if (gpu::sm80_attention.launch(&device, &leaf, memory.data(), memory.size() - 1, nullptr, nullptr) != CQSA_OK) return simt::last_error();
  return differs(p.out, p.exact_out, tolerance) + differs(p.lse, p.exact_lse, 2e-4);
}

}  // namespace

TEST_CASE("simt sm80 attention: random problems") { check_random(check_sm80, 150, 3, 1); }

// A tile has as many keys as can be counted, and no other test has them all wild.
TEST_CASE("simt sm80 attention: columns of infinite values in tiles that some rows see in part") {
  for (const cqsa_dtype type : {CQSA_DTYPE_F16, CQSA_DTYPE_BF16})
    for (const int64_t dim : {64, 128}) {
      problem p = plain(1, 1, 1, 128, 128, dim, dim, type);
      p.leaf.causal = CQSA_CAUSAL_BOTTOM_RIGHT;
      for (int64_t n = 0; n < 128; ++n) {
        p.v.write(0, 0, n, 5, -inf), p.v.write(0, 0, n, 6, inf);
        p.v.write(0, 0, n, 7, n == 100 ? inf : -inf), p.v.write(0, 0, n, 9, n == 127 ? nan64 : -inf);
      }
      INFO(type << " " << dim);
      CHECK(mistake(p, type == CQSA_DTYPE_F16 ? 4e-3 : 3e-2) == "");
    }
}

TEST_CASE("simt sm80 attention: an infinite code has the sign of its scale") {
  for (const int32_t kind : {CQSA_SCALE_TOKEN, CQSA_SCALE_HEAD, CQSA_SCALE_NONE}) {
    problem p = plain(1, 2, 1, 90, 90, 64, 64, CQSA_DTYPE_F16);
    p.leaf.causal = CQSA_CAUSAL_BOTTOM_RIGHT;
    dice d(3);
    for (tensor* x : {&p.k, &p.v}) {
      *x = tensor(CQSA_DTYPE_E5M2, {1, 1, 90, 64});
      x->fill([&](auto...) { return d.normal(); });
    }
    p.leaf.scale_v = kind;
    if (kind == CQSA_SCALE_TOKEN) p.v_scale = tensor(CQSA_DTYPE_F32, {1, 1, 90, 1});
    if (kind == CQSA_SCALE_HEAD) p.v_scale = tensor(CQSA_DTYPE_F32, {1, 1, 1, 1});
    if (kind != CQSA_SCALE_NONE) p.v_scale.fill([](int64_t, int64_t, int64_t row, int64_t) { return row % 3 == 0 ? -0.7 : 1.3; });
    if (kind == CQSA_SCALE_TOKEN) p.v_scale.write(0, 0, 70, 0, 0.0);
    for (const int64_t row : {3, 17, 38, 57, 64, 70, 83}) *p.v.at(0, 0, row, row % 16) = char(row % 2 ? 0xfc : 0x7c);
    INFO(kind);
    CHECK(mistake(p, 1e-2) == "");
  }
}

TEST_CASE("simt sm80 attention: the big tiles of every size fit where a block has 99 KiB") {
  const int64_t sizes[][4] = {{64, 64, 128, 1}, {96, 96, 128, 1}, {128, 128, 128, 1}, {192, 128, 128, 1}, {256, 256, 64, 1}};
  for (const auto& [d, dv, rows, blocks] : sizes) {
    problem p = plain(1, 1, 1, 8, 8, d, dv, CQSA_DTYPE_F16);
    cqsa_attention_leaf leaf = p.with(p.out, p.lse);
    cqsa_leaf_tile tile{};
    INFO(d);
    leaf.chip = {80, 1, 99 << 10, 0};
    CHECK(gpu::sm80_attention.tiles(&leaf, &tile, 1) == 1);
    CHECK((tile.tile_q == rows && tile.blocks_per_unit == double(blocks)));
    leaf.chip = chip;
    CHECK(gpu::sm80_attention.tiles(&leaf, &tile, 1) == 1);
    CHECK((tile.tile_q == rows && tile.blocks_per_unit == 2.0));
  }
}

namespace {
const std::vector<known_problem>& problems() {
  static const std::vector<known_problem> all = find_problems(check_sm80, 64, "attention");
  return all;
}
}  // namespace

TEST_CASE("simt sm80 attention: every mutant is noticed", "[mutants]") {
  REQUIRE(!any_fails(check_sm80, problems()));
  CHECK(unnoticed_mutants(check_sm80, problems(), 11, 13) == "");
}

TEST_CASE("simt sm80 attention: every meeting place is needed", "[mutants]") {
  // The ballot spares a warp products with 1; each lane's own answer would give the same bits.
  size_t count = 0;
  CHECK(needless_places(check_sm80, problems(), {"ballot at attention_math.cuh"}, &count) == "");
  CHECK(count > 35);
}
