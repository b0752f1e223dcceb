// SPDX-License-Identifier: Apache-2.0
// Random problems of selected-cell attention with their answer in fp64, for the kernels on the SIMT harness.
#pragma once

#include "tests/unit/cpu_leaf_problem.h"

#include "backends/gpu/selected_fill.h"
#include "apart.h"
#include "simt_port.h"
#include "simt_runtime.h"

#include <algorithm>
#include <cstdio>
#include <functional>

namespace {

// What a problem is made from.
struct selected_shape_of_problem {
  int64_t total_q = 2, kv_heads = 2, group_heads = 3, head_dim = 64, head_dim_v = 64, capacity = 70, page_size = 7, pool = 30;
  cqsa_dtype q_type = CQSA_DTYPE_F32, kv_type = CQSA_DTYPE_I8, out_type = CQSA_DTYPE_F32;
  int64_t kv_group = 64;
  layout q_layout = compact, kv_layout = bshd, out_layout = compact;
  bool own_tables = false;  // a page table for each query
  bool wrong_ids = true;    // some entries are to be skipped, some pages are not there
  double q_size = 1.0;      // standard deviation of q
  int32_t precision = CQSA_PRECISION_F32;
};

struct selected_problem {
  selected_shape_of_problem s;
  tensor q, k, v, k_scale, v_scale, out, lse;
  std::vector<int32_t> table, cells, counts;
  int64_t pages = 0;
  std::vector<double> exact_out, exact_lse;
  std::mt19937_64 random;

  selected_problem(const selected_shape_of_problem& shape, uint64_t seed);
  double normal() { return std::normal_distribution<double>()(random); }
  int64_t between(int64_t a, int64_t b) { return a + int64_t(random() % uint64_t(b - a + 1)); }
  cqsa_selected_leaf leaf() const;
  // Page and row of entry n of query i's list, or page -1.
  std::pair<int64_t, int64_t> place(int64_t i, int64_t n) const;
  // Multiplies the scales of k by one factor, those of v by powers of a random number up to the other, and answers anew.
  void scale_scales(double k_factor, double v_factor);
  int64_t count(int64_t i) const { return std::clamp<int64_t>(counts[size_t(i)], 0, s.capacity); }

 private:
  void make_tables();
  void make_list(int64_t i);
  void make_cells();
  void answer(int64_t i, int64_t h);
  double value(const tensor& x, const tensor& scale, int64_t page, int64_t g, int64_t row, int64_t c) const {
    if (scale.empty()) return x.read(page, g, row, c);
    return double(*reinterpret_cast<const int8_t*>(x.at(page, g, row, c))) * scale.read(page, g, row, c / s.kv_group);
  }
};

selected_problem::selected_problem(const selected_shape_of_problem& shape, uint64_t seed) : s(shape), random(seed) {
  const int64_t heads = s.kv_heads * s.group_heads;
  q = tensor(s.q_type, {1, heads, s.total_q, s.head_dim}, s.q_layout);
  k = tensor(s.kv_type, {s.pool, s.kv_heads, s.page_size, s.head_dim}, s.kv_layout);
  v = tensor(s.kv_type, {s.pool, s.kv_heads, s.page_size, s.head_dim_v}, s.kv_layout);
  if (s.kv_type == CQSA_DTYPE_I8) {
    k_scale = tensor(CQSA_DTYPE_F16, {s.pool, s.kv_heads, s.page_size, (s.head_dim + s.kv_group - 1) / s.kv_group}, s.kv_layout);
    v_scale = tensor(CQSA_DTYPE_F16, {s.pool, s.kv_heads, s.page_size, (s.head_dim_v + s.kv_group - 1) / s.kv_group}, s.kv_layout);
  }
  out = tensor(s.out_type, {1, heads, s.total_q, s.head_dim_v}, s.out_layout);
  lse = tensor(CQSA_DTYPE_F32, {1, heads, s.total_q, 1}, s.out_layout);
  q.fill([&](auto...) { return s.q_size * normal(); });
  make_tables();
  for (int64_t i = 0; i < s.total_q; ++i) make_list(i);
  make_cells();
  exact_out.resize(size_t(heads * s.total_q * s.head_dim_v));
  exact_lse.resize(size_t(heads * s.total_q));
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t i = 0; i < s.total_q; ++i) answer(i, h);
}

void selected_problem::make_tables() {
  pages = std::max<int64_t>(1, s.pool - 2);
  for (int64_t n = 0; n < (s.own_tables ? s.total_q : 1); ++n) {
    std::vector<int32_t> order(size_t(s.pool), 0);
    for (size_t i = 0; i < order.size(); ++i) order[i] = int32_t(i);
    std::shuffle(order.begin(), order.end(), random);
    for (int64_t i = 0; i < pages; ++i) {
      const bool gone = s.wrong_ids && between(0, 9) == 0;
      table.push_back(gone ? int32_t(between(0, 1) ? -1 : s.pool + between(0, 3)) : order[size_t(i)]);
    }
  }
}

