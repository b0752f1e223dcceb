// SPDX-License-Identifier: Apache-2.0
// Random products of FP8 codes for the kernels of cqsa_fp8_gemm() in the harness, against plain loops in f64.
#pragma once
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include "backends/fp8_rules.h"
#include "backends/gpu/fp8_gemm.h"
#include "dtype.h"
#include "simt_device.h"
#include "simt_port.h"

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace {

using namespace cqsa;
using namespace cqsa::gpu;

inline float decode_code(cqsa_dtype t, uint8_t c) {
  switch (t) {
    case CQSA_DTYPE_E4M3FN: return e4m3fn_to_f32(c);
    case CQSA_DTYPE_E5M2: return e5m2_to_f32(c);
    case CQSA_DTYPE_E4M3FNUZ: return e4m3fnuz_to_f32(c);
    default: return e5m2fnuz_to_f32(c);
  }
}
inline uint8_t encode_code(cqsa_dtype t, float x) {
  switch (t) {
    case CQSA_DTYPE_E4M3FN: return f32_to_e4m3fn(x);
    case CQSA_DTYPE_E5M2: return f32_to_e5m2(x);
    case CQSA_DTYPE_E4M3FNUZ: return f32_to_e4m3fnuz(x);
    default: return f32_to_e5m2fnuz(x);
  }
}
inline int64_t bytes_of_type(cqsa_dtype t) { return (t >> 8 & 0xff) / 8; }
inline double read_element(const char* p, cqsa_dtype t) {
  uint16_t half;
  float f;
  std::memcpy(&half, p, 2);
  if (t == CQSA_DTYPE_F32) return std::memcpy(&f, p, 4), f;
  return t == CQSA_DTYPE_F16 ? cqsa::f16_to_f32(half) : cqsa::bf16_to_f32(half);
}
inline void write_element(char* p, cqsa_dtype t, float x) {
  const uint16_t half = t == CQSA_DTYPE_F16 ? cqsa::f32_to_f16(x) : cqsa::f32_to_bf16(x);
  t == CQSA_DTYPE_F32 ? std::memcpy(p, &x, 4) : std::memcpy(p, &half, 2);
}

// A matrix [batch, rows, columns] somewhere in memory of its own, any strides.
struct stored_matrix {
  std::vector<char> memory;
  cqsa_matrix view{};
  int64_t bytes = 1;

  char* at(int64_t b, int64_t r, int64_t c) const {
    return static_cast<char*>(view.data) + bytes * (b * view.stride[0] + r * view.stride[1] + c * view.stride[2]);
  }
};

struct gemm_options {
  int64_t most = 150;           // m and n
  bool aligned = false;         // rows of codes are compact along k and aligned to 16
  bool fnuz = true;             // those formats too
  std::vector<cqsa_dtype> formats{CQSA_DTYPE_E4M3FN, CQSA_DTYPE_E5M2, CQSA_DTYPE_E4M3FNUZ, CQSA_DTYPE_E5M2FNUZ};
};

struct gemm_problem {
  cqsa_fp8_gemm_leaf leaf{};
  stored_matrix a, b, c, d;
  std::vector<float> scale_a, scale_b, d_scale;
  std::vector<char> bias, workspace;
  float amax = -1;
  std::mt19937_64 random;
  std::string what;

  explicit gemm_problem(uint64_t seed) : random(seed) {}
  int64_t between(int64_t low, int64_t high) { return low + int64_t(random() % uint64_t(high - low + 1)); }
  bool one_in(int64_t n) { return between(1, n) == 1; }
  double uniform() { return double(int64_t(random() >> 11)) * 0x1p-52 - 1; }

  void place(stored_matrix& x, cqsa_dtype type, int64_t batch, int64_t rows, int64_t columns, bool aligned, bool broadcast) {
    x.bytes = bytes_of_type(type);
    const bool transposed = !aligned && one_in(4);
    const int64_t pad = aligned ? (16 - columns % 16) % 16 + 16 * between(0, 1) : between(0, 3) * between(0, 5);
    const int64_t inner = (transposed ? rows : columns) + pad, outer = transposed ? columns : rows;
    x.view = {nullptr, type, 0, {broadcast ? 0 : inner * outer, transposed ? 1 : inner, transposed ? inner : 1}};
    x.memory.assign(size_t(x.bytes * (inner * outer * (broadcast ? 1 : batch) + 64)), 0x55);
    char* p = x.memory.data();
    p += (16 - (reinterpret_cast<uintptr_t>(p) & 15)) % 16 + 16;
    x.view.data = p + (aligned || one_in(2) ? 0 : x.bytes * between(1, 7));
  }
  void fill_codes(stored_matrix& x, int64_t batch, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < batch; ++i)
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t k = 0; k < columns; ++k)
          *x.at(i, r, k) = char(encode_code(x.view.dtype, one_in(20) ? float(400 * uniform()) : float(std::ldexp(uniform(), int(between(-12, 2))))));
  }
  cqsa_scale_grid grid(std::vector<float>& data, int64_t batch, int64_t rows, int64_t columns, const int64_t (&block)[2], int64_t* batch_stride) {
    cqsa_scale_grid g{};
    const int64_t size[2] = {rows, columns};
    for (int i = 0; i < 2; ++i) g.block[i] = block[i] == 0 ? std::max<int64_t>(size[i], 1) : std::max<int64_t>(std::min(block[i], size[i]), 1);
    g.rows = (rows + g.block[0] - 1) / g.block[0], g.columns = (columns + g.block[1] - 1) / g.block[1];
    g.dtype = CQSA_DTYPE_F32;
    const bool by_columns = one_in(2), shared = one_in(3);
    const int64_t most_rows = std::max<int64_t>(g.rows, 1), most_columns = std::max<int64_t>(g.columns, 1);
    g.stride[0] = by_columns ? 1 : most_columns, g.stride[1] = by_columns ? (most_rows + 3) / 4 * 4 : 1;
    const int64_t each = by_columns ? g.stride[1] * most_columns : most_rows * most_columns;
    *batch_stride = shared ? 0 : each;
    data.resize(size_t(each * batch + 1));
    for (float& x : data) x = float(std::ldexp(1 + 0.5 * uniform(), int(between(-6, 4))));
    g.data = data.data();
    return g;
  }
  double scale_of(const cqsa_scale_grid& g, int64_t batch_stride, int64_t i, int64_t r, int64_t k) const {
    return g.data ? static_cast<const float*>(g.data)[i * batch_stride + r / g.block[0] * g.stride[0] + k / g.block[1] * g.stride[1]] : 1.0;
  }

  void make(const gemm_options& o) {
    cqsa_fp8_gemm_leaf& l = leaf;
    l.struct_size = sizeof l;
    const int64_t ks[] = {0, 1, 16, 31, 128, 129, 200, 256, 400};
    l.batch = one_in(3) ? between(1, 3) : 1, l.m = one_in(4) ? between(1, 5) : between(1, o.most), l.n = between(1, o.most), l.k = ks[between(0, 8)];
    if (one_in(30)) (one_in(2) ? l.m : l.n) = 0;
    l.accumulate = int32_t(between(0, 1));
    const auto any = [&] { return o.formats[size_t(between(0, int64_t(o.formats.size()) - 1))]; };
    place(a, any(), l.batch, l.m, l.k, o.aligned, one_in(4)), place(b, any(), l.batch, l.n, l.k, o.aligned, one_in(4));
    fill_codes(a, l.batch, l.m, l.k), fill_codes(b, l.batch, l.n, l.k);
    constexpr int64_t blocks_a[][2] = {{0, 0}, {1, 0}, {1, 128}}, blocks_b[][2] = {{0, 0}, {1, 0}, {1, 128}, {128, 128}};
    if (!one_in(4)) l.scale_inv_a = grid(scale_a, l.batch, l.m, l.k, blocks_a[between(0, 2)], &l.scale_batch_stride_a);
    if (!one_in(4)) l.scale_inv_b = grid(scale_b, l.batch, l.n, l.k, blocks_b[between(0, 3)], &l.scale_batch_stride_b);
    const cqsa_dtype floats[] = {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16}, formats[] = {CQSA_DTYPE_E4M3FN, CQSA_DTYPE_E5M2, CQSA_DTYPE_E4M3FNUZ, CQSA_DTYPE_E5M2FNUZ};
    place(d, one_in(3) ? formats[between(0, 3)] : floats[between(0, 2)], l.batch, l.m, l.n, one_in(2), false);
    l.alpha = one_in(3) ? uniform() : 1.0;
    if (one_in(3)) make_c(floats[between(0, 2)]);
    if (one_in(2)) make_bias(floats[between(0, 2)]);
    if (bytes_of_type(d.view.dtype) == 1 && one_in(2)) d_scale = {float(std::ldexp(1 + uniform() / 2, int(between(-12, 0))))}, l.d_scale = d_scale.data();
    if (one_in(2)) l.d_amax = &amax;
    l.a = a.view, l.b = b.view, l.c = c.view, l.d = d.view;
    char text[200];
    std::snprintf(text, sizeof text, "batch %d m %d n %d k %d, types %x %x -> %x, strides %d %d / %d %d -> %d %d", int(l.batch), int(l.m), int(l.n), int(l.k), l.a.dtype,
                  l.b.dtype, l.d.dtype, int(l.a.stride[1]), int(l.a.stride[2]), int(l.b.stride[1]), int(l.b.stride[2]), int(l.d.stride[1]), int(l.d.stride[2]));
    what = text;
  }
  void make_c(cqsa_dtype type) {
    leaf.beta = uniform();
    place(c, type, leaf.batch, leaf.m, leaf.n, one_in(2), false);
    for (int64_t i = 0; i < leaf.batch; ++i)
      for (int64_t r = 0; r < leaf.m; ++r)
        for (int64_t n = 0; n < leaf.n; ++n) write_element(c.at(i, r, n), type, float(50 * uniform()));
  }
  void make_bias(cqsa_dtype type) {
    leaf.bias_dtype = type, leaf.bias_stride = between(1, 2);
    bias.resize(size_t(leaf.n * leaf.bias_stride * bytes_of_type(type) + 8));
    for (int64_t n = 0; n < leaf.n; ++n) write_element(bias.data() + n * leaf.bias_stride * bytes_of_type(type), type, float(50 * uniform()));
    leaf.bias = bias.data();
  }

  // The element in f64, and the sum of magnitudes that its error goes by.
  double exact(int64_t i, int64_t r, int64_t n, double* size) const {
    const cqsa_fp8_gemm_leaf& l = leaf;
    double sum = 0, all = 0;
    for (int64_t k = 0; k < l.k; ++k) {
      const double x = double(decode_code(l.a.dtype, uint8_t(*a.at(i, r, k)))) * decode_code(l.b.dtype, uint8_t(*b.at(i, n, k))) *
                       scale_of(l.scale_inv_a, l.scale_batch_stride_a, i, r, k) * scale_of(l.scale_inv_b, l.scale_batch_stride_b, i, n, k);
      sum += x, all += std::fabs(x);
    }
    double value = l.alpha * sum;
    all *= std::fabs(l.alpha);
    if (l.beta != 0) value += l.beta * read_element(c.at(i, r, n), l.c.dtype), all += std::fabs(l.beta * 50);
    if (l.bias) value += read_element(bias.data() + n * l.bias_stride * bytes_of_type(l.bias_dtype), l.bias_dtype), all += 50;
    *size = all;
    return value;
  }

  // "" or what is wrong. tolerance: of the sum of magnitudes.
  std::string mistake(double tolerance) const {
    double largest = 0;
    for (int64_t i = 0; i < leaf.batch; ++i)
      for (int64_t r = 0; r < leaf.m; ++r)
        for (int64_t n = 0; n < leaf.n; ++n) {
          double size = 0;
          const double want = exact(i, r, n, &size);
          largest = std::max(largest, std::fabs(want));
          if (!is_near(d.at(i, r, n), want, tolerance * size + 1e-30)) {
            char text[200];
            std::snprintf(text, sizeof text, " element %d %d %d: wanted %g, size %g, got %g", int(i), int(r), int(n), want, size, got(d.at(i, r, n)));
            return what + text;
          }
        }
    if (leaf.d_amax && !(std::fabs(amax - largest) <= 1e-3 * largest + 1e-30)) return what + " amax";
    return "";
  }
  double got(const char* p) const { return bytes_of_type(leaf.d.dtype) == 1 ? decode_code(leaf.d.dtype, uint8_t(*p)) : read_element(p, leaf.d.dtype); }
  // Rounded values of want - error and want + error are the ends of what may be there.
  bool is_near(const char* p, double want, double error) const {
    const cqsa_dtype t = leaf.d.dtype;
    const auto rounded = [&](double x) -> double {
      if (bytes_of_type(t) == 1) return decode_code(t, encode_code(t, float(x) * (leaf.d_scale ? *leaf.d_scale : 1.0f)));
      if (t == CQSA_DTYPE_F32) return float(x);
      return t == CQSA_DTYPE_F16 ? cqsa::f16_to_f32(cqsa::f64_to_f16(x)) : cqsa::bf16_to_f32(cqsa::f64_to_bf16(x));
    };
    return got(p) >= rounded(want - error) && got(p) <= rounded(want + error);
  }
};

