// SPDX-License-Identifier: Apache-2.0
// Merge of two partial results over disjoint keys, section 10 of cqsa.h. Weights in f64, one rounding at the end; every
// expression is symmetric in a and b, and the file is compiled without contraction, so that swapping them changes no bit.
#include "attention_job.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace cqsa::cpu {
namespace {

int64_t offset(const int64_t* stride, const int64_t* at) {
  return at[0] * stride[0] + at[1] * stride[1] + at[2] * stride[2] + at[3] * stride[3];
}

// Operands may stand at any address.
float load(const float* from) {
  float value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

void store(float* to, float value) { std::memcpy(to, &value, sizeof value); }

void copy_row(const float* from, int64_t from_stride, int64_t n, float* to, int64_t to_stride) {
  for (int64_t c = 0; c < n; ++c) store(to + c * to_stride, load(from + c * from_stride));
}

void merge_row(const cqsa_merge_leaf& x, const int64_t* at) {
  const float* a = x.out_a + offset(x.out_a_stride, at);
  const float* b = x.out_b + offset(x.out_b_stride, at);
  float* out = x.out + offset(x.out_stride, at);
  float* lse = x.lse + offset(x.lse_stride, at);
  const int64_t sa = x.out_a_stride[4], sb = x.out_b_stride[4], so = x.out_stride[4], n = x.head_dim_v;
  const float la = load(x.lse_a + offset(x.lse_a_stride, at)), lb = load(x.lse_b + offset(x.lse_b_stride, at));
  const bool has_a = std::isfinite(la), has_b = std::isfinite(lb);
  if (!has_a && !has_b) {
    for (int64_t c = 0; c < n; ++c) store(out + c * so, 0.0f);
    store(lse, -std::numeric_limits<float>::infinity());
  } else if (!has_b) {
    copy_row(a, sa, n, out, so);
    store(lse, la);
  } else if (!has_a) {
    copy_row(b, sb, n, out, so);
    store(lse, lb);
  } else {
    const double m = la > lb ? la : lb;
    const double ea = std::exp(la - m), eb = std::exp(lb - m), sum = ea + eb;
    const double wa = ea / sum, wb = eb / sum;
    for (int64_t c = 0; c < n; ++c) store(out + c * so, static_cast<float>(wa * load(a + c * sa) + wb * load(b + c * sb)));
    store(lse, static_cast<float>(m + std::log(sum)));
  }
}

struct job {
  const cqsa_merge_leaf& leaf;
  int64_t rows, tasks;
};

void work(void* data, int64_t index) {
  const job& j = *static_cast<const job*>(data);
  const int64_t* shape = j.leaf.shape;
  const int64_t each = (j.rows + j.tasks - 1) / j.tasks;
  const int64_t end = (index + 1) * each < j.rows ? (index + 1) * each : j.rows;
  for (int64_t n = index * each; n < end; ++n) {
    int64_t at[4], rest = n;
    for (int axis = 3; axis >= 0; --axis) {
      at[axis] = rest % shape[axis];
      rest /= shape[axis];
    }
    merge_row(j.leaf, at);
  }
}

}  // namespace

cqsa_status merge(void*, const cqsa_merge_leaf* leaf, const cqsa_exec* exec, void*) {
  job j{*leaf, 1, 1};
  for (int axis = 0; axis < 4; ++axis) j.rows *= leaf->shape[axis];
  if (j.rows < 1) return CQSA_OK;
  // Less than this is done before another thread is awake.
  const bool large = j.rows * (leaf->head_dim_v + 16) > 65536;
  if (large && exec && exec->run && exec->num_workers > 1) {
    j.tasks = exec->num_workers;
    return exec->run(exec->user, j.tasks, work, &j);
  }
  work(&j, 0);
  return CQSA_OK;
}

}  // namespace cqsa::cpu