void selected_problem::make_list(int64_t i) {
  const int64_t most = pages * s.page_size;
  int64_t id = between(0, 3);
  for (int64_t n = 0; n < s.capacity; ++n) {
    cells.push_back(int32_t(id));
    id += between(1, std::max<int64_t>(1, 2 * most / std::max<int64_t>(s.capacity, 1)));
    if (!s.wrong_ids) id = std::min(id, most - s.capacity + n + 1);
    if (s.wrong_ids && between(0, 11) == 0) cells.back() = int32_t(between(0, 2) ? between(-3, most + 5) : -2147483647 - 1);
  }
  counts.push_back(int32_t(s.capacity));
  if (s.wrong_ids && i % 3 == 1) counts.back() = int32_t(between(0, 1) ? between(-2, s.capacity) : s.capacity + 1000);
}

std::pair<int64_t, int64_t> selected_problem::place(int64_t i, int64_t n) const {
  const int64_t at = i * s.capacity + n, id = cells[size_t(at)];
  if (id < 0 || (n > 0 && id <= cells[size_t(at - 1)]) || id / s.page_size >= pages) return {-1, 0};
  const int64_t page = table[size_t((s.own_tables ? i * pages : 0) + id / s.page_size)];
  return {page >= 0 && page < s.pool ? page : -1, id % s.page_size};
}

// Whatever nobody selected is NaN, in the pools or, where these hold codes, in their scales.
void selected_problem::make_cells() {
  const bool codes = s.kv_type == CQSA_DTYPE_I8;
  for (tensor* x : {&k, &v}) x->fill([&](auto...) { return codes ? double(between(-127, 127)) : nan64; });
  if (codes)
    for (tensor* x : {&k_scale, &v_scale}) x->fill([&](auto...) { return nan64; });
  for (int64_t i = 0; i < s.total_q; ++i)
    for (int64_t n = 0; n < count(i); ++n) {
      const auto [page, row] = place(i, n);
      if (page < 0) continue;
      for (int64_t g = 0; g < s.kv_heads; ++g)
        for (tensor* x : {codes ? &k_scale : &k, codes ? &v_scale : &v})
          for (int64_t c = 0; c < x->shape[3]; ++c)
            x->write(page, g, row, c, codes ? 0.005 + 0.025 * double(between(0, 1000)) / 1000 : normal());
    }
}

void selected_problem::answer(int64_t i, int64_t h) {
  const int64_t g = h / s.group_heads;
  std::vector<double> logits, sums(size_t(s.head_dim_v), 0.0);
  double top = -inf, l = 0;
  for (int64_t n = 0; n < count(i); ++n) {
    const auto [page, row] = place(i, n);
    double x = 0;
    for (int64_t c = 0; page >= 0 && c < s.head_dim; ++c) x += q.read(0, h, i, c) * value(k, k_scale, page, g, row, c);
    logits.push_back(page < 0 ? -inf : x / std::sqrt(double(s.head_dim)));
    top = std::max(top, logits.back());
  }
  for (int64_t n = 0; n < int64_t(logits.size()); ++n) {
    if (logits[size_t(n)] == -inf) continue;
    const auto [page, row] = place(i, n);
    const double e = std::exp(logits[size_t(n)] - top);
    l += e;
    for (int64_t c = 0; c < s.head_dim_v; ++c) sums[size_t(c)] += e * value(v, v_scale, page, g, row, c);
  }
  exact_lse[size_t(h * s.total_q + i)] = l > 0 ? top + std::log(l) : -inf;
  for (int64_t c = 0; c < s.head_dim_v; ++c) exact_out[size_t((h * s.total_q + i) * s.head_dim_v + c)] = l > 0 ? sums[size_t(c)] / l : 0;
}

void selected_problem::scale_scales(double k_factor, double v_factor) {
  k_scale.fill([&](int64_t b, int64_t h, int64_t r, int64_t c) { return k_scale.read(b, h, r, c) * k_factor; });
  v_scale.fill([&](int64_t b, int64_t h, int64_t r, int64_t c) {
    return v_scale.read(b, h, r, c) * std::pow(v_factor, double(between(-1, 1)));
  });
  for (int64_t h = 0; h < s.kv_heads * s.group_heads; ++h)
    for (int64_t i = 0; i < s.total_q; ++i) answer(i, h);
}

cqsa_selected_leaf selected_problem::leaf() const {
  cqsa_selected_leaf x{};
  x.struct_size = sizeof x;
  x.total_q = s.total_q, x.num_heads = s.kv_heads * s.group_heads, x.num_kv_heads = s.kv_heads;
  x.head_dim = s.head_dim, x.head_dim_v = s.head_dim_v;
  x.num_pages = s.pool, x.page_size = s.page_size, x.pages = pages, x.capacity = s.capacity;
  x.q = q.view, x.k = k.view, x.v = v.view, x.out = out.view, x.lse = lse.view;
  if (!k_scale.empty()) x.k_scale = k_scale.view, x.v_scale = v_scale.view, x.kv_group = s.kv_group;
  x.page_table = table.data(), x.cells = cells.data(), x.counts = counts.data();
  x.page_table_stride[0] = s.own_tables ? pages : 0, x.page_table_stride[1] = 1;
  x.cells_stride[0] = s.capacity, x.cells_stride[1] = 1, x.counts_stride = 1;
  x.softmax_scale = 1.0 / std::sqrt(double(s.head_dim));
  x.precision = s.precision;
  x.chip = {80, 4, 160 * 1024, 0};
  return x;
}

