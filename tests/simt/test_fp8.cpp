// SPDX-License-Identifier: Apache-2.0
// FP8 by the portable kernels in the harness, with 32 and with 64 lanes: every byte that the oracle of fp8_problem.h writes and no
// other, the workspace as it was found, and each mistake in the kernels noticed.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include "fp8_problem.h"

#include "apart.h"
#include "backends/gpu/fp8.h"
#include "simt_port.h"
#include "simt_runtime.h"

#include <tuple>

using namespace cqsa;
using namespace fp8_test;

namespace {

simt::device device_of(uint64_t seed, int lanes, int units = 2) {
  simt::device d;
  d.facts.lanes = lanes, d.facts.compute_units = units, d.seed = seed;
  return d;
}

struct workspace {
  memory bytes;
  explicit workspace(simt::device& d, const cqsa_fp8_quantize_leaf& leaf) : bytes(gpu::portable_fp8_quantize_workspace(&leaf, 1)) {
    gpu::portable_fp8_workspace_init(&d, bytes.data(), bytes.size, nullptr);
  }
  bool clean() const {
    for (size_t i = sizeof(fp8::workspace_header); i < bytes.size; ++i)
      if (bytes.data()[i]) return false;
    return true;
  }
};

cqsa_fp8_quantize_leaf leaf_of(const cqsa_fp8_job* jobs, int64_t count) { return {sizeof(cqsa_fp8_quantize_leaf), 0, jobs, count, {}}; }

// Where what a problem's memory holds differs from what it should, sums apart.
std::string difference(const problem& p, const std::vector<std::vector<char>>& want) {
  for (size_t m = 0; m < p.all.size(); ++m)
    if (!p.all[m]->equals(want[m])) {
      for (size_t i = 0; i < want[m].size(); ++i)
        if (p.all[m]->whole[i] != want[m][i])
          return p.text + ": array " + std::to_string(m) + " byte " + std::to_string(int64_t(i) - int64_t(p.all[m]->offset)) + " is " +
                 std::to_string(p.all[m]->whole[i] & 0xff) + ", not " + std::to_string(want[m][i] & 0xff);
    }
  return "";
}

std::string wrong(problem& p, uint64_t seed, int lanes, int runs = 1, int units = 2) {
  simt::device d = device_of(seed, lanes, units);
  const auto before = p.snapshot();
  for (int n = 0; n < runs; ++n) reference(p.job);
  const auto want = p.snapshot();
  p.restore(before);
  const cqsa_fp8_quantize_leaf leaf = leaf_of(&p.job, 1);
  workspace w(d, leaf);
  std::string error;
  for (int n = 0; n < runs && error.empty(); ++n)
    if (gpu::portable_fp8_quantize(&d, &leaf, w.bytes.data(), w.bytes.size, nullptr, nullptr) != CQSA_OK) error = simt::last_error();
  if (error.empty()) error = difference(p, want);
  if (error.empty() && !w.clean()) error = p.text + ": the workspace is not as it was";
  p.restore(before);
  return error;
}

// Problems that together come by all that the fast kernels do.
std::string first_mistake() {
  uint64_t seed = 900;
  for (const int lanes : {32, 64})
    for (const int source : {CQSA_FP8_CURRENT, CQSA_FP8_STATIC, CQSA_FP8_RING})
      for (const cqsa_dtype type : {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16})
        for (const int sides : {1, 2, 3}) {
          wishes w;
          w.plain = true, w.source = source, w.type = type, w.sides = sides, w.rows = 130, w.columns = 264;
          if (source != CQSA_FP8_RING && seed % 3) w.block[0] = 1, w.block[1] = seed % 3 == 1 ? 128 : 0;
          problem p = make(++seed, w);
          if (!p.job.amax) p.job.amax = reinterpret_cast<float*>(p.take(4));
          p.job.skip = nullptr;
          if (std::string text = wrong(p, seed, lanes, 2); !text.empty()) return text;
        }
  return "";
}

bool any_fails() {
  return simt::fails_apart([] { return !first_mistake().empty(); });
}

}  // namespace

