// SPDX-License-Identifier: Apache-2.0
// Selected-cell problems as specs for Volta have them, their exact answer in f64, and a run on the SIMT harness.
#pragma once

#include "sm70_checks.h"

namespace {

struct selected_problem {
  cqsa_selected_leaf leaf{};
  tensor q, k, v, k_scale, v_scale, out, lse, exact_out, exact_lse;
  std::vector<int32_t> pages, cells, counts;
  cqsa_selected_leaf with(int32_t precision) const {
    cqsa_selected_leaf x = leaf;
    x.q = q.view, x.k = k.view, x.v = v.view, x.k_scale = k_scale.view, x.v_scale = v_scale.view, x.out = out.view, x.lse = lse.view;
    x.page_table = pages.data(), x.cells = cells.data(), x.counts = counts.data();
    x.precision = precision;
    x.chip.tier = 70, x.chip.compute_units = 80, x.chip.shared_bytes = 96 * 1024;
    return x;
  }
};

struct selected_sizes {
  int64_t queries = 3, heads = 12, kv_heads = 1, head_dim = 256, head_dim_v = 256, context = 2100, page_size = 64, budget = 2051;
  cqsa_dtype q = CQSA_DTYPE_F32, kv = CQSA_DTYPE_I8;
  int64_t group = 64;
  layout how = compact;
};

// Pools of the generator of parity runs: int8 codes uniform, scales 0.005 .. 0.03, or f16 K ~ N(0, 1.5) and V ~ N(0, 1); a shuffled
// page table.
void make_pools(dice& d, const selected_sizes& s, selected_problem& p) {
  const int64_t pages = (s.context + s.page_size - 1) / s.page_size;
  auto pool = [&](int64_t channels) { return tensor(s.kv, {pages + 1, s.kv_heads, s.page_size, channels}, s.how); };
  p.k = pool(s.head_dim), p.v = pool(s.head_dim_v);
  const bool codes = s.kv == CQSA_DTYPE_I8;
  p.k.fill([&](auto...) { return codes ? double(d.upto(254) - 127) : 1.5 * d.normal(); });
  p.v.fill([&](auto...) { return codes ? double(d.upto(254) - 127) : d.normal(); });
  auto scale = [&](auto...) { return 0.005 + 0.025 * double(d.upto(10000)) / 10000; };
  if (codes) {
    p.leaf.kv_group = s.group;
    p.k_scale = tensor(CQSA_DTYPE_F16, {pages + 1, s.kv_heads, s.page_size, (s.head_dim + s.group - 1) / s.group});
    p.v_scale = tensor(CQSA_DTYPE_F16, {pages + 1, s.kv_heads, s.page_size, (s.head_dim_v + s.group - 1) / s.group});
    p.k_scale.fill(scale), p.v_scale.fill(scale);
  }
  for (int64_t i = 0; i < pages; ++i) p.pages.push_back(int32_t(i));
  std::shuffle(p.pages.begin(), p.pages.end(), d.rng);
  p.leaf.num_pages = pages + 1, p.leaf.page_size = s.page_size, p.leaf.pages = pages;
  p.leaf.page_table_stride[0] = 0, p.leaf.page_table_stride[1] = 1;
}

// The last 512 cells and older ones, of which about three in a hundred change from query to query. A short context is taken whole.
void make_lists(dice& d, const selected_sizes& s, selected_problem& p) {
  const int64_t capacity = std::min(s.context, s.budget), recent = std::min<int64_t>(capacity, 512), old = s.context - recent;
  std::vector<int32_t> order(static_cast<size_t>(old));
  for (size_t i = 0; i < order.size(); ++i) order[i] = int32_t(i);
  std::shuffle(order.begin(), order.end(), d.rng);
  const size_t taken = size_t(capacity - recent);
  for (int64_t q = 0; q < s.queries; ++q) {
    for (size_t i = 0; i < taken && order.size() > taken; ++i)
      if (d.once_in(33)) std::swap(order[i], order[taken + size_t(d.upto(int64_t(order.size() - taken) - 1))]);
    std::vector<int32_t> list(order.begin(), order.begin() + int64_t(taken));
    for (int64_t c = old; c < s.context; ++c) list.push_back(int32_t(c));
    std::sort(list.begin(), list.end());
    p.cells.insert(p.cells.end(), list.begin(), list.end());
    p.counts.push_back(int32_t(capacity));
  }
  p.leaf.capacity = capacity, p.leaf.cells_stride[0] = capacity, p.leaf.cells_stride[1] = 1, p.leaf.counts_stride = 1;
}

selected_problem make_selected(const selected_sizes& s, uint32_t seed) {
  dice d(seed);
  selected_problem p;
  cqsa_selected_leaf& x = p.leaf;
  x.struct_size = sizeof x;
  x.total_q = s.queries, x.num_heads = s.heads, x.num_kv_heads = s.kv_heads, x.head_dim = s.head_dim, x.head_dim_v = s.head_dim_v;
  x.softmax_scale = 1 / std::sqrt(double(s.head_dim));
  make_pools(d, s, p);
  make_lists(d, s, p);
  p.q = tensor(s.q, {1, s.heads, s.queries, s.head_dim}, s.how);
  p.q.fill([&](auto...) { return 2 * d.normal(); });
  p.out = tensor(CQSA_DTYPE_F32, {1, s.heads, s.queries, s.head_dim_v}, s.how);
  p.lse = tensor(CQSA_DTYPE_F32, {1, s.heads, s.queries, 1});
  p.exact_out = tensor(CQSA_DTYPE_F64, {1, s.heads, s.queries, s.head_dim_v});
  p.exact_lse = tensor(CQSA_DTYPE_F64, {1, s.heads, s.queries, 1});
  return p;
}

// Page and row of entry n of a query's list; false where it is skipped or not there.
bool cell_at(const selected_problem& p, int64_t query, int64_t n, int64_t* page, int64_t* row) {
  const cqsa_selected_leaf& x = p.leaf;
  const int32_t* list = p.cells.data() + query * x.cells_stride[0];
  const int64_t cell = list[n * x.cells_stride[1]];
  if (cell < 0 || (n > 0 && cell <= list[(n - 1) * x.cells_stride[1]]) || cell / x.page_size >= x.pages) return false;
  *page = p.pages[size_t(query * x.page_table_stride[0] + cell / x.page_size * x.page_table_stride[1])], *row = cell % x.page_size;
  return *page >= 0 && *page < x.num_pages;
}

double scaled(const tensor& x, const tensor& scale, int64_t group, int64_t page, int64_t g, int64_t row, int64_t c) {
  return cqsa::cpu::element(x.view, page, g, row, c) * (scale.empty() ? 1.0 : scale.read(page, g, row, c / group));
}

// The formula of cqsa.h, section 11, in f64.
void exact_selected(selected_problem& p) {
  const cqsa_selected_leaf& x = p.leaf;
  for (int64_t i = 0; i < x.total_q; ++i)
    for (int64_t h = 0; h < x.num_heads; ++h) {
      const int64_t g = h / (x.num_heads / x.num_kv_heads), count = std::min<int64_t>(std::max(p.counts[size_t(i)], 0), x.capacity);
      std::vector<double> s(size_t(count), -inf), o(size_t(x.head_dim_v), 0.0);
      double m = -inf, sum = 0;
      int64_t page, row;
      for (int64_t n = 0; n < count; ++n) {
        if (!cell_at(p, i, n, &page, &row)) continue;
        double dot = 0;
        for (int64_t c = 0; c < x.head_dim; ++c) dot += p.q.read(0, h, i, c) * scaled(p.k, p.k_scale, x.kv_group, page, g, row, c);
        s[size_t(n)] = dot * x.softmax_scale;
        m = std::max(m, s[size_t(n)]);
      }
      for (int64_t n = 0; n < count; ++n) {
        if (!cell_at(p, i, n, &page, &row)) continue;
        const double e = std::exp(s[size_t(n)] - m);
        sum += e;
        for (int64_t c = 0; c < x.head_dim_v; ++c) o[size_t(c)] += e * scaled(p.v, p.v_scale, x.kv_group, page, g, row, c);
      }
      for (int64_t c = 0; c < x.head_dim_v; ++c) p.exact_out.write(0, h, i, c, sum == 0 ? 0 : o[size_t(c)] / sum);
      p.exact_lse.write(0, h, i, 0, sum == 0 ? -inf : m + std::log(sum));
    }
}

std::string run_selected(selected_problem& p, int32_t precision, uint64_t seed) {
  cqsa::simt::device device = volta(seed);
  for (tensor* t : {&p.out, &p.lse}) t->fill([](auto...) { return nan64; });
  const cqsa_selected_leaf leaf = p.with(precision);
  char reason[256] = "";
  if (cqsa::gpu::sm70_selected_impl.probe(&leaf, reason, sizeof reason) != CQSA_OK) return std::string("declined: ") + reason;
  if (cqsa::gpu::sm70_selected_impl.launch(&device, &leaf, nullptr, 0, nullptr, nullptr) != CQSA_OK) return cqsa::simt::last_error();
  return "";
}

// Largest distance from the exact answer, and the largest magnitude of that.
struct selected_error {
  double out = 0, most = 0;
};
selected_error error_of(const selected_problem& p) {
  selected_error e;
  p.exact_out.each([&](int64_t b, int64_t h, int64_t r, int64_t c) {
    const double want = p.exact_out.read(b, h, r, c), got = p.out.read(b, h, r, c);
    e.out = std::isnan(got) ? inf : std::max(e.out, std::fabs(got - want));
    e.most = std::max(e.most, std::fabs(want));
  });
  return e;
}

// "" when the kernel gives what the formula says.
std::string selected_mistake(selected_problem& p, int32_t precision, uint64_t seed) {
  guarded out(p.out), lse(p.lse);
  const std::string text = run_selected(p, precision, seed);
  if (!text.empty()) return text;
  const bool exact_q = p.q.view.dtype == CQSA_DTYPE_F16, split = precision == CQSA_PRECISION_SPLIT;
  const double v = error_of(p).most + 1;
  const std::string a = differs(p.out, p.exact_out, v * (split ? 1e-5 : exact_q ? 0x1p-9 : 0x1p-6));
  const std::string b = differs(p.lse, p.exact_lse, split || exact_q ? 3e-5 : 0x1p-6);
  if (!a.empty()) return "out " + a;
  if (!b.empty()) return "lse " + b;
  return out.intact() && lse.intact() ? "" : "wrote beside an output";
}

}  // namespace
