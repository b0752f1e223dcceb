// SPDX-License-Identifier: Apache-2.0
// A mixture-of-experts layer for tests: random blocks of any format with scales that make sense, its arguments, and what it is in f64, with or without the
// rounding of activations to int8.
#pragma once
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "backends/cpu/moe_job.h"
#include "backends/cpu/quant_reference.h"
#include "backends/moe_rules.h"
#include "dtype.h"
#include "ops/moe/moe.h"
#include "quant_format.h"

namespace moe_test {

using namespace cqsa;
using engine = std::mt19937;

inline cqsa_context* cpu_context() {
  static cqsa_context* made = [] {
    cqsa_context* context = nullptr;
    cqsa_context_params params = CQSA_CONTEXT_PARAMS_INIT;
    params.backend = "cpu", params.num_threads = 2;
    REQUIRE(cqsa_context_create(&params, &context) == CQSA_OK);
    return context;
  }();
  return made;
}

inline double normal(engine& r) { return std::normal_distribution<double>()(r); }
inline int64_t below(engine& r, int64_t n) { return static_cast<int64_t>(r() % static_cast<uint32_t>(n)); }

// ---- tensors ----------------------------------------------------------------------------------------------------------------

// Floats of a type, or integers, in compact memory; or with `gap` elements between rows.
struct array {
  std::vector<int64_t> shape, strides;
  std::vector<char> memory;
  cqsa_tensor view{};