// Runs with a prepared workspace of exactly the bytes asked for, which must be as it was afterwards.
inline std::string run_gemm(simt::device& device, const cqsa_fp8_gemm_impl& impl, gemm_problem& x) {
  char reason[256] = "";
  x.leaf.chip = {device.facts.tier, device.facts.compute_units, device.facts.shared_bytes, 0};
  if (impl.probe(&device, &x.leaf, reason, sizeof reason) != CQSA_OK) return std::string("declined: ") + reason;
  const uint64_t bytes = impl.workspace(&x.leaf, 1);
  std::vector<uint64_t> memory(bytes / 8 + 9, 0);
  char* const start = reinterpret_cast<char*>(memory.data());
  if (bytes) reinterpret_cast<fp8::workspace_header*>(start)->magic = fp8::workspace_magic;
  const std::vector<uint64_t> before = memory;
  if (impl.launch(&device, &x.leaf, bytes ? start : nullptr, bytes, nullptr, nullptr) != CQSA_OK) return simt::last_error();
  return memory == before ? "" : "the workspace has changed";
}

inline simt::device gemm_device(int n, int lanes, int tier) {
  simt::device device;
  device.facts.lanes = lanes, device.facts.compute_units = 1 + n % 3, device.seed = uint64_t(n), device.facts.tier = device.facts.arch = tier;
  return device;
}

// How many of `count` random problems are declined; fails on a wrong one.
inline int check_gemms(const cqsa_fp8_gemm_impl& impl, const gemm_options& o, int count, int tier, double tolerance) {
  int declined = 0;
  for (int n = 0; n < count; ++n) {
    gemm_problem x(uint64_t(n + 1));
    x.make(o);
    INFO("problem " << n << ": " << x.what);
    simt::device device = gemm_device(n, n % 2 && tier == 0 ? 64 : 32, tier);
    const std::string text = run_gemm(device, impl, x);
    if (text.rfind("declined", 0) == 0) {
      ++declined;
      continue;
    }
    if (!text.empty()) FAIL(text);
    const std::string wrong = x.mistake(tolerance);
    if (!wrong.empty()) FAIL(wrong);
  }
  return declined;
}

}  // namespace
