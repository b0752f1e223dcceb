// SPDX-License-Identifier: Apache-2.0
// cpu_reference: the whole operator in f64, as section 8 of cqsa.h writes it. Two passes over the keys of a row, no tiles, no
// tricks: this is what everything else is compared with.
#include "attention_job.h"
#include "element.h"

#include <atomic>
#include <cmath>
#include <cstdio>
#include <limits>

namespace cqsa::cpu {
namespace {

constexpr double none = -std::numeric_limits<double>::infinity();
constexpr int64_t max_head_dim_v = 512;

double logit(const cqsa_attention_leaf& a, const query_block& t, int64_t b, int64_t h, int64_t r, const cqsa_rect& range, int64_t n) {
  const int64_t g = h / (a.num_heads / a.num_kv_heads);
  const int64_t i = t.q_pos + r, j = range.k_pos + n, key = range.k_row + n, col = key + t.mask_col_shift;
  if (!visible(a, i, j, t.off)) return none;
  if (a.mask.data && element(a.mask, b, h, t.mask_row + r, col) == 0) return none;
  int64_t item, row;
  if (!locate(a, b, key, &item, &row)) return none;
  double s = 0;
  for (int64_t c = 0; c < a.head_dim; ++c)
    s += element(a.q, b, h, t.q_row + r, c) * element(a.k, item, g, row, c) *
         scale_of(a.k_scale, a.scale_k, a.kv_group, item, g, row, c);
  s *= a.softmax_scale;
  if (a.softcap > 0) s = a.softcap * std::tanh(s / a.softcap);
  if (a.bias.data) s += element(a.bias, b, h, t.mask_row + r, col);
  if (a.slopes.data) s -= element(a.slopes, b, h, 0, 0) * std::fabs(double(i + t.off - j));
  return s;
}

void add_value(const cqsa_attention_leaf& a, int64_t b, int64_t h, int64_t key, double p, double* o) {
  const int64_t g = h / (a.num_heads / a.num_kv_heads);
  int64_t item, row;
  locate(a, b, key, &item, &row);
  for (int64_t c = 0; c < a.head_dim_v; ++c)
    o[c] += p * element(a.v, item, g, row, c) * scale_of(a.v_scale, a.scale_v, a.kv_group, item, g, row, c);
}

// A row may have billions of keys: asks every so often whether to stop.
bool must_stop(const cqsa_exec* exec, int64_t key) {
  return key % 4096 == 4095 && exec && exec->poll && exec->poll(exec->user, 0);
}

// False when it was stopped.
bool compute_row(const cqsa_attention_leaf& a, const query_block& t, int64_t b, int64_t h, int64_t r, const cqsa_exec* exec) {
  const double sink = a.sinks.data ? element(a.sinks, 0, h, 0, 0) : none;
  double m = sink;
  for (int64_t n = 0; n < t.num_ranges; ++n)
    for (int64_t j = 0; j < t.ranges[n].k_len; ++j) {
      if (must_stop(exec, j)) return false;
      const double s = logit(a, t, b, h, r, t.ranges[n], j);
      if (s > m || s != s) m = s;
    }
  double o[max_head_dim_v] = {0};
  double sum = sink == none ? 0 : std::exp(sink - m);
  for (int64_t n = 0; n < t.num_ranges; ++n)
    for (int64_t j = 0; j < t.ranges[n].k_len; ++j) {
      if (must_stop(exec, j)) return false;
      const double s = logit(a, t, b, h, r, t.ranges[n], j);
      if (s == none) continue;
      const double p = std::exp(s - m);
      sum += p;
      add_value(a, b, h, t.ranges[n].k_row + j, p, o);
    }
  for (int64_t c = 0; c < a.head_dim_v; ++c) store_element(a.out, b, h, t.q_row + r, c, sum == 0 ? 0 : o[c] / sum);
  if (a.lse.data) store_element(a.lse, b, h, t.q_row + r, 0, sum == 0 ? none : m + std::log(sum));
  return true;
}

struct job {
  const cqsa_attention_leaf& leaf;
  const cqsa_exec* exec;
  std::atomic<int64_t> next{0};
  std::atomic<bool> stop{false};
};

// Every worker walks over all rows and computes those whose number it drew.
void work(void* data, int64_t) {
  job& j = *static_cast<job*>(data);
  const cqsa_attention_leaf& a = j.leaf;
  int64_t number = 0, mine = j.next++;
  for (int64_t b = 0; b < a.batch; ++b) {
    query_block t;
    cqsa_rect whole;
    for (int64_t n = 0; find_block(a, b, &n, &t, &whole);)
      for (int64_t x = 0; x < a.num_heads * t.q_len; ++x, ++number) {
        if (number != mine) continue;
        if (j.stop) return;
        if (!compute_row(a, t, b, x / t.q_len, x % t.q_len, j.exec)) j.stop = true;
        mine = j.next++;
        if (j.exec && j.exec->poll && j.exec->poll(j.exec->user, 1)) j.stop = true;
      }
  }
}

cqsa_status probe(const cqsa_attention_leaf* leaf, char* reason, uint64_t size) {
  const char* text = nullptr;
  if (leaf->flags & (CQSA_LEAF_STATE_IN | CQSA_LEAF_STATE_OUT)) text = "cpu_reference keeps no state between calls";
  if (leaf->head_dim_v > max_head_dim_v) text = "head_dim_v is at most 512";
  if (text && reason && size) std::snprintf(reason, size, "%s", text);
  return text ? CQSA_ERROR_UNSUPPORTED : CQSA_OK;
}

int32_t tiles(const cqsa_attention_leaf* leaf, cqsa_leaf_tile* out, int32_t capacity) {
  // The efficiency is against the fast kernels, whose rate is the one that predictions know.
  if (capacity > 0) *out = {1, leaf->seqlen_k > 0 ? leaf->seqlen_k : 1, 0.002, 0};
  return capacity > 0;
}

uint64_t workspace(const cqsa_attention_leaf*, int64_t) { return 0; }

int64_t units(const cqsa_attention_leaf* leaf) {
  int64_t rows = 0;
  for (int64_t b = 0; b < leaf->batch; ++b) {
    query_block t;
    cqsa_rect whole;
    for (int64_t n = 0; find_block(*leaf, b, &n, &t, &whole);) rows += t.q_len * leaf->num_heads;
  }
  return rows;
}

cqsa_status launch(void*, const cqsa_attention_leaf* leaf, void*, uint64_t, const cqsa_exec* exec, void*) {
  job j{*leaf, exec};
  if (exec && exec->run && exec->num_workers > 1) {
    const cqsa_status status = exec->run(exec->user, exec->num_workers, work, &j);
    if (status != CQSA_OK) return status;
  } else {
    work(&j, 0);
  }
  return j.stop ? fail(CQSA_ERROR_CANCELLED, "cancelled") : CQSA_OK;
}

}  // namespace

extern const cqsa_attention_impl reference_impl = {"cpu_reference", "any CPU", probe, tiles, workspace, launch, units};

}  // namespace cqsa::cpu
