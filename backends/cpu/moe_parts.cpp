// SPDX-License-Identifier: Apache-2.0
// The parts of a mixture of experts that are operations of their own: router, grouping, activations to int8, combination. cqsa.h section 17.
#include "backends/moe_rules.h"
#include "element.h"
#include "fp8_element.h"
#include "fp8_float_mode.h"
#include "moe_job.h"

#include <algorithm>

namespace cqsa::cpu {
namespace {

constexpr scalar_ops conversions = {[](uint16_t x) { return f16_to_f32(x); }, [](float x) { return f32_to_f16(x); }};

char* at(const cqsa_moe_rows& x, int64_t i, int64_t j) { return static_cast<char*>(x.data) + bytes_of(x.dtype) * (i * x.stride[0] + j * x.stride[1]); }

void store_index(void* array, cqsa_dtype dtype, int64_t i, int64_t value) {
  const auto narrow = static_cast<int32_t>(value);
  if (dtype == CQSA_DTYPE_I64) std::memcpy(static_cast<char*>(array) + 8 * i, &value, 8);
  else std::memcpy(static_cast<char*>(array) + 4 * i, &narrow, 4);
}

// Rows of a leaf for workers; `few` elements are done before another thread is awake.
template <class Leaf> struct rows_job {
  const Leaf& leaf;
  void (*row)(const Leaf& leaf, int64_t i);
  int64_t rows, tasks;

  static void part(void* data, int64_t index) {
    const plain_floats mode;
    const rows_job& job = *static_cast<rows_job*>(data);
    const int64_t each = job.rows / job.tasks, more = job.rows % job.tasks, begin = index * each + std::min(index, more);
    for (int64_t i = begin; i < begin + each + (index < more); ++i) job.row(job.leaf, i);
  }
};

template <class Leaf> cqsa_status run_rows(const Leaf& leaf, void (*row)(const Leaf&, int64_t), int64_t rows, int64_t row_elements, const cqsa_exec* exec) {
  constexpr int64_t few = 32768;
  rows_job<Leaf> job{leaf, row, rows, 1};
  if (exec && exec->run && exec->num_workers > 1 && rows > few / (row_elements + 16)) job.tasks = std::min(exec->num_workers, rows);
  return job.tasks > 1 ? exec->run(exec->user, job.tasks, rows_job<Leaf>::part, &job) : (rows_job<Leaf>::part(&job, 0), CQSA_OK);
}

// ---- router -----------------------------------------------------------------------------------------------------------------

// Of one token: scores, and what experts are chosen by, which is -Inf for those that may not be chosen, and below that once they are.
struct routing {
  float score[moe::most_experts], rank[moe::most_experts];
};

// A NaN is below everything.
float logit_of(const cqsa_moe_route_leaf& a, int64_t t, int64_t e) {
  const float x = load_f32(at(a.logits, t, e), a.logits.dtype);
  return x != x ? -INFINITY : x;
}

void softmax(float* x, int64_t n) {
  float most = -INFINITY;
  double sum = 0;
  for (int64_t e = 0; e < n; ++e) most = std::max(most, x[e]);
  for (int64_t e = 0; e < n; ++e) sum += x[e] = x[e] == most && most > -INFINITY ? 1.0f : x[e] == -INFINITY ? 0.0f : std::exp(x[e] - most);
  for (int64_t e = 0; e < n; ++e) x[e] = sum > 0 ? static_cast<float>(x[e] / sum) : 0.0f;
}

// Where nothing is added to scores, logits stand in the same order, and rounding has made none of them equal.
bool by_logits(const cqsa_moe_route_leaf& a) { return a.bias == nullptr && (a.topk_groups == a.num_groups || a.group_score == CQSA_MOE_GROUP_MAX); }

void score(const cqsa_moe_route_leaf& a, int64_t t, routing& r) {
  const char* const bias = reinterpret_cast<const char*>(a.bias);
  for (int64_t e = 0; e < a.num_experts; ++e) {
    const float x = r.rank[e] = logit_of(a, t, e);
    r.score[e] = a.scoring == CQSA_MOE_SOFTMAX ? x : 1.0f / (1.0f + std::exp(-x));
  }
  if (a.scoring == CQSA_MOE_SOFTMAX) softmax(r.score, a.num_experts);
  for (int64_t e = 0; e < a.num_experts && !by_logits(a); ++e) {
    const float rank = bias ? r.score[e] + load_as<float>(bias + 4 * e * a.bias_stride) : r.score[e];
    r.rank[e] = rank != rank ? -INFINITY : rank;
  }
}

float group_rank(const cqsa_moe_route_leaf& a, const float* rank, int64_t n) {
  float best = -INFINITY, second = -INFINITY;
  for (int64_t e = 0; e < n; ++e) {
    if (rank[e] > best) second = best, best = rank[e];
    else second = std::max(second, rank[e]);
  }
  return a.group_score == CQSA_MOE_GROUP_MAX || n == 1 ? best : best + second;
}

// The largest, of equals the first, of those that are not taken.
int64_t best_of(const float* rank, const bool* taken, int64_t n) {
  int64_t best = -1;
  for (int64_t i = 0; i < n; ++i)
    if (!taken[i] && (best < 0 || rank[i] > rank[best])) best = i;
  return best;
}

// Experts of groups that are not among the best are taken from the start.
void close_groups(const cqsa_moe_route_leaf& a, const routing& r, bool* taken) {
  const int64_t size = a.num_experts / a.num_groups;
  float rank[moe::most_experts];
  bool open[moe::most_experts] = {};
  for (int32_t g = 0; g < a.num_groups; ++g) rank[g] = group_rank(a, r.rank + g * size, size);
  for (int32_t n = 0; n < a.topk_groups; ++n) open[best_of(rank, open, a.num_groups)] = true;
  for (int64_t e = 0; e < a.num_experts; ++e) taken[e] = !open[e / size];
}

void route_token(const cqsa_moe_route_leaf& a, int64_t t) {
  routing r;
  bool taken[moe::most_experts] = {};
  float chosen[moe::most_topk], sum = 0;
  score(a, t, r);
  if (a.topk_groups < a.num_groups) close_groups(a, r, taken);
  for (int64_t s = 0; s < a.topk; ++s) {
    const int64_t e = best_of(r.rank, taken, a.num_experts);
    taken[e] = true;
    sum += chosen[s] = r.score[e];
    store_index(a.ids.data, a.ids.dtype, t * a.ids.stride[0] + s * a.ids.stride[1], e);
  }
  for (int64_t s = 0; s < a.topk; ++s) store_f32(at(a.weights, t, s), CQSA_DTYPE_F32, (a.renormalise && sum != 0 ? chosen[s] / sum : chosen[s]) * a.scale);
}

// ---- grouping ---------------------------------------------------------------------------------------------------------------

int64_t id_at(const cqsa_moe_rows& ids, int64_t t, int64_t s) { return index_of(ids.data, ids.dtype, t * ids.stride[0] + s * ids.stride[1]); }

template <class Visit> void each_slot(const cqsa_moe_group_leaf& a, const Visit& visit) {
  for (int64_t t = 0; t < a.tokens; ++t)
    for (int64_t s = 0; s < a.topk; ++s) visit(t, s, moe::expert_of(id_at(a.ids, t, s), a.num_ids, a.expert_map, a.expert_map_stride, a.num_experts));
}

// ---- activations, combination -----------------------------------------------------------------------------------------------

void quantize_row(const cqsa_moe_quantize_leaf& a, int64_t i) {
  constexpr int64_t piece = 1024;
  alignas(64) float x[piece], scale[piece / 32], sum[piece / 16];
  alignas(64) int8_t code[piece];
  char raw[4 * piece];
  const moe_target& target = moe_best();
  for (int64_t j = 0; j < a.row_elements; j += piece) {
    const int64_t n = std::min(piece, a.row_elements - j);
    target.load(at(a.x, i, j), a.x.dtype, a.x.stride[1], n, raw, x);
    target.quantize(x, n, code, scale, sum);
    for (int64_t k = 0; k < n; ++k) *at(a.codes, i, j + k) = static_cast<char>(code[k]);
    for (int64_t k = 0; k < n / 32; ++k) std::memcpy(at(a.scales, i, j / 32 + k), scale + k, 4);
  }
}

void combine_row(const cqsa_moe_combine_leaf& a, int64_t t) {
  constexpr int64_t piece = 1024;
  alignas(64) float sum[piece], y[piece];
  char raw[4 * piece];
  const moe_target& target = moe_best();
  for (int64_t j = 0; j < a.hidden; j += piece) {
    const int64_t n = std::min(piece, a.hidden - j);
    std::fill_n(sum, n, 0.0f);
    for (int64_t s = 0; s < a.topk; ++s) {
      const float weight = load_as<float>(at(a.weights, t, s));
      if (weight == 0 || (a.ids.data && id_at(a.ids, t, s) < 0)) continue;
      target.load(at(a.y, t * a.topk + s, j), CQSA_DTYPE_F32, a.y.stride[1], n, raw, y);
      target.add(y, weight, n, sum);
    }
    target.store(sum, a.out.dtype, a.out.stride[1], n, &conversions, raw, at(a.out, t, j));
  }
}

}  // namespace

cqsa_status moe_route(void*, const cqsa_moe_route_leaf* leaf, const cqsa_exec* exec, void*) {
  return run_rows(*leaf, route_token, leaf->tokens, leaf->num_experts * leaf->topk, exec);
}

cqsa_status moe_group(void*, const cqsa_moe_group_leaf* leaf, const cqsa_exec*, void*) {
  const cqsa_moe_group_leaf& a = *leaf;
  int64_t end[moe::most_experts + 1] = {}, skipped = 0, last = 0;
  each_slot(a, [&](int64_t, int64_t, int32_t e) { ++(e >= 0 ? end[e + 1] : skipped); });
  if (a.counts)
    for (int64_t e = 0; e < a.num_experts; ++e) store_index(a.counts, a.dtype, e * a.counts_stride, end[e + 1]);
  for (int64_t e = 0; e <= a.num_experts; ++e) store_index(a.offsets, a.dtype, e * a.offsets_stride, last += end[e]), end[e] = last;
  each_slot(a, [&](int64_t t, int64_t s, int32_t e) {
    const int64_t place = e >= 0 ? end[e]++ : -1;
    if (place >= 0) store_index(a.order, a.dtype, place * a.order_stride, t * a.topk + s);
    if (a.places) store_index(a.places, a.dtype, t * a.places_stride[0] + s * a.places_stride[1], place);
  });
  for (int64_t i = last; i < a.tokens * a.topk; ++i) store_index(a.order, a.dtype, i * a.order_stride, -1);
  return CQSA_OK;
}

cqsa_status moe_quantize(void*, const cqsa_moe_quantize_leaf* leaf, const cqsa_exec* exec, void*) {
  return run_rows(*leaf, quantize_row, leaf->rows, leaf->row_elements, exec);
}

cqsa_status moe_combine(void*, const cqsa_moe_combine_leaf* leaf, const cqsa_exec* exec, void*) {
  return run_rows(*leaf, combine_row, leaf->tokens, leaf->hidden * leaf->topk, exec);
}

}  // namespace cqsa::cpu
