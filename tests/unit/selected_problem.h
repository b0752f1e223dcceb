// SPDX-License-Identifier: Apache-2.0
// Problems of attention over selected cells for the tests: tensors of any layout with exactly the bytes that they reach, a random
// draw over everything that section 11 of cqsa.h allows, and an f64 oracle that knows no library code but the conversions.
#pragma once
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#endif

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cqsa.h"
#include "dtype.h"

namespace selected_test {

constexpr double inf = std::numeric_limits<double>::infinity();
constexpr double nan64 = std::numeric_limits<double>::quiet_NaN();

inline int64_t bytes_of(cqsa_dtype t) { return ((t >> 8) & 0xff) / 8; }

inline void put(char* p, cqsa_dtype t, double x) {
  const float f = static_cast<float>(x);
  const auto word = static_cast<int32_t>(t == CQSA_DTYPE_I32 ? x : 0);
  const uint16_t half = t == CQSA_DTYPE_F16 ? cqsa::f32_to_f16(f) : cqsa::f32_to_bf16(f);
  if (t == CQSA_DTYPE_F32) std::memcpy(p, &f, 4);
  else if (t == CQSA_DTYPE_I32) std::memcpy(p, &word, 4);
  else if (t == CQSA_DTYPE_I8) *p = static_cast<char>(static_cast<int8_t>(std::isnan(x) ? 77 : x));
  else std::memcpy(p, &half, 2);
}

inline double get(const char* p, cqsa_dtype t) {
  float f;
  int32_t word;
  uint16_t half;
  if (t == CQSA_DTYPE_F32) return std::memcpy(&f, p, 4), f;
  if (t == CQSA_DTYPE_I32) return std::memcpy(&word, p, 4), word;
  if (t == CQSA_DTYPE_I8) return static_cast<int8_t>(*p);
  std::memcpy(&half, p, 2);
  return t == CQSA_DTYPE_F16 ? cqsa::f16_to_f32(half) : cqsa::bf16_to_f32(half);
}

enum layout { compact, heads_outside, spread, backwards, misaligned, num_layouts };

// A tensor of exactly the bytes that its elements reach, so that a sanitizer sees any step beside it.
struct box {
  std::vector<int64_t> shape, strides;
  std::vector<char> memory;
  cqsa_tensor t{};

  box() = default;
  box(cqsa_dtype dtype, std::vector<int64_t> sizes, layout how = compact) : shape(std::move(sizes)), strides(shape.size()) {
    const size_t n = shape.size();
    std::vector<size_t> order;  // of axes, innermost first
    for (size_t i = n; i-- > 0;) order.push_back(i);
    if (how == heads_outside && n == 4) std::swap(order[1], order[2]);
    int64_t step = how == spread ? 2 : 1;
    for (const size_t axis : order) strides[axis] = step, step = step * std::max<int64_t>(shape[axis], 1) + (how == spread ? 3 : 0);
    if (how == backwards) strides[n - 1] = -strides[n - 1], strides[0] = -strides[0];
    int64_t low = 0, high = 0;
    for (size_t i = 0; i < n; ++i) (strides[i] < 0 ? low : high) += strides[i] * std::max<int64_t>(shape[i] - 1, 0);
    const int64_t bytes = bytes_of(dtype), shift = how == misaligned ? 1 : 0;
    memory.assign(static_cast<size_t>((high - low + 1) * bytes + shift), 0);
    t = {memory.data(), CQSA_DEVICE_CPU, 0, static_cast<int32_t>(n), dtype, shape.data(), strides.data(),
         static_cast<uint64_t>(shift - low * bytes)};
  }
  box(const box&) = delete;  // a copy's tensor would point into the original
  box& operator=(const box&) = delete;
  box(box&&) = default;
  box& operator=(box&&) = default;