// Largest |out - exact| beyond the rounding of out's type, and the same of lse, as parts of the largest |exact|. NaN: something is NaN
// or infinite that should not be, or the other way round.
struct selected_error {
  double out = 0, lse = 0;
};
inline void take_error(double got, double want, double unit, double* worst) {
  if (got == want || *worst != *worst) return;
  const double e = std::abs(got - want) - unit * std::abs(want);
  if (!(e <= *worst)) *worst = std::isfinite(e) ? e : nan64;
}
inline selected_error error_of(const selected_problem& p) {
  selected_error e;
  const double unit = p.s.out_type == CQSA_DTYPE_F32 ? 0x1p-24 : p.s.out_type == CQSA_DTYPE_F16 ? 0x1p-11 : 0x1p-8;
  double largest = 1e-30;
  for (const double x : p.exact_out) largest = std::max(largest, std::abs(x));
  p.out.each([&](int64_t, int64_t h, int64_t i, int64_t c) {
    take_error(p.out.read(0, h, i, c), p.exact_out[size_t((h * p.s.total_q + i) * p.s.head_dim_v + c)], unit, &e.out);
  });
  p.lse.each([&](int64_t, int64_t h, int64_t i, int64_t) {
    take_error(p.lse.read(0, h, i, 0), p.exact_lse[size_t(h * p.s.total_q + i)], 0x1p-22, &e.lse);
  });
  e.out /= largest;
  return e;
}

// Runs the implementation; "" or what went wrong.
inline std::string run_selected(const cqsa_selected_impl& impl, selected_problem& p, int lanes, uint64_t seed) {
  cqsa::simt::device device;
  device.facts = {lanes, 4, 160 * 1024, 80, lanes == 32 ? 80 : 0}, device.seed = seed;
  const cqsa_selected_leaf leaf = p.leaf();
  char reason[256] = "";
  if (impl.probe(&leaf, reason, sizeof reason) != CQSA_OK) return std::string("declined: ") + reason;
  guarded out(p.out), lse(p.lse);
  std::vector<char> memory(impl.workspace(&leaf, 1) + 64);
  char* workspace = memory.data() + (64 - (reinterpret_cast<uintptr_t>(memory.data()) & 63)) % 64;
  const uint64_t bytes = memory.size() - 64;
  if (impl.launch(&device, &leaf, bytes ? workspace : nullptr, bytes, nullptr, nullptr) != CQSA_OK) return cqsa::simt::last_error();
  return out.intact() && lse.intact() ? "" : "wrote beside an output";
}

inline std::string selected_mistake(const cqsa_selected_impl& impl, selected_problem& p, int lanes, uint64_t seed, double tolerance) {
  const std::string text = run_selected(impl, p, lanes, seed);
  if (!text.empty()) return text;
  const selected_error e = error_of(p);
  if (e.out <= tolerance && e.lse <= 20 * tolerance) return "";
  char line[160];
  std::snprintf(line, sizeof line, "errors %.3g of out, %.3g of lse", e.out, e.lse);
  return line;
}

// Whether one of the checks notices, in a process of its own, which a mutant may crash.
using selected_check = std::function<std::string()>;
inline bool noticed(const std::vector<selected_check>& checks) {
  return cqsa::simt::fails_apart([&] {
    return std::any_of(checks.begin(), checks.end(), [](const selected_check& check) { return !check().empty(); });
  });
}

// Each numbered mutant, and each place where threads meet that is left out, must be noticed. Returns those that are not.
inline std::string unnoticed(const std::vector<selected_check>& checks, int mutants, const char* file, size_t* sites_out) {
  std::string missed;
  for (int mutant = 1; mutant <= mutants; ++mutant) {
    cqsa_simt_mutant = mutant;
    if (!noticed(checks)) missed += " mutant " + std::to_string(mutant);
    cqsa_simt_mutant = 0;
  }
  cqsa::simt::record_sites(true);
  for (const selected_check& check : checks) REQUIRE(check() == "");
  const std::vector<cqsa::simt::call_site> sites = cqsa::simt::recorded_sites();
  cqsa::simt::record_sites(false);
  *sites_out = 0;
  for (const auto& site : sites) {
    if (site.file.find(file) == std::string::npos) continue;
    ++*sites_out;
    cqsa::simt::leave_out(&site);
    if (!noticed(checks)) missed += " " + site.what + " at " + site.file + ":" + std::to_string(site.line);
    cqsa::simt::leave_out(nullptr);
  }
  return missed;
}

}  // namespace