TEST_CASE("simt fp8: random quantizations have the bytes of the oracle") {
  const char* const count = std::getenv("CQSA_PROPERTY_COUNT");
  for (uint64_t seed = 1; seed <= (count ? 10 * std::strtoull(count, nullptr, 10) : 300); ++seed) {
    problem p = make(seed);
    REQUIRE(wrong(p, seed, seed % 2 ? 32 : 64) == "");
  }
}

TEST_CASE("simt fp8: plain problems, two calls one after the other") {
  for (uint64_t seed = 1; seed <= 120; ++seed) {
    wishes w;
    w.plain = true;
    if (seed % 8 == 0) w.rows = 140, w.columns = 1032;
    problem p = make(5000 + seed, w);
    REQUIRE(wrong(p, seed, seed % 2 ? 32 : 64, 2) == "");
  }
  CHECK(first_mistake() == "");
}

// More than the threads have in flight at a time, in one row and in several, with scales that are known and of each row, group or column.
TEST_CASE("simt fp8: long rows") {
  const int64_t shapes[][2] = {{1, 70000}, {3, 8193}, {2, 16384}, {2, 20008}, {40, 1024}, {300, 136}};
  uint64_t seed = 600, blocks_seen = 0;
  for (const auto& shape : shapes)
    for (const int source : {CQSA_FP8_CURRENT, CQSA_FP8_STATIC})
      for (const cqsa_dtype type : {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16}) {
        wishes w;
        w.plain = true, w.source = source, w.type = type, w.sides = 1, w.rows = shape[0], w.columns = shape[1];
        const int64_t blocks[][2] = {{1, 0}, {1, 128}, {1, 2048}, {0, 1}, {17, 1}};  // columns of short rows: the oracle looks through x for each
        const auto& block = blocks[source != CQSA_FP8_CURRENT ? 0 : shape[1] < 2000 ? 3 + ++blocks_seen % 2 : ++blocks_seen % 3];
        w.block[0] = source == CQSA_FP8_CURRENT ? block[0] : 0, w.block[1] = source == CQSA_FP8_CURRENT ? block[1] : 0;
        problem p = make(++seed, w);
        p.job.skip = nullptr;
        REQUIRE(wrong(p, seed, seed % 2 ? 32 : 64) == "");
      }
}

// .. and so many of them that several have one bit for what is rare.
TEST_CASE("simt fp8: a long tensor") {
  wishes w;
  w.plain = true, w.source = CQSA_FP8_STATIC, w.type = CQSA_DTYPE_BF16, w.sides = 1, w.rows = 1, w.columns = 1200000, w.block[0] = w.block[1] = 0, w.wild = false;
  problem p = make(12, w);
  p.job.skip = nullptr, p.job.nan_policy = CQSA_FP8_NAN_PROPAGATE;
  for (const int64_t at : {int64_t(17), int64_t(600001), int64_t(1199999)}) encode(place(p.job.x, p.job, 0, at), CQSA_DTYPE_BF16, NAN);
  CHECK(wrong(p, 3, 32, 1, 1) == "");
}

TEST_CASE("simt fp8: a tall tensor with one outlier in its last rows") {
  for (const int lanes : {32, 64})
    for (const int sides : {1, 2, 3}) {
      wishes w;
      w.plain = true, w.source = CQSA_FP8_RING, w.rows = 2048, w.columns = 64, w.type = CQSA_DTYPE_BF16, w.sides = sides, w.wild = false;
      problem p = make(77, w);
      p.job.skip = nullptr;
      encode(place(p.job.x, p.job, 2045, 3), p.job.x.dtype, 30000.0f);
      CHECK(wrong(p, 7, lanes, 3) == "");
    }
}