  array() = default;
  array(cqsa_dtype dtype, std::vector<int64_t> sizes, int64_t gap = 0) : shape(std::move(sizes)), strides(shape.size(), 1) {
    const int64_t bytes = (dtype >> 8 & 0xff) / 8;
    for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(shape[i], 1) + (i == shape.size() - 1 ? gap : 0);
    memory.assign(static_cast<size_t>(std::max<int64_t>(1, shape.empty() ? 1 : strides[0] * std::max<int64_t>(shape[0], 1)) * bytes), char(0xff));
    view = {memory.data(), CQSA_DEVICE_CPU, 0, static_cast<int32_t>(shape.size()), dtype, shape.data(), strides.data(), 0};
  }
  array(const array&) = delete;
  array& operator=(array&& o) {
    shape = std::move(o.shape), strides = std::move(o.strides), memory = std::move(o.memory), view = o.view;
    view.shape = shape.data(), view.strides = strides.data(), view.data = memory.data();
    return *this;
  }
  const cqsa_tensor* tensor() const { return shape.empty() ? nullptr : &view; }
  int64_t rows() const { return shape[0]; }
  int64_t columns() const { return shape.size() > 1 ? shape[1] : 1; }
  char* at(int64_t i, int64_t j = 0) {
    return memory.data() + (view.dtype >> 8 & 0xff) / 8 * (i * strides[0] + (shape.size() > 1 ? j * strides[1] : 0));
  }
  void set(int64_t i, int64_t j, double x) {
    const auto put = [&](auto value) { std::memcpy(at(i, j), &value, sizeof value); };
    switch (view.dtype) {
      case CQSA_DTYPE_F32: return put(static_cast<float>(x));
      case CQSA_DTYPE_I32: return put(static_cast<int32_t>(x));
      case CQSA_DTYPE_I64: return put(static_cast<int64_t>(x));
      case CQSA_DTYPE_F16: return put(f32_to_f16(static_cast<float>(x)));
      default: return put(f32_to_bf16(static_cast<float>(x)));
    }
  }
  double get(int64_t i, int64_t j = 0) {
    float f;
    int32_t narrow;
    int64_t wide;
    uint16_t half;
    switch (view.dtype) {
      case CQSA_DTYPE_F32: return std::memcpy(&f, at(i, j), 4), f;
      case CQSA_DTYPE_I32: return std::memcpy(&narrow, at(i, j), 4), narrow;
      case CQSA_DTYPE_I64: return std::memcpy(&wide, at(i, j), 8), static_cast<double>(wide);
      case CQSA_DTYPE_I8: return *reinterpret_cast<int8_t*>(at(i, j));
      default: return std::memcpy(&half, at(i, j), 2), view.dtype == CQSA_DTYPE_F16 ? f16_to_f32(half) : bf16_to_f32(half);
    }
  }
};

// ---- blocks -----------------------------------------------------------------------------------------------------------------

struct scale_places {
  int first, second;  // offsets of f16 numbers in a block; -1: none
};
inline scale_places scales_of(cqsa_quant_format format) {
  switch (format) {
    case CQSA_QUANT_Q4_1: case CQSA_QUANT_Q5_1: case CQSA_QUANT_Q4_K: case CQSA_QUANT_Q5_K: return {0, 2};
    case CQSA_QUANT_Q2_K: return {80, 82};
    case CQSA_QUANT_Q3_K: return {108, -1};
    case CQSA_QUANT_Q6_K: return {208, -1};
    case CQSA_QUANT_TQ1_0: return {52, -1};
    case CQSA_QUANT_TQ2_0: return {64, -1};
    case CQSA_QUANT_IQ1_M: case CQSA_QUANT_MXFP4: case CQSA_QUANT_NVFP4: return {-1, -1};
    default: return {0, -1};
  }
}

inline void put_half(uint8_t* to, double x) {
  const uint16_t bits = f32_to_f16(static_cast<float>(x));
  std::memcpy(to, &bits, 2);
}

// d of IQ1_M is in the top nibbles of its four words of scales.
inline void put_iq1_m(uint8_t* block, double x) {
  const uint16_t bits = f32_to_f16(static_cast<float>(x));
  for (int i = 0; i < 4; ++i) block[49 + 2 * i] = static_cast<uint8_t>((block[49 + 2 * i] & 15) | (bits >> 4 * i & 15) << 4);
}

inline void put_scales(cqsa_quant_format format, uint8_t* block, double d) {
  const scale_places at = scales_of(format);
  if (at.first >= 0) put_half(block + at.first, d);
  if (at.second >= 0) put_half(block + at.second, format == CQSA_QUANT_Q4_1 || format == CQSA_QUANT_Q5_1 ? -d * (format == CQSA_QUANT_Q4_1 ? 7.5 : 15.5) : d);
  if (format == CQSA_QUANT_IQ1_M) put_iq1_m(block, d);
  if (format == CQSA_QUANT_MXFP4) block[0] = static_cast<uint8_t>(std::clamp(std::lround(std::log2(d)) + 127L, 0L, 254L));
  for (int i = 0; format == CQSA_QUANT_NVFP4 && i < 4; ++i)
    block[i] = static_cast<uint8_t>(std::clamp(std::lround(8 * (std::log2(d) + 8)), 1L, 0x7eL));
}

// What a block of random codes is multiplied by to have elements of size 1.
inline double unit_of(cqsa_quant_format format) {
  engine r(static_cast<uint32_t>(format));
  const quant_format& f = quant_formats[format];
  std::vector<uint8_t> block(static_cast<size_t>(f.block_bytes));
  double sum = 0;
  for (int n = 0; n < 16; ++n) {
    for (uint8_t& b : block) b = static_cast<uint8_t>(r());
    put_scales(format, block.data(), 1);
    for (int i = 0; i < f.block_elements; ++i) sum += std::pow(double(cpu::quant_element(format)(block.data(), i)), 2);
  }
  return 1 / std::sqrt(sum / 16 / f.block_elements);
}

inline void fill_matrix(engine& r, cqsa_quant_format format, int64_t rows, int64_t elements, uint8_t* to) {
  const quant_format& f = quant_formats[format];
  const double size = 1 / std::sqrt(double(elements)), unit = format > CQSA_QUANT_BF16 ? unit_of(format) : 1;
  for (int64_t i = 0; i < rows * (elements / f.block_elements); ++i, to += f.block_bytes) {
    const float x = static_cast<float>(normal(r) * size);
    const uint16_t half = format == CQSA_QUANT_F16 ? f32_to_f16(x) : f32_to_bf16(x);
    if (format == CQSA_QUANT_F32) std::memcpy(to, &x, 4);
    else if (format <= CQSA_QUANT_BF16) std::memcpy(to, &half, 2);
    if (format <= CQSA_QUANT_BF16) continue;
    for (int b = 0; b < f.block_bytes; ++b) to[b] = static_cast<uint8_t>(r());
    put_scales(format, to, unit * size * (0.5 + double(r() % 1024) / 1024));
  }
}

// ---- weights ----------------------------------------------------------------------------------------------------------------

struct projection {
  int64_t rows = 0, elements = 0;
  std::vector<cqsa_quant_format> formats;  // of each expert
  std::vector<std::vector<uint8_t>> blobs; // begin at an address that is a multiple of 2, not of 4
  std::vector<std::vector<double>> values; // decoded
  std::vector<cqsa_moe_matrix> list;
  cqsa_moe_weights weights = CQSA_MOE_WEIGHTS_INIT;
  array bias;

