// SPDX-License-Identifier: Apache-2.0
#include "selected_reference.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <thread>

#include "elements.h"
#include "interrupt.h"

namespace tool {
namespace {

// One query and key head: its keys and values in f64, and what is made of them.
struct sample_rows {
  const selected_data& data;
  int64_t sample, query, kv_head;
  std::vector<double> keys, values;
  int64_t count;

  sample_rows(const selected_data& d, int64_t s, int64_t q, int64_t g) : data(d), sample(s), query(q), kv_head(g) {
    const int64_t dim = d.spec.head_dim;
    count = d.counts.as<int32_t>()[query];
    keys.resize(static_cast<std::size_t>(count * dim));
    values.resize(keys.size());
    for (int64_t n = 0; n < count; ++n) {
      const int64_t cell = d.cells.as<int32_t>()[query * d.cells.shape[1] + n];
      d.key(cell, kv_head, &keys[static_cast<std::size_t>(n * dim)]);
      d.value(cell, kv_head, &values[static_cast<std::size_t>(n * dim)]);
    }
  }

  // T: the type of all arithmetic. half: q and the probabilities are rounded to f16 before they are multiplied.
  template <class T> void compute(int64_t head, bool half, selected_rows& to) const {
    const selected_spec& s = data.spec;
    const int64_t dim = s.head_dim;
    const auto scale = static_cast<T>(1 / std::sqrt(static_cast<double>(dim)));
    const float* const q = data.q.as<float>() + (query * s.heads + head) * dim;
    const auto rounded = [&](T x) { return half ? static_cast<T>(round_to(CQSA_DTYPE_F16, static_cast<double>(x))) : x; };
    std::vector<T> row(static_cast<std::size_t>(dim)), p(static_cast<std::size_t>(count)), sum(static_cast<std::size_t>(dim), T{0});
    for (std::size_t c = 0; c < row.size(); ++c) row[c] = rounded(static_cast<T>(q[c]));
    for (std::size_t n = 0; n < p.size(); ++n)
      for (std::size_t c = 0; c < row.size(); ++c) p[n] += row[c] * static_cast<T>(keys[n * row.size() + c]);
    for (T& x : p) x *= scale;
    const T top = *std::max_element(p.begin(), p.end());
    T total = 0;
    for (T& x : p) total += x = std::exp(x - top);
    for (std::size_t n = 0; n < p.size(); ++n) {
      const T weight = rounded(p[n]);
      for (std::size_t c = 0; c < row.size(); ++c) sum[c] += weight * static_cast<T>(values[n * row.size() + c]);
    }
    const int64_t at = sample * s.heads + head;
    for (int64_t c = 0; c < dim; ++c)
      to.out[static_cast<std::size_t>(at * dim + c)] = static_cast<double>(sum[static_cast<std::size_t>(c)] / total);
    to.lse[static_cast<std::size_t>(at)] = static_cast<double>(top) + std::log(static_cast<double>(total));
  }
};

// The first and the last query, and evenly between them.
std::vector<int64_t> choose_queries(int64_t queries, int64_t samples) {
  std::vector<int64_t> chosen;
  const int64_t count = std::min(queries, std::max<int64_t>(samples, 1));
  for (int64_t i = 0; i < count; ++i) chosen.push_back(count == 1 ? queries - 1 : i * (queries - 1) / (count - 1));
  return chosen;
}

}  // namespace

selected_reference::selected_reference(const selected_data& data, int64_t samples, int threads)
    : queries(choose_queries(data.spec.queries, samples)) {
  const selected_spec& s = data.spec;
  const std::size_t rows = queries.size() * static_cast<std::size_t>(s.heads);
  for (selected_rows* r : {&exact, &naive_f32, &naive_fast})
    r->out.resize(rows * static_cast<std::size_t>(s.head_dim)), r->lse.resize(rows);
  const int64_t units = static_cast<int64_t>(queries.size()) * s.kv_heads, ratio = s.heads / s.kv_heads;
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t u; (u = next++) < units && !interrupted();) {
      const int64_t sample = u / s.kv_heads, g = u % s.kv_heads;
      const sample_rows of(data, sample, queries[static_cast<std::size_t>(sample)], g);
      for (int64_t h = g * ratio; h < (g + 1) * ratio; ++h) {
        of.compute<double>(h, false, exact);
        of.compute<float>(h, false, naive_f32);
        of.compute<float>(h, true, naive_fast);
      }
    }
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
  if (interrupted()) throw interrupted_error();
}

}  // namespace tool
