// SPDX-License-Identifier: Apache-2.0
// Attention over selected cells by the sm_70 kernels in the harness, in FAST and SPLIT, against the formula in f64.
#include "sm70_selected.h"

namespace {

void check_selected(selected_problem& p, uint64_t seed = 1) {
  exact_selected(p);
  for (const int32_t precision : {CQSA_PRECISION_FAST, CQSA_PRECISION_SPLIT}) {
    INFO((precision == CQSA_PRECISION_SPLIT ? "split" : "fast"));
    const std::string text = selected_mistake(p, precision, seed);
    if (!text.empty()) FAIL(text);
  }
}

}  // namespace

TEST_CASE("simt sm70 selected: heads, head dims, types and groups") {
  int n = 0;
  for (const cqsa_dtype q : {CQSA_DTYPE_F32, CQSA_DTYPE_F16})
    for (const cqsa_dtype kv : {CQSA_DTYPE_I8, CQSA_DTYPE_F16})
      for (const auto& [heads, kv_heads] : {std::pair<int, int>{24, 2}, {3, 3}, {40, 2}})
        for (const auto& [d, dv] : {std::pair<int, int>{256, 256}, {128, 72}, {40, 64}}) {
          INFO("heads " << heads << " on " << kv_heads << " head_dim " << d << " head_dim_v " << dv << " case " << n);
          selected_sizes s;
          s.queries = 2, s.heads = heads, s.kv_heads = kv_heads, s.head_dim = d, s.head_dim_v = dv, s.context = 150, s.page_size = 16, s.budget = 90;
          s.q = q, s.kv = kv, s.group = int64_t(32) << n % 3, s.how = layout(n % num_layouts);
          selected_problem p = make_selected(s, uint32_t(++n));
          check_selected(p, uint64_t(n));
        }
}

TEST_CASE("simt sm70 selected: missing pages, lists with mistakes, counts out of range, no cells at all") {
  selected_sizes s;
  s.queries = 6, s.heads = 5, s.head_dim = s.head_dim_v = 64, s.context = 200, s.page_size = 8, s.budget = 100;
  selected_problem p = make_selected(s, 7);
  p.pages[3] = -1, p.pages[9] = 26, p.pages[17] = INT32_MAX;
  auto cell = [&](int64_t q, int64_t n) -> int32_t& { return p.cells[size_t(q * 100 + n)]; };
  p.counts = {100, -5, 1000, 0, 33, 64};
  cell(0, 5) = cell(0, 4);                      // not above the one before
  cell(0, 20) = -7, cell(0, 40) = 200, cell(0, 60) = INT32_MAX;
  cell(2, 0) = -1, cell(2, 99) = 0;
  for (int n = 0; n < 33; ++n) cell(4, n) = 24 + n % 8;  // all but the first ones on one page, and that is missing
  check_selected(p);
  REQUIRE(p.lse.read(0, 2, 1, 0) == -inf);
  REQUIRE(p.out.read(0, 2, 3, 5) == 0);
}

TEST_CASE("simt sm70 selected: a page table for each query, strides of lists") {
  selected_sizes s;
  s.queries = 3, s.heads = 8, s.head_dim = s.head_dim_v = 128, s.context = 120, s.page_size = 16, s.budget = 70, s.kv = CQSA_DTYPE_F16;
  selected_problem p = make_selected(s, 9);
  const std::vector<int32_t> pages = p.pages, cells = p.cells;
  p.pages.clear(), p.cells.assign(size_t(3 * 70 * 2), -1);
  for (int q = 0; q < 3; ++q)
    for (size_t i = 0; i < pages.size(); ++i) p.pages.push_back(pages[(i + size_t(q)) % pages.size()]);
  for (size_t i = 0; i < cells.size(); ++i) p.cells[2 * i] = cells[i];
  p.leaf.page_table_stride[0] = int64_t(pages.size());
  p.leaf.cells_stride[0] = 140, p.leaf.cells_stride[1] = 2;
  check_selected(p);
}

TEST_CASE("simt sm70 selected: NaN in cells that are not selected, and in one that is") {
  selected_sizes s;
  s.queries = 2, s.heads = 4, s.head_dim = s.head_dim_v = 64, s.context = 60, s.page_size = 4, s.budget = 60, s.kv = CQSA_DTYPE_F16;
  selected_problem p = make_selected(s, 11);
  for (int64_t c = 0; c < 64; ++c) {
    p.v.write(p.pages[2], 0, 1, c, nan64), p.k.write(p.pages[2], 0, 1, c, nan64);  // cell 9
    p.v.write(p.pages[5], 0, 0, c, c % 2 ? inf : nan64);                           // cell 20
  }
  for (int q = 0; q < 2; ++q)
    for (int n = 0; n < 59; ++n) p.cells[size_t(q * 60 + n)] = n < 9 ? n : n + 1;
  p.counts = {59, 19};  // the second query ends before cell 20
  check_selected(p);
  REQUIRE(std::isfinite(p.out.read(0, 0, 1, 0)));
}

TEST_CASE("simt sm70 selected: what is declined, and why") {
  selected_sizes s;
  s.context = 40;
  const selected_problem p = make_selected(s, 1);
  char reason[256] = "";
  auto probe = [&](auto change) {
    cqsa_selected_leaf x = p.with(CQSA_PRECISION_SPLIT);
    change(x);
    return cqsa::gpu::sm70_selected_impl.probe(&x, reason, sizeof reason) == CQSA_OK ? std::string() : std::string(reason);
  };
  CHECK(probe([](auto&) {}) == "");
  CHECK(probe([](auto& x) { x.chip.tier = 80; }) == "the device has no sm_70 code");
  CHECK(probe([](auto& x) { x.precision = CQSA_PRECISION_F32; }).find("f32 products") != std::string::npos);
  CHECK(probe([](auto& x) { x.precision = CQSA_PRECISION_DEFAULT; }).find("FAST or SPLIT") != std::string::npos);
  CHECK(probe([](auto& x) { x.q.dtype = CQSA_DTYPE_BF16; }).find("bf16") != std::string::npos);
  CHECK(probe([](auto& x) { x.head_dim = 320; }).find("at most 256") != std::string::npos);
  CHECK(probe([](auto& x) { x.k.dtype = CQSA_DTYPE_F16; }).find("both one of these") != std::string::npos);
  // FAST means the matrix unit: bf16 is not handed on to the portable kernels there.
  cqsa_selected_leaf x = p.with(CQSA_PRECISION_FAST);
  x.q.dtype = CQSA_DTYPE_BF16;
  for (const cqsa_selected_impl* impl : {&cqsa::gpu::sm70_selected_impl, &cqsa::gpu::portable_selected}) {
    CHECK(impl->probe(&x, reason, sizeof reason) == CQSA_ERROR_UNSUPPORTED);
    CHECK(std::string(reason).find("precision is FAST and q is bf16") == 0);
  }
}