TEST_CASE("simt fp8: several tensors in one call") {
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    std::vector<problem> all;
    std::vector<cqsa_fp8_job> jobs;
    for (int n = 0; n < 1 + int(seed % 9); ++n) {
      wishes w;
      w.plain = n % 4 != 3;
      if (seed % 2) w.sides = 1, w.source = CQSA_FP8_RING;
      all.push_back(make(seed * 100 + uint64_t(n), w));
      jobs.push_back(all.back().job);
    }
    std::vector<std::vector<std::vector<char>>> before, want;
    for (problem& p : all) before.push_back(p.snapshot()), reference(p.job), want.push_back(p.snapshot()), p.restore(before.back());
    simt::device d = device_of(seed, seed % 2 ? 32 : 64);
    const cqsa_fp8_quantize_leaf leaf = leaf_of(jobs.data(), int64_t(jobs.size()));
    workspace w(d, leaf);
    REQUIRE(gpu::portable_fp8_quantize(&d, &leaf, w.bytes.data(), w.bytes.size, nullptr, nullptr) == CQSA_OK);
    for (size_t n = 0; n < all.size(); ++n) CHECK(difference(all[n], want[n]) == "");
    CHECK(w.clean());
  }
}

TEST_CASE("simt fp8: silu and sums of columns") {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    wishes w;
    w.plain = seed % 2, w.wild = false, w.source = CQSA_FP8_STATIC;
    problem p = make(7000 + seed, w);
    draw d(seed);
    cqsa_fp8_job& j = p.job;
    const bool silu = seed % 3 == 0;
    if (silu) {
      j.x_scale_inv.data = nullptr;
      if (bytes_of(j.x.dtype) == 1) continue;
      j.up = matrix(p, d, j.x.dtype, w.plain), j.flags |= CQSA_FP8_SILU;
      fill(d, j.up, j, false);
    }
    j.skip = nullptr, j.column_sum_stride = 1;
    char* const sums = p.take(size_t(4 * j.columns));
    j.column_sum = reinterpret_cast<float*>(sums);
    const auto before = p.snapshot();
    reference(j);
    const std::vector<float> want(j.column_sum, j.column_sum + j.columns);
    auto bytes = p.snapshot();
    p.restore(before);
    simt::device device = device_of(seed, seed % 2 ? 32 : 64);
    const cqsa_fp8_quantize_leaf leaf = leaf_of(&j, 1);
    workspace ws(device, leaf);
    REQUIRE(gpu::portable_fp8_quantize(&device, &leaf, ws.bytes.data(), ws.bytes.size, nullptr, nullptr) == CQSA_OK);
    INFO(p.text);
    for (int64_t c = 0; c < j.columns; ++c) {
      if (std::isfinite(want[size_t(c)])) CHECK(std::fabs(j.column_sum[c] - want[size_t(c)]) <= 1e-4 * (1 + std::fabs(want[size_t(c)])) + 0.02);
      std::memcpy(j.column_sum + c, &want[size_t(c)], 4);
    }
    CHECK(ws.clean());
    CHECK(difference(p, bytes) == "");  // exp of the harness is the C library's
  }
}

TEST_CASE("simt fp8: amaxes of blocks") {
  const int64_t blocks[][2] = {{0, 0}, {1, 0}, {0, 1}, {1, 128}, {128, 128}, {1, 17}, {50, 3}};
  for (uint64_t seed = 1; seed <= 12; ++seed)
    for (const auto& b : blocks) {
      problem p = make(9000 + seed);
      draw d(seed);
      cqsa_fp8_job& j = p.job;
      j.row = j.transposed = {}, j.ring = {}, j.counters = nullptr, j.rng = nullptr, j.skip = nullptr, j.source = CQSA_FP8_CURRENT, j.groups = nullptr, j.amax = nullptr;
      j.block_amax = grid(p, d, b[0], b[1], CQSA_DTYPE_F32, 0, true, false);
      REQUIRE(wrong(p, seed, seed % 2 ? 32 : 64) == "");
    }
}

