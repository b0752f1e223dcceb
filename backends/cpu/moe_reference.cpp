// SPDX-License-Identifier: Apache-2.0
// A mixture of experts as the text of cqsa.h has it: weights as they decode, activations unrounded, every sum in f64, one rounding at the end.
#include "backends/moe_rules.h"
#include "element.h"
#include "fp8_element.h"
#include "fp8_float_mode.h"
#include "moe_job.h"
#include "quant_format.h"
#include "quant_reference.h"

#include <algorithm>

namespace cqsa::cpu {
namespace {

struct work {
  const cqsa_moe_leaf& leaf;
  double* memory;
  int64_t tasks;
};

double value(const cqsa_moe_rows& x, int64_t i, int64_t j) {
  return load_f32(static_cast<char*>(x.data) + bytes_of(x.dtype) * (i * x.stride[0] + j * x.stride[1]), x.dtype);
}

// Row r of expert e times x, plus its bias.
double row_times(const cqsa_moe_set& set, int64_t e, int64_t r, const double* x) {
  const cqsa_moe_matrix m = moe::matrix_at(set.experts, set.all, set.expert_bytes, e);
  const quant_format& format = quant_formats[m.format];
  const auto step = int64_t(moe::row_bytes_of(m, set.row_elements, format.block_elements, format.block_bytes));
  const uint8_t* const row = static_cast<const uint8_t*>(m.data) + r * step;
  const quant_element_fn element = quant_element(m.format);
  double sum = 0;
  for (int64_t i = 0; i < set.row_elements; ++i)
    sum += x[i] * double(element(row + i / format.block_elements * format.block_bytes, int(i % format.block_elements)));
  const char* const bias = reinterpret_cast<const char*>(set.bias);
  return bias ? sum + double(load_as<float>(bias + 4 * (e * set.bias_stride[0] + r * set.bias_stride[1]))) : sum;
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

double activate(const cqsa_moe_leaf& a, double g, double u) {
  const double z = moe::is_gated(a.activation) ? g : u, last = moe::is_gated(a.activation) ? u : 1;
  if (a.activation == CQSA_MOE_SWIGLU) {
    const double G = g > a.limit ? a.limit : g, U = u > a.limit ? a.limit : u < -a.limit ? -a.limit : u;
    return G * sigmoid(a.alpha * G) * (U + a.beta);
  }
  if (a.activation == CQSA_MOE_SILU) return z * sigmoid(z);
  if (a.activation == CQSA_MOE_RELU2) return z < 0 ? 0 : z * z;
  const bool by_tanh = a.activation == CQSA_MOE_GEGLU_TANH || a.activation == CQSA_MOE_GELU_TANH;
  const double s = by_tanh ? std::tanh(0.79788456080286535588 * (z + 0.044715 * z * z * z)) : std::erf(z * 0.70710678118654752440);
  return 0.5 * z * (1 + s) * last;
}

// y = the layer of expert e for x.
void one_expert(const cqsa_moe_leaf& a, const cqsa_moe_set& gate, const cqsa_moe_set& up, const cqsa_moe_set& down, int64_t e, const double* x, double* h, double* y) {
  const int64_t inter = down.row_elements;
  for (int64_t n = 0; n < inter; ++n) {
    const double g = gate.num_experts ? row_times(gate, e, moe::gate_row(a.layout, n), x) : 0;
    h[n] = activate(a, g, row_times(up.num_experts ? up : gate, e, moe::up_row(a.layout, n, inter), x));
  }
  for (int64_t n = 0; n < down.rows; ++n) y[n] = row_times(down, e, n, h);
}

double shared_factor(const cqsa_moe_leaf& a, int64_t t, const double* x) {
  const char* const gate = reinterpret_cast<const char*>(a.shared_factor);
  double z = 0;
  if (!gate) return 1;
  if (a.shared_factor_is_logit) return sigmoid(double(load_as<float>(gate + 4 * t * a.shared_factor_stride)));
  for (int64_t i = 0; i < a.hidden; ++i) z += x[i] * double(load_as<float>(gate + 4 * i * a.shared_factor_stride));
  return sigmoid(z);
}

void store_row(const cqsa_moe_rows& out, int64_t i, int64_t n, const double* row) {
  const cqsa_view view{out.data, out.dtype, 0, {0, 0, out.stride[0], out.stride[1]}};
  for (int64_t j = 0; j < n; ++j) store_element(view, 0, 0, i, j, row[j]);
}

void compute_token(const cqsa_moe_leaf& a, int64_t t, double* x, double* h, double* y, double* sum) {
  for (int64_t i = 0; i < a.hidden; ++i) x[i] = value(a.x, t, i);
  std::fill_n(sum, a.hidden, 0.0);
  for (int64_t s = 0; s < a.topk; ++s) {
    const int64_t id = index_of(a.ids.data, a.ids.dtype, t * a.ids.stride[0] + s * a.ids.stride[1]);
    const int32_t e = moe::expert_of(id, a.num_ids, a.expert_map, a.expert_map_stride, a.num_experts);
    const bool slots = a.output == CQSA_MOE_PER_SLOT;
    const double weight = e < 0 ? 0 : slots ? 1 : value(a.weights, t, s);
    if (weight != 0) one_expert(a, a.gate, a.up, a.down, e, x, h, y);
    else std::fill_n(y, a.hidden, 0.0);
    if (slots) store_row(a.out, t * a.topk + s, a.hidden, y);
    for (int64_t i = 0; i < a.hidden; ++i) sum[i] += weight == 0 ? 0 : weight * y[i];
  }
  if (a.output == CQSA_MOE_PER_SLOT) return;
  if (a.shared_down.num_experts) {
    const double factor = shared_factor(a, t, x);
    one_expert(a, a.shared_gate, a.shared_up, a.shared_down, 0, x, h, y);
    for (int64_t i = 0; i < a.hidden; ++i) sum[i] += factor * y[i];
  }
  store_row(a.out, t, a.hidden, sum);
}

int64_t doubles_for(const cqsa_moe_leaf& a) { return 3 * a.hidden + std::max(a.inter, a.shared_inter); }

void compute_part(void* data, int64_t index) {
  const plain_floats mode;
  const work& w = *static_cast<work*>(data);
  double* const x = w.memory + index * doubles_for(w.leaf);
  double *const y = x + w.leaf.hidden, *const sum = y + w.leaf.hidden, *const h = sum + w.leaf.hidden;
  for (int64_t t = index; t < w.leaf.tokens; t += w.tasks) compute_token(w.leaf, t, x, h, y, sum);
}

cqsa_status probe(void*, const cqsa_moe_leaf*, char*, uint64_t) { return CQSA_OK; }
uint64_t workspace_for(const cqsa_moe_leaf* leaf, int64_t workers) { return 8 * uint64_t(doubles_for(*leaf)) * uint64_t(std::max<int64_t>(workers, 1)); }

cqsa_status launch(void*, const cqsa_moe_leaf* leaf, void* workspace, uint64_t bytes, const cqsa_exec* exec, void*) {
  const int64_t room = int64_t(bytes / workspace_for(leaf, 1));
  work w{*leaf, static_cast<double*>(workspace), exec && exec->run ? std::clamp<int64_t>(exec->num_workers, 1, room) : 1};
  return w.tasks > 1 ? exec->run(exec->user, w.tasks, compute_part, &w) : (compute_part(&w, 0), CQSA_OK);
}

}  // namespace

const cqsa_moe_impl moe_reference_impl = {"cpu_reference", "any CPU", probe, workspace_for, launch};

}  // namespace cqsa::cpu