  bool there() const { return rows > 0; }
  void make(engine& r, int64_t experts, int64_t n, int64_t k, const std::vector<cqsa_quant_format>& choice) {
    rows = n, elements = k;
    for (int64_t e = 0; e < experts; ++e) {
      const cqsa_quant_format format = choice[static_cast<size_t>(e) % choice.size()];
      const quant_format& f = quant_formats[format];
      const int64_t bytes = rows * (k / f.block_elements) * f.block_bytes;
      formats.push_back(format);
      blobs.emplace_back(static_cast<size_t>(bytes + 2));
      fill_matrix(r, format, n, k, blobs.back().data() + 2);
      cqsa_moe_matrix m = CQSA_MOE_MATRIX_INIT;
      m.format = format, m.data_bytes = static_cast<uint64_t>(bytes), m.device_type = CQSA_DEVICE_CPU;
      list.push_back(m);
    }
    bind();
  }
  void bind() {
    for (size_t e = 0; e < blobs.size(); ++e) list[e].data = blobs[e].data() + 2;
    weights = CQSA_MOE_WEIGHTS_INIT;
    weights.num_experts = static_cast<int64_t>(list.size()), weights.rows = rows, weights.row_elements = elements, weights.experts = list.data();
  }
  void decode() {
    values.resize(blobs.size());
    for (size_t e = 0; e < blobs.size(); ++e) {
      const quant_format& f = quant_formats[formats[e]];
      const cpu::quant_element_fn element = cpu::quant_element(formats[e]);
      values[e].resize(static_cast<size_t>(rows * elements));
      for (int64_t i = 0; i < rows * elements; ++i)
        values[e][static_cast<size_t>(i)] = element(blobs[e].data() + 2 + i / f.block_elements * f.block_bytes, static_cast<int>(i % f.block_elements));
    }
  }
  double times(int64_t e, int64_t row, const std::vector<double>& x) {
    const double* const w = values[static_cast<size_t>(e)].data() + row * elements;
    double sum = 0;
    for (int64_t i = 0; i < elements; ++i) sum += w[i] * x[static_cast<size_t>(i)];
    return bias.tensor() ? sum + bias.get(e, row) : sum;
  }
  const cqsa_moe_weights* args() const { return there() ? &weights : nullptr; }
};

struct three {
  projection gate, up, down;
};

// ---- the layer --------------------------------------------------------------------------------------------------------------

struct problem {
  int64_t tokens = 8, topk = 2, experts = 4, hidden = 256, inter = 256;
  int32_t layout = CQSA_MOE_SEPARATE, activation = CQSA_MOE_SWIGLU, precision = 0, output = 0;
  float alpha = 0, beta = 0, limit = 0;
  std::vector<cqsa_quant_format> gate_formats{CQSA_QUANT_Q8_0}, up_formats, down_formats{CQSA_QUANT_Q8_0};
  cqsa_dtype x_dtype = CQSA_DTYPE_F32, out_dtype = CQSA_DTYPE_F32, id_dtype = CQSA_DTYPE_I32;
  int64_t gap = 0, shared_inter = 0;
  int shared_gate = 0;  // 0: none, 1: [hidden], 2: [tokens, 1]
  bool biases = false, mapped = false;