TEST_CASE("simt fp8: what is wrong on the device leaves everything as it is and is counted") {
  for (const int what : {0, 1, 2, 3, 4, 5, 6}) {
    wishes w;
    w.plain = true, w.sides = 3, w.source = what < 2 || what == 6 ? CQSA_FP8_RING : CQSA_FP8_STATIC, w.block[0] = w.block[1] = 0;
    problem p = make(31, w);
    p.job.skip = nullptr, p.job.amax = reinterpret_cast<float*>(p.take(4));
    p.job.counters_stride = 1, p.job.counters = reinterpret_cast<int64_t*>(p.take(32, 0, 0));
    simt::device d = device_of(3, 32);
    const cqsa_fp8_quantize_leaf leaf = leaf_of(&p.job, 1);
    workspace ws(d, leaf);
    if (what == 0) state_of(p.job.ring).margin += 1;
    if (what == 1) ws.bytes.data()[0] ^= 1;
    if (what == 2) store_scale(p.job.row.scale_in, 0, 0, 0.0f);
    if (what == 3) store_scale(p.job.row.scale_in, 0, 0, INFINITY);
    if (what == 4) store_scale(p.job.row.scale_in, 0, 0, 1e-39f);
    if (what == 5) p.job.row.scale_inv = {p.take(4), CQSA_DTYPE_E8M0FNU, 0, {1, 1}, 1, 1, {7, 7}}, store_scale(p.job.row.scale_in, 0, 0, 100.0f);
    if (what == 6) state_of(p.job.ring).scale = INFINITY;
    p.job.counters = reinterpret_cast<int64_t*>(p.take(32, 0, 0));
    auto want = p.snapshot();
    int64_t one = 1;
    std::memcpy(want.back().data() + 24, &one, 8);
    REQUIRE(gpu::portable_fp8_quantize(&d, &leaf, ws.bytes.data(), ws.bytes.size, nullptr, nullptr) == CQSA_OK);
    CHECK(difference(p, want) == "");
  }
}

TEST_CASE("simt fp8: of several static scales a wrong one leaves its block as it is and is counted") {
  wishes w;
  w.plain = true, w.sides = 1, w.source = CQSA_FP8_STATIC, w.rows = 6, w.columns = 40, w.block[0] = 1, w.block[1] = 0, w.wild = false;
  problem p = make(3, w);
  p.job.skip = nullptr, p.job.rng = nullptr, p.job.groups = nullptr, p.job.column_sum = nullptr;
  p.job.counters_stride = 1, p.job.counters = reinterpret_cast<int64_t*>(p.take(32, 0, 0));
  store_scale(p.job.row.scale_in, 2, 0, 0.0f), store_scale(p.job.row.scale_in, 4, 0, -INFINITY);
  simt::device d = device_of(3, 32);
  const cqsa_fp8_quantize_leaf leaf = leaf_of(&p.job, 1);
  workspace ws(d, leaf);
  REQUIRE(gpu::portable_fp8_quantize(&d, &leaf, ws.bytes.data(), ws.bytes.size, nullptr, nullptr) == CQSA_OK);
  CHECK(p.job.counters[3] == 2);
  for (int64_t i = 0; i < 6; ++i)
    for (int64_t c = 0; c < 40; ++c) {
      const uint8_t got = uint8_t(*place(p.job.row.codes, p.job, i, c));
      if (i == 2 || i == 4) CHECK(got == 0x5a);
      else CHECK(got == code_of(element(p.job, i, c) * load_scale(p.job.row.scale_in, i, 0), p.job.row.codes.dtype, !(p.job.flags & CQSA_FP8_NO_SATURATE)));
    }
}

