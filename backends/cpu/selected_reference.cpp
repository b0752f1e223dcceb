// SPDX-License-Identifier: Apache-2.0
// cpu_reference: attention over selected cells in f64, as section 11 of cqsa.h writes it.
#include "element.h"
#include "selected_job.h"

#include <cmath>
#include <limits>

namespace cqsa::cpu {
namespace {

constexpr double none = -std::numeric_limits<double>::infinity();
constexpr int64_t most_head_dim_v = 512;

// Where entry n of the list of query i lies; false when it is skipped or hidden.
bool find_cell(const cqsa_selected_leaf& a, int64_t i, int64_t n, int64_t* page, int64_t* row) {
  const int64_t first = i * a.cells_stride[0], step = a.cells_stride[1];
  const int64_t cell = index_of(a.cells, CQSA_DTYPE_I32, first + n * step);
  if (cell < 0 || cell / a.page_size >= a.pages) return false;
  if (n > 0 && cell <= index_of(a.cells, CQSA_DTYPE_I32, first + (n - 1) * step)) return false;
  *page = index_of(a.page_table, CQSA_DTYPE_I32, i * a.page_table_stride[0] + cell / a.page_size * a.page_table_stride[1]);
  *row = cell % a.page_size;
  return *page >= 0 && *page < a.num_pages;
}

double value_of(const cqsa_selected_leaf& a, const cqsa_view& x, const cqsa_view& scale, int64_t page, int64_t g, int64_t row, int64_t c) {
  return element(x, page, g, row, c) * (a.kv_group > 0 ? element(scale, page, g, row, c / a.kv_group) : 1.0);
}

double logit(const cqsa_selected_leaf& a, int64_t i, int64_t h, int64_t page, int64_t row) {
  const int64_t g = h / (a.num_heads / a.num_kv_heads);
  double s = 0;
  for (int64_t c = 0; c < a.head_dim; ++c) s += element(a.q, 0, h, i, c) * value_of(a, a.k, a.k_scale, page, g, row, c);
  return s * a.softmax_scale;
}

void compute_row(const cqsa_selected_leaf& a, int64_t i, int64_t h) {
  const int64_t g = h / (a.num_heads / a.num_kv_heads), stated = index_of(a.counts, CQSA_DTYPE_I32, i * a.counts_stride);
  const int64_t count = stated < a.capacity ? stated : a.capacity;
  int64_t page, row;
  double m = none, sum = 0, o[most_head_dim_v] = {0};
  for (int64_t n = 0; n < count; ++n) {
    if (!find_cell(a, i, n, &page, &row)) continue;
    const double s = logit(a, i, h, page, row);
    if (s > m || s != s) m = s;
  }
  for (int64_t n = 0; n < count; ++n) {
    if (!find_cell(a, i, n, &page, &row)) continue;
    const double s = logit(a, i, h, page, row), p = s == none ? 0 : std::exp(s - m);
    sum += p;
    if (s == none) continue;
    for (int64_t c = 0; c < a.head_dim_v; ++c) o[c] += p * value_of(a, a.v, a.v_scale, page, g, row, c);
  }
  for (int64_t c = 0; c < a.head_dim_v; ++c) store_element(a.out, 0, h, i, c, sum == 0 ? 0 : o[c] / sum);
  if (a.lse.data) store_element(a.lse, 0, h, i, 0, sum == 0 ? none : m + std::log(sum));
}

cqsa_status probe(const cqsa_selected_leaf*, char*, uint64_t) { return CQSA_OK; }

uint64_t workspace(const cqsa_selected_leaf*, int64_t) { return 0; }

cqsa_status launch(void*, const cqsa_selected_leaf* leaf, void*, uint64_t, const cqsa_exec*, void*) {
  for (int64_t i = 0; i < leaf->total_q; ++i)
    for (int64_t h = 0; h < leaf->num_heads; ++h) compute_row(*leaf, i, h);
  return CQSA_OK;
}

}  // namespace

extern const cqsa_selected_impl selected_reference_impl = {"cpu_reference", "any CPU", probe, workspace, launch};

}  // namespace cqsa::cpu