  three own, shared;
  array x, ids, weights, map, factor, out, counters;
  cqsa_moe_args args = CQSA_MOE_ARGS_INIT;
  cqsa_moe_shared shared_args = CQSA_MOE_SHARED_INIT;

  bool gated() const { return moe::is_gated(activation); }
  bool slots() const { return output == CQSA_MOE_PER_SLOT; }

  void make_three(engine& r, three& t, int64_t count, int64_t n) {
    const bool together = layout != CQSA_MOE_SEPARATE;
    const auto& up = up_formats.empty() ? gate_formats : up_formats;
    if (gated()) t.gate.make(r, count, together ? 2 * n : n, hidden, gate_formats);
    if (!together) t.up.make(r, count, n, hidden, up);
    t.down.make(r, count, hidden, n, down_formats);
    for (projection* p : {&t.gate, &t.up, &t.down}) {
      if (!biases || !p->there() || &t == &shared) continue;
      p->bias = array(CQSA_DTYPE_F32, {count, p->rows}, gap);
      for (int64_t e = 0; e < count; ++e)
        for (int64_t i = 0; i < p->rows; ++i) p->bias.set(e, i, 0.2 * normal(r));
    }
  }
  // N(0,1) with 0.5 % outliers x12, and token 1 all zero.
  void make_x(engine& r) {
    x = array(x_dtype, {tokens, hidden}, gap);
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t i = 0; i < hidden; ++i) x.set(t, i, t == 1 ? 0 : normal(r) * (r() % 200 == 0 ? 12 : 1));
  }
  // Skewed: the first experts have most tokens, the last none.
  void make_routing(engine& r) {
    const int64_t count = mapped ? experts + 3 : experts;
    ids = array(id_dtype, {tokens, topk}, gap), weights = array(CQSA_DTYPE_F32, {tokens, topk}, gap);
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t s = 0; s < topk; ++s) {
        const double skew = std::pow(double(r() % 4096) / 4096, 2);
        ids.set(t, s, r() % 16 == 0 ? -1 : std::floor(skew * double(count > 1 && !mapped ? count - 1 : count)));
        weights.set(t, s, r() % 16 == 0 ? 0 : 0.1 + double(r() % 1024) / 1024);
      }
    if (!mapped) return;
    map = array(CQSA_DTYPE_I32, {count});
    for (int64_t i = 0; i < count; ++i) map.set(i, 0, double(i < 3 ? -1 : count - 1 - i));
  }
  void make(uint32_t seed) {
    engine r(seed);
    make_three(r, own, experts, inter);
    if (shared_inter) make_three(r, shared, 1, shared_inter);
    make_x(r), make_routing(r);
    if (shared_gate == 1) factor = array(CQSA_DTYPE_F32, {hidden});
    if (shared_gate == 2) factor = array(CQSA_DTYPE_F32, {tokens, 1});
    for (int64_t i = 0; shared_gate && i < factor.rows(); ++i) factor.set(i, 0, shared_gate == 1 ? normal(r) / std::sqrt(double(hidden)) : normal(r));
    out = array(slots() ? CQSA_DTYPE_F32 : out_dtype, {slots() ? tokens * topk : tokens, hidden}, gap);
    bind();
  }
  void bind() {
    args = CQSA_MOE_ARGS_INIT;
    args.x = x.tensor(), args.topk_ids = ids.tensor(), args.topk_weights = weights.tensor(), args.expert_map = map.tensor(), args.out = out.tensor();
    args.w_gate = own.gate.args(), args.w_up = own.up.args(), args.w_down = own.down.args();
    args.b_gate = own.gate.bias.tensor(), args.b_up = own.up.bias.tensor(), args.b_down = own.down.bias.tensor();
    args.gate_up_layout = layout, args.activation = activation, args.precision = precision, args.output = output;
    args.alpha = alpha, args.beta = beta, args.limit = limit;
    if (shared_inter == 0) return;
    shared_args = CQSA_MOE_SHARED_INIT;
    shared_args.w_gate = shared.gate.args(), shared_args.w_up = shared.up.args(), shared_args.w_down = shared.down.args(), shared_args.gate = factor.tensor();
    args.shared = &shared_args;
  }
  void decode() {
    for (projection* p : {&own.gate, &own.up, &own.down, &shared.gate, &shared.up, &shared.down}) p->decode();
  }

  // ---- what it is in f64 ----

  double act(double g, double u) const {
    const auto sigmoid = [](double z) { return 1 / (1 + std::exp(-z)); };
    const auto gelu = [](double z) { return z * 0.5 * (1 + std::erf(z / std::sqrt(2.0))); };
    const auto gelu_tanh = [](double z) { return z * 0.5 * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (z + 0.044715 * z * z * z))); };
    const double bound = limit > 0 ? double(limit) : INFINITY, a = alpha != 0 ? double(alpha) : 1;
    switch (activation) {
      case CQSA_MOE_SWIGLU: return std::min(g, bound) * sigmoid(a * std::min(g, bound)) * (std::clamp(u, -bound, bound) + double(beta));
      case CQSA_MOE_GEGLU: return gelu(g) * u;
      case CQSA_MOE_GEGLU_TANH: return gelu_tanh(g) * u;
      case CQSA_MOE_SILU: return u * sigmoid(u);
      case CQSA_MOE_GELU: return gelu(u);
      case CQSA_MOE_GELU_TANH: return gelu_tanh(u);
      default: return u > 0 ? u * u : 0;
    }
  }
  static std::vector<double> rounded(const std::vector<double>& x) {
    std::vector<double> out(x.size());
    for (size_t g = 0; g < x.size(); g += 32) {
      double a = 0;
      for (size_t i = g; i < g + 32; ++i) a = std::max(a, std::fabs(x[i]));
      for (size_t i = g; i < g + 32; ++i) out[i] = a == 0 ? 0 : std::nearbyint(x[i] * (127 / a)) * (a / 127);
    }
    return out;
  }
  std::vector<double> taken(const std::vector<double>& x, cqsa_quant_format format, bool by_int8) const {
    return by_int8 && !moe::is_plain(format) ? rounded(x) : x;
  }
  std::vector<double> one_expert(three& w, int64_t e, int64_t n, const std::vector<double>& x, bool by_int8) {
    projection &up = w.up.there() ? w.up : w.gate, &gate = w.gate;
    std::vector<double> h(static_cast<size_t>(n)), y(static_cast<size_t>(hidden));
    const std::vector<double> for_up = taken(x, up.formats[size_t(e)], by_int8), for_gate = gated() ? taken(x, gate.formats[size_t(e)], by_int8) : x;
    for (int64_t i = 0; i < n; ++i)
      h[size_t(i)] = act(gated() ? gate.times(e, moe::gate_row(layout, i), for_gate) : 0, up.times(e, moe::up_row(layout, i, n), for_up));
    h = taken(h, w.down.formats[size_t(e)], by_int8);
    for (int64_t i = 0; i < hidden; ++i) y[size_t(i)] = w.down.times(e, i, h);
    return y;
  }
  int64_t expert_at(int64_t t, int64_t s) {
    const double id = ids.get(t, s);
    return id < 0 ? -1 : static_cast<int64_t>(mapped ? map.get(static_cast<int64_t>(id)) : id);
  }
  double factor_at(int64_t t, const std::vector<double>& row) {
    double z = 0;
    if (shared_gate == 0) return 1;
    if (shared_gate == 2) z = factor.get(t);
    for (int64_t i = 0; shared_gate == 1 && i < hidden; ++i) z += row[size_t(i)] * factor.get(i);
    return 1 / (1 + std::exp(-z));
  }
  // decode() first. Rows as those of out.
  std::vector<double> exact(bool by_int8 = false) {
    std::vector<double> all(static_cast<size_t>((slots() ? tokens * topk : tokens) * hidden));
    for (int64_t t = 0; t < tokens; ++t) {
      std::vector<double> row(static_cast<size_t>(hidden));
      for (int64_t i = 0; i < hidden; ++i) row[size_t(i)] = x.get(t, i);
      for (int64_t s = 0; s < topk; ++s) {
        const int64_t e = expert_at(t, s);
        if (e < 0 || (!slots() && weights.get(t, s) == 0)) continue;
        const std::vector<double> y = one_expert(own, e, inter, row, by_int8);
        for (int64_t i = 0; i < hidden; ++i) all[size_t((slots() ? t * topk + s : t) * hidden + i)] += slots() ? y[size_t(i)] : weights.get(t, s) * y[size_t(i)];
      }
      if (!shared_inter) continue;
      const std::vector<double> y = one_expert(shared, 0, shared_inter, row, by_int8);
      for (int64_t i = 0; i < hidden; ++i) all[size_t(t * hidden + i)] += factor_at(t, row) * y[size_t(i)];
    }
    return all;
  }
  std::vector<double> result() {
    std::vector<double> all;
    for (int64_t i = 0; i < out.rows(); ++i)
      for (int64_t j = 0; j < hidden; ++j) all.push_back(out.get(i, j));
    return all;
  }
};