TEST_CASE("simt fp8: rings begin, fold and tell what is staged") {
  for (const int lanes : {32, 64})
    for (int count : {1, 5, 200}) {
      draw d(uint64_t(count) + uint64_t(lanes));
      problem p;
      std::vector<cqsa_fp8_ring> rings;
      for (int n = 0; n < count; ++n) rings.push_back(make_ring(p, d, n % 2 ? CQSA_DTYPE_E5M2 : CQSA_DTYPE_E4M3FN)), state_of(rings.back()).staged = n % 3 ? float(n) : 0;
      float* const amaxes = reinterpret_cast<float*>(p.take(size_t(8 * count)));
      for (int n = 0; n < 2 * count; ++n) amaxes[n] = n % 7 == 6 ? INFINITY : n % 11 == 9 ? -3.0f : float(d.to(500));
      simt::device device = device_of(5, lanes);
      cqsa_fp8_ring_leaf leaf{CQSA_FP8_RINGS_READ_STAGED, 0, rings.data(), count, amaxes, 2, 3.0f, 0};
      for (const bool given : {true, false}) {
        leaf.what = CQSA_FP8_RINGS_FOLD, leaf.amaxes = given ? amaxes : nullptr;
        const auto before = p.snapshot();
        for (int n = 0; n < count; ++n) {
          fp8::ring_state& s = state_of(rings[size_t(n)]);
          if (given || s.staged != 0) take(rings[size_t(n)], given ? amaxes[2 * n] : s.staged);
          s.staged = 0;
        }
        const auto want = p.snapshot();
        p.restore(before);
        REQUIRE(gpu::portable_fp8_rings(&device, &leaf, nullptr, nullptr) == CQSA_OK);
        CHECK(difference(p, want) == "");
        for (int n = 0; n < count; ++n) state_of(rings[size_t(n)]).staged = float(n % 4);
      }
      leaf.what = CQSA_FP8_RINGS_READ_STAGED, leaf.amaxes = amaxes;
      REQUIRE(gpu::portable_fp8_rings(&device, &leaf, nullptr, nullptr) == CQSA_OK);
      for (int n = 0; n < count; ++n) CHECK(amaxes[2 * n] == float(n % 4));
      leaf.what = CQSA_FP8_RINGS_INIT, leaf.amaxes = nullptr;
      REQUIRE(gpu::portable_fp8_rings(&device, &leaf, nullptr, nullptr) == CQSA_OK);
      for (const cqsa_fp8_ring& r : rings) {
        const fp8::ring_state& s = state_of(r);
        CHECK(fp8::is_ring(s, r));
        CHECK(s.scale == fp8::scale_of(3.0f, {s.format, s.margin, s.pow2, 0, 0}).scale);
        for (int n = 0; n < r.hist_len; ++n) CHECK(reinterpret_cast<const float*>(&s + 1)[n] == 0);
      }
    }
}

TEST_CASE("simt fp8: codes back to numbers") {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    draw d(seed);
    problem p = make(40000 + seed);
    cqsa_fp8_job& j = p.job;
    const cqsa_dtype formats[] = {CQSA_DTYPE_E4M3FN, CQSA_DTYPE_E5M2, CQSA_DTYPE_E4M3FNUZ, CQSA_DTYPE_E5M2FNUZ}, types[] = {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16};
    const bool plain = d.one_in(2);
    cqsa_fp8_dequantize_leaf a{};
    a.batch = j.batch, a.rows = j.rows, a.columns = j.columns;
    a.codes = matrix(p, d, d.of(formats), plain), a.out = matrix(p, d, d.of(types), plain);
    fill(d, a.codes, j, false);
    const int64_t blocks[][2] = {{0, 0}, {1, 0}, {0, 1}, {1, 128}, {128, 128}, {1, 17}};
    const auto& b = blocks[d.to(j.groups ? 2 : 6)];
    const bool each = j.groups && b[0] == 0;
    a.scale_inv = grid(p, d, b[0], b[1], d.one_in(2) ? CQSA_DTYPE_F32 : CQSA_DTYPE_E8M0FNU, int32_t(d.to(3)), true, each);
    a.per_group = each, a.groups = j.groups, a.groups_dtype = j.groups_dtype, a.groups_stride = j.groups_stride, a.num_groups = j.num_groups;
    for (int64_t r = 0; r < a.scale_inv.rows; ++r)
      for (int64_t c = 0; c < a.scale_inv.columns; ++c) store_scale(a.scale_inv, r, c, float(1 + d.to(100)) / 16);
    const auto before = p.snapshot();
    for (int64_t i = 0; i < used_rows(j); ++i)
      for (int64_t c = 0; c < j.columns; ++c) {
        const float y = decode(place(a.codes, j, i, c), a.codes.dtype) * load_scale(a.scale_inv, block_row(j, a.scale_inv, each, i), c / a.scale_inv.block[1]);
        encode(place(a.out, j, i, c), a.out.dtype, std::isnan(y) ? fp8::float_of(0x7fc00000u) : y);
      }
    const auto want = p.snapshot();
    p.restore(before);
    simt::device device = device_of(seed, seed % 2 ? 32 : 64);
    REQUIRE(gpu::portable_fp8_dequantize(&device, &a, nullptr, nullptr) == CQSA_OK);
    REQUIRE(difference(p, want) == "");
  }
}