  using place = std::array<int64_t, 4>;  // of an element, by axis
  char* at(const place& i) const {
    int64_t offset = 0;
    for (size_t a = 0; a < strides.size(); ++a) offset += i[a] * strides[a];
    return static_cast<char*>(t.data) + t.byte_offset + offset * bytes_of(t.dtype);
  }
  double read(const place& i) const { return get(at(i), t.dtype); }
  void write(const place& i, double x) { put(at(i), t.dtype, x); }
  int64_t size() const {
    int64_t n = 1;
    for (const int64_t s : shape) n *= s;
    return n;
  }
  place index(int64_t n) const {
    place i{};
    for (size_t a = shape.size(); a-- > 0; n /= shape[a]) i[a] = n % shape[a];
    return i;
  }
  template <class F> void fill(const F& f) {
    for (int64_t n = 0; n < size(); ++n) write(index(n), f());
  }
};

struct sizes {
  int64_t total_q = 3, heads = 4, kv_heads = 2, dim = 16, dim_v = 16, num_pages = 4, page_size = 4, pages = 4, capacity = 8;
  cqsa_dtype q = CQSA_DTYPE_F32, kv = CQSA_DTYPE_F32, out = CQSA_DTYPE_F32;
  int32_t kv_group = 0;
  bool table_per_query = false, lse = true;
  layout how_q = compact, how_k = compact, how_v = compact, how_lists = compact, how_out = compact;
};

struct problem {
  sizes n;
  box q, k, v, k_scale, v_scale, page_table, cells, counts, out, lse;
  double softmax_scale = 0;
  int32_t precision = 0;
  std::vector<double> exact_out, exact_lse;

  explicit problem(const sizes& s) : n(s) {
    q = box(n.q, {n.total_q, n.heads, n.dim}, n.how_q);
    k = box(n.kv, {n.num_pages, n.page_size, n.kv_heads, n.dim}, n.how_k);
    v = box(n.kv, {n.num_pages, n.page_size, n.kv_heads, n.dim_v}, n.how_v);
    if (n.kv == CQSA_DTYPE_I8) {
      k_scale = box(CQSA_DTYPE_F16, {n.num_pages, n.page_size, n.kv_heads, groups(n.dim)}, n.how_v);
      v_scale = box(CQSA_DTYPE_F16, {n.num_pages, n.page_size, n.kv_heads, groups(n.dim_v)}, n.how_k);
    }
    page_table = n.table_per_query ? box(CQSA_DTYPE_I32, {n.total_q, n.pages}, n.how_lists) : box(CQSA_DTYPE_I32, {n.pages}, n.how_lists);
    cells = box(CQSA_DTYPE_I32, {n.total_q, n.capacity}, n.how_lists);
    counts = box(CQSA_DTYPE_I32, {n.total_q}, n.how_lists);
    out = box(n.out, {n.total_q, n.heads, n.dim_v}, n.how_out);
    if (n.lse) lse = box(CQSA_DTYPE_F32, {n.heads, n.total_q}, n.how_out);
  }
  problem(problem&&) = default;

  int64_t group() const { return n.kv_group ? n.kv_group : 64; }
  int64_t groups(int64_t channels) const { return (channels + group() - 1) / group(); }
  double key(int64_t p, int64_t r, int64_t g, int64_t c) const { return scaled(k, k_scale, p, r, g, c); }
  double value(int64_t p, int64_t r, int64_t g, int64_t c) const { return scaled(v, v_scale, p, r, g, c); }
  double scaled(const box& x, const box& s, int64_t p, int64_t r, int64_t g, int64_t c) const {
    return x.read({p, r, g, c}) * (n.kv == CQSA_DTYPE_I8 ? s.read({p, r, g, c / group()}) : 1.0);
  }

  cqsa_attention_selected_args args() const {
    cqsa_attention_selected_args a = CQSA_ATTENTION_SELECTED_ARGS_INIT;
    a.q = &q.t, a.k = &k.t, a.v = &v.t;
    if (n.kv == CQSA_DTYPE_I8) a.k_scale = &k_scale.t, a.v_scale = &v_scale.t;
    a.page_table = &page_table.t, a.cells = &cells.t, a.counts = &counts.t;
    a.out = &out.t, a.lse = n.lse ? &lse.t : nullptr;
    a.softmax_scale = softmax_scale, a.precision = precision, a.kv_group = n.kv_group;
    return a;
  }

  // The places {page, row} of the cells that query i sees, by the letter of cqsa.h.
  std::vector<std::pair<int64_t, int64_t>> seen(int64_t i) const {
    std::vector<std::pair<int64_t, int64_t>> places;
    const auto count = static_cast<int64_t>(std::clamp<double>(counts.read({i}), 0, static_cast<double>(n.capacity)));
    for (int64_t at = 0; at < count; ++at) {
      const auto cell = static_cast<int64_t>(cells.read({i, at}));
      if (cell < 0 || (at > 0 && static_cast<double>(cell) <= cells.read({i, at - 1})) || cell / n.page_size >= n.pages) continue;
      const auto page =
          static_cast<int64_t>(n.table_per_query ? page_table.read({i, cell / n.page_size}) : page_table.read({cell / n.page_size}));
      if (page >= 0 && page < n.num_pages) places.emplace_back(page, cell % n.page_size);
    }
    return places;
  }

