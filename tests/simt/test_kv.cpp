// SPDX-License-Identifier: Apache-2.0
// Key-value caches by the portable kernels in the harness: the bits of section 12 of cqsa.h, which are the CPU backend's; and each
// mistake in them and each meeting place of their threads that is left out is noticed.
#include "tests/unit/kv_oracle.h"

#include "backends/gpu/kv.h"
#include "apart.h"
#include "simt_port.h"
#include "simt_runtime.h"

using namespace cqsa;

namespace {

simt::device device_of(uint32_t seed, int lanes) {
  simt::device d;
  d.facts.lanes = lanes, d.facts.compute_units = 1, d.seed = seed;
  return d;
}

std::string wrong_on(kv_problem& p, uint32_t seed, int lanes) {
  simt::device d = device_of(seed, lanes);
  const std::string wrong = wrong_cache(p, seed, [&](const cqsa_kv_leaf& a) { return gpu::portable_kv_append(&d, &a, nullptr, nullptr); },
                                        [&](const cqsa_kv_leaf& a) { return gpu::portable_kv_gather(&d, &a, nullptr, nullptr); });
  return wrong.empty() ? "" : wrong + " " + simt::last_error();
}

std::string wrong_on(rotation_problem& p, uint32_t seed, int lanes) {
  simt::device d = device_of(seed, lanes);
  const std::string wrong = wrong_bytes(p.result(), p.with(), oracle::hadamard, [&](const cqsa_hadamard_leaf& a) {
    return gpu::portable_hadamard(&d, &a, nullptr, nullptr);
  });
  return wrong.empty() ? "" : wrong + " " + simt::last_error();
}

// A cache without strange cells, whose rows go round more than once.
kv_problem full_cache(cqsa_dtype pool, int32_t format, int64_t head_dim, int64_t group, int64_t rows) {
  kv_problem p;
  cqsa_kv_leaf& a = p.leaf;
  a.format = format, a.rows = rows, a.num_kv_heads = 2, a.head_dim = head_dim, a.num_pages = a.pages = 1, a.page_size = rows;
  a.kv_group = group, a.cells_dtype = CQSA_DTYPE_I32, a.cells_stride = 1, a.page_table_stride[1] = 1;
  p.x = tensor(CQSA_DTYPE_F16, {1, 2, rows, head_dim});
  p.pool = tensor(pool, {1, 2, rows, format ? head_dim / 32 * 18 : head_dim});
  if (group) p.scale = tensor(CQSA_DTYPE_F16, {1, 2, rows, (head_dim + group - 1) / group});
  p.table = {0};
  for (int64_t n = 0; n < rows; ++n) p.cells.push_back(int32_t(rows - 1 - n));
  return p;
}

// Small problems that together come by all that the kernels do; "" when they are right.
std::string first_mistake() {
  for (const int lanes : {32, 64}) {
    for (const int64_t group : {32, 64, 128}) {
      kv_problem p = full_cache(CQSA_DTYPE_I8, CQSA_KV_FORMAT_ELEMENTS, 136, group, 9);
      if (const std::string wrong = wrong_on(p, 5, lanes); !wrong.empty()) return wrong;
    }
    kv_problem q4 = full_cache(CQSA_DTYPE_U8, CQSA_KV_FORMAT_Q4_0, 128, 0, 70);  // 140 rows of heads: 16 to each of 8 blocks
    if (const std::string wrong = wrong_on(q4, 6, lanes); !wrong.empty()) return wrong;
    for (const int64_t n : {8, 16, 2048, 4096}) {
      rotation_problem p;
      p.leaf.n = n, p.leaf.shape[0] = 1, p.leaf.shape[1] = 1, p.leaf.shape[2] = n < 32 ? 2100 : 9;
      p.x = tensor(CQSA_DTYPE_F32, {1, 1, p.leaf.shape[2], n}), p.in_place = true;
      dice d(3);
      p.x.fill([&](auto...) { return d.normal(); });
      if (const std::string wrong = wrong_on(p, 7, lanes); !wrong.empty()) return wrong;
    }
  }
  return "";
}

bool any_fails() {
  return simt::fails_apart([] { return !first_mistake().empty(); });
}

}  // namespace

TEST_CASE("simt kv: append and gather have the bits of the text") {
  for (uint32_t seed = 1; seed <= 300; ++seed) {
    kv_problem p = random_kv(seed, 24);
    INFO("seed " << seed << ": " << text_of(p));
    REQUIRE(wrong_on(p, seed, seed % 2 ? 32 : 64) == "");
  }
}

TEST_CASE("simt kv: rotations have the bits of the text") {
  for (uint32_t seed = 1; seed <= 120; ++seed) {
    rotation_problem p = random_rotation(seed, 12000);
    INFO("seed " << seed << " n " << p.leaf.n << " in place " << p.in_place);
    REQUIRE(wrong_on(p, seed, seed % 2 ? 32 : 64) == "");
  }
}

TEST_CASE("simt kv: every mutant is noticed") {
  REQUIRE(first_mistake() == "");
  for (int mutant = 21; mutant <= 24; ++mutant) {
    INFO("CQSA_MUTANT(" << mutant << ")");
    cqsa_simt_mutant = mutant;
    CHECK(any_fails());
    cqsa_simt_mutant = 0;
  }
}

TEST_CASE("simt kv: every meeting place is needed") {
  simt::record_sites(true);
  REQUIRE(first_mistake() == "");
  const std::vector<simt::call_site> sites = simt::recorded_sites();
  simt::record_sites(false);
  CHECK(sites.size() >= 7);
  for (const simt::call_site& site : sites) {
    INFO(site.what << " at " << site.file << ":" << site.line);
    simt::leave_out(&site);
    CHECK(any_fails());
    simt::leave_out(nullptr);
  }
}

TEST_CASE("simt kv: nothing to do is no launch") {
  simt::device d;
  const cqsa_kv_leaf none{};
  cqsa_hadamard_leaf no_rows{};
  no_rows.n = 8;
  CHECK(gpu::portable_kv_append(&d, &none, nullptr, nullptr) == CQSA_OK);
  CHECK(gpu::portable_kv_gather(&d, &none, nullptr, nullptr) == CQSA_OK);
  CHECK(gpu::portable_hadamard(&d, &no_rows, nullptr, nullptr) == CQSA_OK);
  CHECK(d.launches == 0);
}