TEST_CASE("simt fp8: scales from amaxes, in another layout, and bytes transposed") {
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    draw d(seed);
    problem p = make(50000 + seed);
    cqsa_fp8_scale_leaf a{};
    a.format = CQSA_DTYPE_E4M3FN, a.margin = int32_t(d.to(3)), a.pow2 = int32_t(d.to(2)), a.eps = d.one_in(3) ? 0.25f : 0;
    const bool relayout = d.one_in(2);
    a.amax = grid(p, d, 1, 16, CQSA_DTYPE_F32, 0, !relayout, false);
    a.scale_inv_in = grid(p, d, 1, 16, CQSA_DTYPE_E8M0FNU, int32_t(d.to(3)), relayout, false);
    a.scale = grid(p, d, 1, 16, CQSA_DTYPE_F32, 0, !relayout, false);
    a.scale_inv = grid(p, d, 1, 16, d.one_in(2) ? CQSA_DTYPE_F32 : CQSA_DTYPE_E8M0FNU, int32_t(d.to(3)), true, false);
    const cqsa_scale_grid& from = relayout ? a.scale_inv_in : a.amax;
    for (int64_t r = 0; r < from.rows; ++r)
      for (int64_t c = 0; c < from.columns; ++c) store_scale(from, r, c, d.one_in(9) ? 0.0f : float(d.to(400)) / 7);
    const auto before = p.snapshot();
    for (int64_t r = 0; r < from.rows; ++r)
      for (int64_t c = 0; c < from.columns; ++c) {
        const float x = load_scale(from, r, c);
        const fp8::scale_pair pair = relayout ? fp8::scale_pair{1, x, 0} : fp8::scale_of(x, {a.format, a.margin, a.pow2 || powers(a.scale_inv), a.eps, 0});
        store_scale(a.scale, r, c, pair.scale), store_scale(a.scale_inv, r, c, pair.scale_inv);
      }
    clear_padding(a.scale_inv);
    const auto want = p.snapshot();
    p.restore(before);
    simt::device device = device_of(seed, seed % 2 ? 32 : 64);
    REQUIRE(gpu::portable_fp8_scale(&device, &a, nullptr, nullptr) == CQSA_OK);
    REQUIRE(difference(p, want) == "");

    const cqsa_fp8_job& j = p.job;
    const int64_t rows = j.rows, columns = j.columns, pad = seed % 3;
    uint8_t* const x = reinterpret_cast<uint8_t*>(p.take(size_t(rows * (columns + pad)), size_t(seed % 5)));
    uint8_t* const out = reinterpret_cast<uint8_t*>(p.take(size_t(columns * (rows + pad)), size_t(seed % 2)));
    for (int64_t i = 0; i < rows * (columns + pad); ++i) x[i] = uint8_t(d.to(256));
    cqsa_fp8_transpose_leaf t{rows, columns, x, out, {columns + pad, 1}, {1, rows + pad}};
    const auto unturned = p.snapshot();
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t c = 0; c < columns; ++c) out[i * t.out_stride[0] + c * t.out_stride[1]] = x[i * t.x_stride[0] + c];
    const auto turned = p.snapshot();
    p.restore(unturned);
    REQUIRE(gpu::portable_fp8_transpose(&device, &t, nullptr, nullptr) == CQSA_OK);
    REQUIRE(difference(p, turned) == "");
  }
}