// ---- errors -----------------------------------------------------------------------------------------------------------------

struct errors {
  double relative = 0, worst_row = 0;  // RMS of the difference to RMS of the exact; of a row
  double nmse() const { return relative * relative; }
};
inline errors compare(const std::vector<double>& got, const std::vector<double>& exact, int64_t columns) {
  errors e;
  double all_difference = 0, all_size = 0;
  for (size_t i = 0; i < exact.size(); i += size_t(columns)) {
    double difference = 0, size = 0;
    for (size_t j = i; j < i + size_t(columns); ++j) difference += std::pow(got[j] - exact[j], 2), size += exact[j] * exact[j];
    if (size > 0) e.worst_row = std::max(e.worst_row, std::sqrt(difference / size));
    if (size == 0 && difference > 0) e.worst_row = INFINITY;
    all_difference += difference, all_size += size;
  }
  e.relative = all_size > 0 ? std::sqrt(all_difference / all_size) : all_difference > 0 ? INFINITY : 0;
  if (e.relative != e.relative) e.relative = INFINITY;
  return e;
}

// ---- runs -------------------------------------------------------------------------------------------------------------------

inline cqsa_status run(problem& p) { return cqsa_moe_prefill(cpu_context(), &p.args, nullptr); }

inline std::vector<const cqsa_moe_impl*> implementations() {
  const cqsa_backend_v1& backend = *cqsa_cpu_backend();
  std::vector<const cqsa_moe_impl*> all;
  cqsa_moe_leaf leaf{};
  for (int32_t i = 0; i < backend.num_moe; ++i)
    if (backend.moe[i].probe(nullptr, &leaf, nullptr, 0) == CQSA_OK) all.push_back(&backend.moe[i]);
  return all;
}

// By one implementation, `chunk` tokens at a time, in memory of exactly its size that is full of NaN.
inline cqsa_status run_on(const cqsa_moe_impl& impl, problem& p, int64_t chunk = 0) {
  cqsa_moe_leaf leaf;
  fp8::operand room[moe::most_operands + 1];
  fp8::operand_list list(*cpu_context(), room, fp8::look::everywhere);
  const cqsa_status status = moe::bind(list, p.args, leaf);
  if (status != CQSA_OK) return status;
  leaf.chunk = chunk ? std::min(chunk, p.tokens) : p.tokens;
  const cqsa_exec exec = plain_exec(*cpu_context());
  const uint64_t bytes = (impl.workspace(&leaf, 2) + 63) / 64 * 64;
  std::unique_ptr<char, void (*)(void*)> memory(static_cast<char*>(std::aligned_alloc(64, bytes + 64)), std::free);
  std::memset(memory.get(), 0xff, bytes + 64);
  const cqsa_status done = impl.launch(nullptr, &leaf, memory.get(), bytes, &exec, nullptr);
  for (uint64_t i = bytes; i < bytes + 64; ++i) REQUIRE(memory.get()[i] == char(0xff));
  return done;
}

}  // namespace moe_test