  void solve() {
    exact_out.assign(static_cast<size_t>(out.size()), 0.0);
    exact_lse.assign(static_cast<size_t>(n.heads * n.total_q), -inf);
    const double scale = softmax_scale != 0 ? softmax_scale : 1 / std::sqrt(static_cast<double>(n.dim));
    for (int64_t i = 0; i < n.total_q; ++i)
      for (int64_t h = 0; h < n.heads; ++h) solve_row(i, h, h / (n.heads / n.kv_heads), scale);
  }
  void solve_row(int64_t i, int64_t h, int64_t g, double scale) {
    std::vector<double> s, row_of_q;
    const auto places = seen(i);
    for (int64_t c = 0; c < n.dim; ++c) row_of_q.push_back(q.read({i, h, c}));
    for (const auto& [page, row] : places) {
      double sum = 0;
      for (int64_t c = 0; c < n.dim; ++c) sum += row_of_q[static_cast<size_t>(c)] * key(page, row, g, c);
      s.push_back(sum * scale);
    }
    if (s.empty()) return;
    const double top = *std::max_element(s.begin(), s.end());
    double total = 0;
    for (double& x : s) total += x = std::exp(x - top);
    for (int64_t c = 0; c < n.dim_v; ++c) {
      double sum = 0;
      for (size_t j = 0; j < s.size(); ++j) sum += s[j] * value(places[j].first, places[j].second, g, c);
      exact_out[static_cast<size_t>((i * n.heads + h) * n.dim_v + c)] = sum / total;
    }
    exact_lse[static_cast<size_t>(h * n.total_q + i)] = top + std::log(total);
  }

  double largest() const {
    double most = 1;
    for (const double x : exact_out) most = std::max(most, std::fabs(x));
    return most;
  }