TEST_CASE("simt fp8: nothing in, and outputs that lie nowhere") {
  for (const int64_t columns : {int64_t(0), int64_t(40)})
    for (const int sides : {1, 2, 3}) {
      problem p;
      draw d(5);
      cqsa_fp8_job& j = p.job;
      j.batch = 1, j.rows = columns ? 0 : 7, j.columns = columns, j.source = CQSA_FP8_CURRENT;
      j.x = {nullptr, CQSA_DTYPE_BF16, 0, {0, columns, 1}};
      const cqsa_fp8_output o{{nullptr, CQSA_DTYPE_E4M3FN, 0, {0, columns, 1}}, {}, {}, {p.take(4), CQSA_DTYPE_F32, 0, {1, 1}, 1, 1, {1, 1}}, 1, 0};
      if (sides & 1) j.row = o, j.row.scale = j.row.scale_inv, j.row.scale.data = nullptr;
      if (sides & 2) j.transposed = o, j.transposed.scale = o.scale_inv, j.transposed.scale.data = nullptr, j.transposed.scale_inv.data = p.take(4);
      j.amax = reinterpret_cast<float*>(p.take(4));
      simt::device device = device_of(1, 32);
      const cqsa_fp8_quantize_leaf leaf = leaf_of(&j, 1);
      workspace ws(device, leaf);
      REQUIRE(gpu::portable_fp8_quantize(&device, &leaf, ws.bytes.data(), ws.bytes.size, nullptr, nullptr) == CQSA_OK);
      CHECK(*j.amax == 0);
      if (sides & 1) CHECK(*static_cast<float*>(j.row.scale_inv.data) == 1);
      if (sides & 2) CHECK(*static_cast<float*>(j.transposed.scale_inv.data) == 1);
      CHECK(ws.clean());
    }
}

TEST_CASE("simt fp8: one launch, two for the scale of a tensor from its own amax") {
  for (const auto& [source, block, launches] : {std::tuple{CQSA_FP8_STATIC, 0, 1}, {CQSA_FP8_RING, 0, 1}, {CQSA_FP8_CURRENT, 0, 2}, {CQSA_FP8_CURRENT, 128, 1}})
    for (const int sides : {1, 2, 3}) {
      wishes w;
      w.plain = true, w.source = source, w.sides = sides, w.rows = w.columns = 256, w.block[0] = w.block[1] = block;
      problem p = make(4, w);
      simt::device device = device_of(1, 32);
      const cqsa_fp8_quantize_leaf leaf = leaf_of(&p.job, 1);
      workspace ws(device, leaf);
      const int64_t before = device.launches;
      REQUIRE(gpu::portable_fp8_quantize(&device, &leaf, ws.bytes.data(), ws.bytes.size, nullptr, nullptr) == CQSA_OK);
      CHECK(device.launches - before == launches);
    }
}

// That there is no mistake without one is for the plain problems above. 31, the fence, is nothing here: the harness sees no weak order. 35 is
// a swizzle of one side alone.
TEST_CASE("simt fp8: every mutant is noticed") {
  for (const int mutant : {32, 33, 35}) {
    INFO("CQSA_MUTANT(" << mutant << ")");
    cqsa_simt_mutant = mutant;
    CHECK(any_fails());
    cqsa_simt_mutant = 0;
  }
}