  // "" or the first element of out or lse that is further from the oracle than `error` and one rounding of its type.
  std::string compare(double error) const {
    const double rounding = n.out == CQSA_DTYPE_F32 ? 0 : n.out == CQSA_DTYPE_F16 ? 0x1p-11 : 0x1p-8;
    for (int64_t at = 0; at < out.size(); ++at) {
      const double got = out.read(out.index(at)), wanted = exact_out[static_cast<size_t>(at)];
      if (std::fabs(got - wanted) <= error * largest() + rounding * std::fabs(wanted) * 1.01 + (rounding > 0 ? 1e-7 : 0)) continue;
      return "out element " + std::to_string(at) + " is " + std::to_string(got) + ", wanted " + std::to_string(wanted);
    }
    for (int64_t at = 0; n.lse && at < n.heads * n.total_q; ++at) {
      const double got = lse.read(lse.index(at)), wanted = exact_lse[static_cast<size_t>(at)];
      if (got == wanted || std::fabs(got - wanted) <= error * (1 + std::fabs(wanted))) continue;
      return "lse element " + std::to_string(at) + " is " + std::to_string(got) + ", wanted " + std::to_string(wanted);
    }
    return "";
  }
};

struct dice {
  std::mt19937_64 engine;
  explicit dice(uint64_t seed) : engine(seed) {}
  int64_t whole(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(engine); }
  bool chance(int percent) { return whole(1, 100) <= percent; }
  double normal(double sigma) { return std::normal_distribution<double>(0, sigma)(engine); }
  template <class T> T pick(std::initializer_list<T> from) { return from.begin()[whole(0, static_cast<int64_t>(from.size()) - 1)]; }
  layout any_layout() { return chance(50) ? compact : static_cast<layout>(whole(0, num_layouts - 1)); }
};

// Ascending cells; `wild`: with negative, repeated, falling and far ids, counts past both ends, and pages that are not there.
inline void draw_lists(problem& p, dice& d, bool wild) {
  const sizes& n = p.n;
  const int64_t all = n.pages * n.page_size;
  for (int64_t i = 0; i < n.total_q; ++i) {
    std::set<int64_t> chosen;
    const int64_t wanted = d.whole(0, std::min(all, n.capacity));
    while (static_cast<int64_t>(chosen.size()) < wanted) chosen.insert(d.whole(0, all - 1));
    int64_t at = 0;
    for (const int64_t cell : chosen) p.cells.write({i, at++}, static_cast<double>(cell));
    for (int64_t rest = at; rest < n.capacity; ++rest) p.cells.write({i, rest}, static_cast<double>(d.whole(-5, all + 9)));
    p.counts.write({i}, static_cast<double>(at));
    if (!wild) continue;
    for (int64_t x = 0; x < n.capacity; ++x)
      if (d.chance(10))
        p.cells.write({i, x},
                      d.pick({-1.0, -7.0, 2147483647.0, -2147483648.0, static_cast<double>(all), 0.0, static_cast<double>(all - 1)}));
    if (d.chance(30))
      p.counts.write({i},
                     d.pick({-3.0, static_cast<double>(n.capacity), static_cast<double>(n.capacity) + 5, 2147483647.0, -2147483648.0}));
  }
  p.page_table.fill([&] { return static_cast<double>(n.num_pages > 0 ? d.whole(0, n.num_pages - 1) : -1); });
  if (!wild) return;
  for (int64_t x = 0; x < p.page_table.size(); ++x)
    if (d.chance(20)) p.page_table.write(p.page_table.index(x), d.pick({-1.0, -2.0, static_cast<double>(n.num_pages), 2147483647.0}));
}

inline void draw_values(problem& p, dice& d, double sigma) {
  const bool codes = p.n.kv == CQSA_DTYPE_I8;
  p.q.fill([&] { return d.normal(sigma); });
  for (box* x : {&p.k, &p.v}) x->fill([&] { return codes ? static_cast<double>(d.whole(-127, 127)) : d.normal(sigma); });
  if (codes)
    for (box* x : {&p.k_scale, &p.v_scale}) x->fill([&] { return 0.005 + 0.02 * std::fabs(d.normal(0.5)); });
}

// What no query sees holds NaN: nothing may come of it.
inline void poison_rest(problem& p) {
  std::set<std::pair<int64_t, int64_t>> used;
  for (int64_t i = 0; i < p.n.total_q; ++i)
    for (const auto& place : p.seen(i)) used.insert(place);
  for (box* x : {&p.k, &p.v, &p.k_scale, &p.v_scale})
    for (int64_t at = 0; x->t.shape != nullptr && at < x->size(); ++at) {
      const auto i = x->index(at);
      if (!used.count({i[0], i[1]})) x->write(i, nan64);
    }
}

inline sizes random_sizes(dice& d) {
  sizes n;
  n.total_q = d.whole(1, 4), n.kv_heads = d.whole(1, 2);
  n.heads = n.kv_heads * (d.chance(2) ? 70 : d.pick<int64_t>({1, 1, 2, 3, 4, 5, 7, 12, 13}));
  n.dim = d.chance(50) ? d.pick<int64_t>({1, 8, 16, 32, 64, 128, 256}) : d.chance(5) ? 576 : d.whole(1, 100);
  n.dim_v = d.chance(50) ? d.pick<int64_t>({1, 8, 16, 64, 128, 256}) : d.chance(5) ? 512 : d.whole(1, 100);
  n.page_size = d.pick<int64_t>({1, 2, 3, 5, 7, 16, 64}), n.pages = d.whole(0, 9), n.num_pages = d.whole(0, 7);
  n.capacity = d.chance(10) ? d.whole(0, 2) : d.chance(30) ? d.whole(33, 90) : d.whole(1, 40);
  n.q = d.pick<cqsa_dtype>({CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16});
  n.kv = d.pick<cqsa_dtype>({n.q, CQSA_DTYPE_F16, CQSA_DTYPE_I8});
  n.out = d.pick<cqsa_dtype>({CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16});
  if (n.kv == CQSA_DTYPE_I8) n.kv_group = d.pick({0, 32, 64, 128});
  n.table_per_query = d.chance(50), n.lse = d.chance(80);
  n.how_q = d.any_layout(), n.how_k = d.any_layout(), n.how_v = d.any_layout(), n.how_lists = d.any_layout(), n.how_out = d.any_layout();
  return n;
}

inline problem random_problem(uint64_t seed) {
  dice d(seed);
  problem p(random_sizes(d));
  draw_lists(p, d, d.chance(60));
  draw_values(p, d, 1.0);
  if (d.chance(20)) p.softmax_scale = d.pick({0.01, 0.7, -0.3});
  p.precision = static_cast<int32_t>(d.whole(0, CQSA_PRECISION_F32));
  poison_rest(p);
  p.solve();
  return p;
}

}  // namespace selected_test
