// SPDX-License-Identifier: Apache-2.0
// Leaf problems for test_cpu_leaf.cpp: operands with guard zones, a random draw over the whole operator, and the comparison.
#pragma once
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#endif

#include "backends/cpu/attention_job.h"
#include "backends/cpu/cpu_features.h"
#include "backends/cpu/element.h"
#include "backends/cqsa_backend.h"
#include "dtype.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#if defined(CQSA_TEST_AMX_MODEL)
namespace cqsa::cpu {
extern const kernel_target target_amx_model;
bool model_tiles_released();
}
#endif

namespace {

constexpr double inf = std::numeric_limits<double>::infinity();
constexpr double nan64 = std::numeric_limits<double>::quiet_NaN();

int64_t bytes_of(cqsa_dtype t) { return ((t >> 8) & 0xff) / 8; }

void put(char* p, cqsa_dtype t, double x) {
  const float f = float(x);
  uint16_t half = 0;
  uint8_t byte = 0;
  switch (t) {
    case CQSA_DTYPE_F64: std::memcpy(p, &x, 8); return;
    case CQSA_DTYPE_F32: std::memcpy(p, &f, 4); return;
    case CQSA_DTYPE_F16: half = cqsa::f32_to_f16(f); break;
    case CQSA_DTYPE_BF16: half = cqsa::f32_to_bf16(f); break;
    case CQSA_DTYPE_I8: byte = uint8_t(int8_t(std::isnan(x) ? 77 : x)); break;
    case CQSA_DTYPE_E4M3FN: byte = cqsa::f32_to_e4m3fn(f); break;
    case CQSA_DTYPE_E5M2: byte = cqsa::f32_to_e5m2(f); break;
    default: byte = x != 0; break;
  }
  if (bytes_of(t) == 2) std::memcpy(p, &half, 2);
  else std::memcpy(p, &byte, 1);
}
double get(const char* p, cqsa_dtype t) {
  if (t == CQSA_DTYPE_F64) { double x; std::memcpy(&x, p, 8); return x; }
  if (t == CQSA_DTYPE_F32) { float x; std::memcpy(&x, p, 4); return x; }
  uint16_t x;
  std::memcpy(&x, p, 2);
  return t == CQSA_DTYPE_F16 ? cqsa::f16_to_f32(x) : cqsa::bf16_to_f32(x);
}

enum layout { compact, bshd, spread, backwards, misaligned, num_layouts };

// Memory with exactly the bytes the view reaches, so that a sanitizer sees any step beside it.
struct tensor {
  int64_t shape[4] = {0, 0, 0, 0};
  cqsa_view view{};
  std::vector<char> memory;

  tensor() = default;
  tensor(cqsa_dtype type, std::vector<int64_t> dims, layout how = compact) {
    std::copy(dims.begin(), dims.end(), shape);
    const int64_t d1 = shape[1], d2 = shape[2], d3 = shape[3];
    int64_t s[4] = {d1 * d2 * d3, d2 * d3, d3, 1};
    if (how == bshd) s[1] = d3, s[2] = d1 * d3;
    if (how == spread) s[0] = d1 * (d2 + 1) * 3 * d3, s[1] = (d2 + 1) * 3 * d3, s[2] = 3 * d3, s[3] = 2;
    if (how == backwards) s[2] = -d3;
    int64_t low = 0, high = 0;
    for (int a = 0; a < 4; ++a) (s[a] < 0 ? low : high) += s[a] * std::max<int64_t>(shape[a] - 1, 0);
    const int64_t shift = how == misaligned ? 1 : 0;
    memory.resize(size_t((high - low + 1) * bytes_of(type) + shift), 0);
    view.data = memory.data() + shift - low * bytes_of(type);
    view.dtype = type;
    std::copy(s, s + 4, view.stride);
  }
  tensor(tensor&&) = default;  // a copy's view would point into the original
  tensor& operator=(tensor&&) = default;
  bool empty() const { return memory.empty(); }
  char* at(int64_t b, int64_t h, int64_t r, int64_t c) const {
    return static_cast<char*>(view.data) + bytes_of(view.dtype) * (b * view.stride[0] + h * view.stride[1] +
                                                                   r * view.stride[2] + c * view.stride[3]);
  }
  double read(int64_t b, int64_t h, int64_t r, int64_t c) const { return get(at(b, h, r, c), view.dtype); }
  void write(int64_t b, int64_t h, int64_t r, int64_t c, double x) { put(at(b, h, r, c), view.dtype, x); }
  template <class F> void each(const F& f) const {
    for (int64_t b = 0; b < shape[0]; ++b)
      for (int64_t h = 0; h < shape[1]; ++h)
        for (int64_t r = 0; r < shape[2]; ++r)
          for (int64_t c = 0; c < shape[3]; ++c) f(b, h, r, c);
  }
  template <class F> void fill(const F& f) {
    each([&](int64_t b, int64_t h, int64_t r, int64_t c) { write(b, h, r, c, f(b, h, r, c)); });
  }
};

// ---- executors
struct counter {
  std::atomic<int64_t> done{0};
  int64_t stop_at = -1;
};
int32_t count_poll(void* user, int64_t done) {
  auto* c = static_cast<counter*>(user);
  return (c->done += done) >= c->stop_at && c->stop_at >= 0;
}
cqsa_status run_threads(void*, int64_t n, void (*task)(void*, int64_t), void* data) {
  std::vector<std::thread> all;
  for (int64_t i = 0; i < n; ++i) all.emplace_back(task, data, i);
  for (std::thread& t : all) t.join();
  return CQSA_OK;
}
cqsa_status run_backwards(void*, int64_t n, void (*task)(void*, int64_t), void* data) {
  for (int64_t i = n; i-- > 0;) task(data, i);
  return CQSA_OK;
}
cqsa_status run_fails(void*, int64_t, void (*)(void*, int64_t), void*) { return CQSA_ERROR_CALLBACK; }

#if defined(CQSA_TEST_AMX_MODEL)
// The entry of the AMX kernels on modelled tiles (tests/unit/CMakeLists.txt): what cpu_amx is where the CPU has AMX.
using cqsa::cpu::target_amx_model;
const cqsa_attention_impl amx_model = {
    "cpu_amx (model)", "a test",
    [](const cqsa_attention_leaf* leaf, char* reason, uint64_t size) {
      if (!cqsa::cpu::this_cpu().avx512) return cqsa_status(CQSA_ERROR_UNSUPPORTED);
      return cqsa::cpu::probe_leaf(target_amx_model, leaf, reason, size);
    },
    [](const cqsa_attention_leaf* leaf, cqsa_leaf_tile* out, int32_t n) { return cqsa::cpu::tiles_of(target_amx_model, leaf, out, n); },
    [](const cqsa_attention_leaf* leaf, int64_t workers) { return cqsa::cpu::workspace_of(target_amx_model, leaf, workers); },
    [](void*, const cqsa_attention_leaf* leaf, void* workspace, uint64_t bytes, const cqsa_exec* exec, void*) {
      return cqsa::cpu::launch_on(target_amx_model, leaf, workspace, bytes, exec);
    },
    [](const cqsa_attention_leaf* leaf) { return cqsa::cpu::units_of(target_amx_model, leaf); }};
#endif

// The entries but the reference that accept a leaf. What the CPU lacks is left out, AMX tiles but for their model.
std::vector<const cqsa_attention_impl*> fast_entries(const cqsa_attention_leaf& leaf) {
  std::vector<const cqsa_attention_impl*> out;
  const cqsa_backend_v1* cpu = cqsa_cpu_backend();
  for (int32_t i = 0; i + 1 < cpu->num_attention; ++i)
    if (cpu->attention[i].probe(&leaf, nullptr, 0) == CQSA_OK) out.push_back(&cpu->attention[i]);
#if defined(CQSA_TEST_AMX_MODEL)
  if (amx_model.probe(&leaf, nullptr, 0) == CQSA_OK) out.push_back(&amx_model);
#endif
  return out;
}
// .. that accept plain operands of a type.
std::vector<const cqsa_attention_impl*> fast_entries(cqsa_dtype type = CQSA_DTYPE_F32) {
  cqsa_attention_leaf leaf{};
  leaf.head_dim = leaf.head_dim_v = 1;
  leaf.q.dtype = leaf.k.dtype = leaf.v.dtype = leaf.out.dtype = type;
  return fast_entries(leaf);
}
// Whether an entry multiplies pairs of bf16: then p is rounded to bf16.
bool rounds_p(const cqsa_attention_impl& impl) {
  const std::string name = impl.name;
  return name.find("amx") != name.npos || name.find("bf16") != name.npos;
}
const cqsa_attention_impl& reference() {
  const cqsa_backend_v1* cpu = cqsa_cpu_backend();
  return cpu->attention[cpu->num_attention - 1];
}

// Runs with a workspace of exactly the bytes asked for, full of NaN, between two guards.
cqsa_status launch(const cqsa_attention_impl& impl, const cqsa_attention_leaf& leaf, const cqsa_exec* exec = nullptr) {
  const int64_t workers = exec ? exec->num_workers : 1;
  const uint64_t bytes = impl.workspace(&leaf, workers);
  const uint64_t guard = 256;
  std::unique_ptr<char, void (*)(void*)> memory(
      static_cast<char*>(std::aligned_alloc(64, size_t((bytes + 2 * guard + 63) / 64 * 64))), std::free);
  std::memset(memory.get(), 0xff, bytes + 2 * guard);
  std::memset(memory.get(), 0x5a, guard);
  std::memset(memory.get() + guard + bytes, 0x5a, guard);
  const cqsa_status status = impl.launch(nullptr, &leaf, memory.get() + guard, bytes, exec, nullptr);
  for (uint64_t i = 0; i < guard; ++i)
    if (memory.get()[i] != 0x5a || memory.get()[guard + bytes + i] != 0x5a) FAIL("wrote outside the workspace");
  return status;
}

// ---- problems
struct problem {
  cqsa_attention_leaf leaf{};
  tensor q, k, v, k_scale, v_scale, mask, bias, slopes, sinks, out, lse, exact_out, exact_lse;
  std::vector<int32_t> cu_q, cu_k, used, pages;
  std::vector<int64_t> cu_q64, cu_k64;
  std::vector<cqsa_rect> rects;
  int64_t total_q = 0, total_k = 0;

  // Points the leaf at the tensors (a problem may have moved since).
  cqsa_attention_leaf with(const tensor& o, const tensor& s) const {
    cqsa_attention_leaf x = leaf;
    x.struct_size = sizeof x;
    auto set = [](cqsa_view& to, const tensor& from) { if (!from.empty()) to = from.view; };
    set(x.q, q), set(x.k, k), set(x.v, v), set(x.k_scale, k_scale), set(x.v_scale, v_scale), set(x.mask, mask);
    set(x.bias, bias), set(x.slopes, slopes), set(x.sinks, sinks), set(x.out, o), set(x.lse, s);
    if (!cu_q.empty()) x.cu_seqlens_q = cu_q.data(), x.index_dtype = CQSA_DTYPE_I32;
    if (!cu_k.empty()) x.cu_seqlens_k = cu_k.data();
    if (!cu_q64.empty()) x.cu_seqlens_q = cu_q64.data(), x.index_dtype = CQSA_DTYPE_I64;
    if (!cu_k64.empty()) x.cu_seqlens_k = cu_k64.data();
    if (!used.empty()) x.seqused_k = used.data(), x.seqused_dtype = CQSA_DTYPE_I32;
    if (!pages.empty()) x.page_table = pages.data();
    if (!rects.empty()) x.rects = rects.data(), x.num_rects = int64_t(rects.size());
    if (x.cu_seqlens_q)
      for (cqsa_view* view : {&x.q, &x.out, &x.lse}) view->stride[0] = 0;
    if (x.cu_seqlens_k)
      for (cqsa_view* view : {&x.k, &x.v, &x.k_scale, &x.v_scale}) view->stride[0] = 0;
    return x;
  }
};

// A plain problem with normal random values; named cases change what they are about.
problem plain(int64_t batch, int64_t heads, int64_t kv_heads, int64_t sq, int64_t sk, int64_t d, int64_t dv,
              cqsa_dtype type = CQSA_DTYPE_F32, uint32_t seed = 1, double scale = 1.0) {
  problem p;
  std::mt19937 rng(seed);
  std::normal_distribution<double> normal(0, scale);
  auto draw = [&](auto...) { return normal(rng); };
  cqsa_attention_leaf& x = p.leaf;
  x.batch = batch, x.num_heads = heads, x.num_kv_heads = kv_heads, x.head_dim = d, x.head_dim_v = dv;
  x.seqlen_q = sq, x.seqlen_k = sk, x.softmax_scale = 1.0 / std::sqrt(double(d));
  x.window_left = x.window_right = -1;
  x.tile_q = 64, x.tile_k = 64;
  p.q = tensor(type, {batch, heads, sq, d});
  p.k = tensor(type, {batch, kv_heads, sk, d});
  p.v = tensor(type, {batch, kv_heads, sk, dv});
  p.q.fill(draw), p.k.fill(draw), p.v.fill(draw);
  const cqsa_dtype exact = CQSA_DTYPE_F64;
  p.out = tensor(type == exact ? exact : CQSA_DTYPE_F32, {batch, heads, sq, dv});
  p.lse = tensor(type == exact ? exact : CQSA_DTYPE_F32, {batch, heads, sq, 1});
  p.exact_out = tensor(exact, {batch, heads, sq, dv});
  p.exact_lse = tensor(exact, {batch, heads, sq, 1});
  return p;
}
double rounding(cqsa_dtype t) {
  return t == CQSA_DTYPE_F16 ? 0x1p-11 : t == CQSA_DTYPE_BF16 ? 0x1p-8 : t == CQSA_DTYPE_F32 ? 0x1p-24 : 0;
}

// "" when got is want to within what f32 arithmetic and one rounding explain.
std::string differs(const tensor& got, const tensor& want, double tolerance) {
  std::string out;
  got.each([&](int64_t b, int64_t h, int64_t r, int64_t c) {
    const double g = got.read(b, h, r, c), w = want.read(b, h, r, c);
    const bool same = g == w || (std::isnan(g) && std::isnan(w)) ||
                      std::fabs(g - w) <= tolerance + 1.01 * rounding(got.view.dtype) * std::fabs(w) + 6e-8;
    if (!same && out.empty())
      out = "at " + std::to_string(b) + "," + std::to_string(h) + "," + std::to_string(r) + "," + std::to_string(c) +
            " got " + std::to_string(g) + " want " + std::to_string(w);
  });
  return out;
}

// Fails when a byte of a tensor changed that belongs to none of its elements.
struct guarded {
  tensor& t;
  std::vector<char> before;
  explicit guarded(tensor& x) : t(x) {
    std::fill(t.memory.begin(), t.memory.end(), char(0x5a));
    before = t.memory;
  }
  bool intact() const {
    std::vector<char> after = t.memory;
    t.each([&](int64_t b, int64_t h, int64_t r, int64_t c) {
      std::memset(after.data() + (t.at(b, h, r, c) - t.memory.data()), 0x5a, size_t(bytes_of(t.view.dtype)));
    });
    return after == before;
  }
};

void run_reference(problem& p) {
  REQUIRE(launch(reference(), p.with(p.exact_out, p.exact_lse)) == CQSA_OK);
}

// The largest magnitude among the values, scales applied: what the error of a rounded p is measured by. NaN and Inf aside.
double largest_value(const problem& p) {
  double most = 0;
  p.v.each([&](int64_t b, int64_t h, int64_t r, int64_t c) {
    const int64_t kind = p.leaf.scale_v;
    const tensor& s = p.v_scale;
    double x = cqsa::cpu::element(p.v.view, b, h, r, c);
    if (kind) x *= cqsa::cpu::scale_of(s.view, int32_t(kind), p.leaf.kv_group, b, h, r, c);
    if (std::isfinite(x)) most = std::max(most, std::fabs(x));
  });
  return most;
}
// Twice the error of the naive computation with p rounded to bf16, which is at most half an ulp of each p: 2^-9 |v|.
double allowed_error(const cqsa_attention_impl& impl, const problem& p, double tolerance) {
  return rounds_p(impl) ? tolerance + 0x1p-8 * largest_value(p) : tolerance;
}

// All fast entries against the reference.
void check(problem& p, double tolerance = 2e-5) {
  run_reference(p);
  for (const cqsa_attention_impl* impl : fast_entries(p.with(p.out, p.lse))) {
    INFO(impl->name);
    guarded out(p.out), lse(p.lse);
    REQUIRE(launch(*impl, p.with(p.out, p.lse)) == CQSA_OK);
    const std::string a = differs(p.out, p.exact_out, allowed_error(*impl, p, tolerance));
    const std::string b = differs(p.lse, p.exact_lse, tolerance);
    if (!a.empty()) FAIL("out " << a);
    if (!b.empty()) FAIL("lse " << b);
    if (!out.intact() || !lse.intact()) FAIL("wrote beside an output");
  }
}

// ---- random problems
struct dice {
  std::mt19937 rng;
  explicit dice(uint32_t seed) : rng(seed) {}
  int64_t upto(int64_t n) { return int64_t(rng() % uint64_t(n + 1)); }
  bool once_in(int64_t n) { return rng() % uint64_t(n) == 0; }
  double normal() { return std::normal_distribution<double>()(rng); }
  template <class T> T pick(std::initializer_list<T> x) { return x.begin()[rng() % x.size()]; }
};

void random_kv_types(dice& d, problem& p, int64_t pages, int64_t rows) {
  cqsa_attention_leaf& x = p.leaf;
  auto scaled = [&](cqsa_dtype type, int64_t channels, int32_t* kind, tensor* scale) {
    *kind = type == CQSA_DTYPE_I8 ? CQSA_SCALE_GROUP : 0;
    if (type == CQSA_DTYPE_E4M3FN || type == CQSA_DTYPE_E5M2) *kind = int32_t(d.upto(3));
    const int64_t g = x.num_kv_heads;
    if (*kind == CQSA_SCALE_TENSOR) *scale = tensor(CQSA_DTYPE_F32, {1, 1, 1, 1});
    if (*kind == CQSA_SCALE_HEAD) *scale = tensor(CQSA_DTYPE_F32, {1, g, 1, 1});
    if (*kind == CQSA_SCALE_TOKEN) *scale = tensor(CQSA_DTYPE_F32, {pages, g, rows, 1}, layout(d.upto(2)));
    if (*kind == CQSA_SCALE_GROUP)
      *scale = tensor(CQSA_DTYPE_F16, {pages, g, rows, (channels + x.kv_group - 1) / x.kv_group}, layout(d.upto(2)));
    if (*kind) scale->fill([&](auto...) { return (0.5 + double(d.upto(10)) / 10) * (type == CQSA_DTYPE_I8 ? 0.01 : 1); });
  };
  const cqsa_dtype type = d.once_in(3) ? d.pick({CQSA_DTYPE_I8, CQSA_DTYPE_E4M3FN, CQSA_DTYPE_E5M2}) : x.q.dtype;
  if (type == CQSA_DTYPE_I8) x.kv_group = d.pick({32, 64, 128});
  p.k = tensor(type, {pages, x.num_kv_heads, rows, x.head_dim}, layout(d.upto(num_layouts - 1)));
  p.v = tensor(type, {pages, x.num_kv_heads, rows, x.head_dim_v}, layout(d.upto(num_layouts - 1)));
  scaled(type, x.head_dim, &x.scale_k, &p.k_scale);
  scaled(type, x.head_dim_v, &x.scale_v, &p.v_scale);
  auto draw = [&](auto...) { return type == CQSA_DTYPE_I8 ? double(d.upto(254) - 127) : d.normal(); };
  p.k.fill(draw), p.v.fill(draw);
  if (d.once_in(12)) p.k.view.stride[2] = 0;
  if (d.once_in(12)) p.v.view.stride[2] = 0;
}
void random_extras(dice& d, problem& p) {
  cqsa_attention_leaf& x = p.leaf;
  auto operand = [&](cqsa_dtype type) {
    tensor t(type, {x.batch, x.num_heads, std::max<int64_t>(x.seqlen_q, 1), std::max<int64_t>(x.seqlen_k, 1)},
             layout(d.upto(num_layouts - 1)));
    for (int axis = 0; axis < 4; ++axis)
      if (d.once_in(4)) t.view.stride[axis] = 0;
    return t;
  };
  if (d.once_in(4)) {
    p.mask = operand(CQSA_DTYPE_BOOL);
    const int64_t rare = d.pick({2, 3, 20});
    p.mask.fill([&](auto...) { return d.once_in(rare) ? 0.0 : 1.0; });
  }
  if (d.once_in(4)) {
    p.bias = operand(d.pick({CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16}));
    p.bias.fill([&](auto...) { return d.once_in(6) ? -inf : d.normal(); });
  }
  if (d.once_in(5)) {
    p.slopes = tensor(CQSA_DTYPE_F32, {x.batch, x.num_heads, 1, 1});
    p.slopes.fill([&](auto...) { return double(d.upto(8)) / 16; });
    if (d.once_in(2)) p.slopes.view.stride[0] = 0;
  }
  if (d.once_in(4)) {
    p.sinks = tensor(CQSA_DTYPE_F32, {1, x.num_heads, 1, 1});
    p.sinks.fill([&](auto...) { return d.once_in(5) ? -inf : 3 * d.normal(); });
  }
  if (d.once_in(5)) x.softcap = d.pick({0.5, 2.0, 30.0});
  x.causal = d.pick({CQSA_CAUSAL_NONE, CQSA_CAUSAL_NONE, CQSA_CAUSAL_TOP_LEFT, CQSA_CAUSAL_BOTTOM_RIGHT});
  if (d.once_in(4)) x.window_left = d.upto(20);
  if (d.once_in(4)) x.window_right = d.once_in(4) ? INT64_MAX : d.upto(20);
}
void random_lengths(dice& d, problem& p, bool* paged) {
  cqsa_attention_leaf& x = p.leaf;
  *paged = d.once_in(4);
  p.total_q = x.seqlen_q, p.total_k = x.seqlen_k;
  if (d.once_in(3)) {
    p.cu_q = p.cu_k = {0};
    for (int64_t b = 0; b < x.batch; ++b) {
      p.cu_q.push_back(p.cu_q.back() + int32_t(d.once_in(5) ? 0 : d.upto(x.seqlen_q)));
      p.cu_k.push_back(p.cu_k.back() + int32_t(d.once_in(5) ? 0 : d.upto(x.seqlen_k)));
    }
    p.total_q = p.cu_q.back(), p.total_k = p.cu_k.back();
    if (*paged) p.cu_k.clear();
    if (d.once_in(2)) {
      p.cu_q64.assign(p.cu_q.begin(), p.cu_q.end()), p.cu_k64.assign(p.cu_k.begin(), p.cu_k.end());
      p.cu_q.clear(), p.cu_k.clear();
    }
  }
  if (*paged || d.once_in(4))
    for (int64_t b = 0; b < x.batch; ++b) {
      int64_t length = x.seqlen_k;
      if (!p.cu_k.empty()) length = p.cu_k[size_t(b) + 1] - p.cu_k[size_t(b)];
      if (!p.cu_k64.empty()) length = p.cu_k64[size_t(b) + 1] - p.cu_k64[size_t(b)];
      p.used.push_back(int32_t(d.upto(length)));
    }
}

// Rectangles that together are the whole plane, cut at random.
void random_rects(dice& d, problem& p) {
  const int64_t sq = p.leaf.seqlen_q, sk = p.leaf.seqlen_k;
  for (int64_t q = 0; q < sq;) {
    const int64_t n = std::min(sq - q, 1 + d.upto(sq));
    int64_t k = 0;
    do {
      const int64_t m = std::min(sk - k, d.upto(sk));
      p.rects.push_back({q, k, n, m, q, k, q});
      k += m;
    } while (k < sk);
    q += n;
  }
}
problem random_problem(uint32_t seed) {
  dice d(seed);
  problem p;
  cqsa_attention_leaf& x = p.leaf;
  const bool large = d.once_in(40);
  x.num_kv_heads = 1 + d.upto(1);
  x.num_heads = x.num_kv_heads * d.pick({1, 1, 2, 3, 8});
  x.batch = 1 + d.upto(2);
  x.head_dim = d.pick({1, 3, 8, 16, 17, 33, 40, 64}), x.head_dim_v = d.once_in(2) ? x.head_dim : d.pick({1, 2, 7, 13, 32, 66});
  if (large) x.head_dim = d.pick({128, 192, 576}), x.head_dim_v = d.pick({64, 128, 512}), x.batch = 1;
  x.seqlen_q = d.once_in(4) ? 1 : 1 + d.upto(d.once_in(8) ? 80 : 20);
  x.seqlen_k = d.upto(d.once_in(8) ? 150 : 40);
  if (d.once_in(30)) x.seqlen_k = 0;
  x.softmax_scale = 1.0 / std::sqrt(double(x.head_dim));
  x.window_left = x.window_right = -1;
  x.tile_q = d.pick({4, 16, 32, 48, 64, 128}), x.tile_k = d.pick({16, 16, 32, 64, 128});
  x.q.dtype = d.pick({CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16});
  bool paged = false;
  const bool rects = d.once_in(4);
  if (!rects) random_lengths(d, p, &paged);
  else random_rects(d, p), p.total_q = x.seqlen_q, p.total_k = x.seqlen_k;
  const bool varlen = !p.cu_q.empty() || !p.cu_q64.empty();
  const int64_t items = varlen ? 1 : x.batch;
  p.q = tensor(x.q.dtype, {items, x.num_heads, p.total_q, x.head_dim}, layout(d.upto(num_layouts - 1)));
  p.q.fill([&](auto...) { return d.normal(); });
  if (paged) {
    x.page_size = d.pick({1, 3, 16});
    const int64_t each = (x.seqlen_k + x.page_size - 1) / x.page_size, pool = x.batch * each + 1;
    for (int64_t i = 0; i < x.batch * each + 1; ++i) p.pages.push_back(d.once_in(8) ? -1 : int32_t(d.upto(pool - 1)));
    x.page_table_stride[0] = each, x.page_table_stride[1] = 1;
    random_kv_types(d, p, pool, x.page_size);
  } else {
    random_kv_types(d, p, varlen ? 1 : x.batch, p.total_k);
  }
  random_extras(d, p);
  const cqsa_dtype out = d.pick({CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16});
  p.out = tensor(out, {items, x.num_heads, p.total_q, x.head_dim_v}, layout(d.upto(num_layouts - 1)));
  p.lse = tensor(CQSA_DTYPE_F32, {items, x.num_heads, p.total_q, 1}, layout(d.upto(num_layouts - 1)));
  p.exact_out = tensor(CQSA_DTYPE_F64, {items, x.num_heads, p.total_q, x.head_dim_v});
  p.exact_lse = tensor(CQSA_DTYPE_F64, {items, x.num_heads, p.total_q, 1});
  // NaN under keys that some queries see and others do not.
  if (d.once_in(4) && p.v.shape[0] > 0 && p.v.shape[2] > 0)
    for (int64_t n = d.upto(3); n >= 0; --n) {
      const int64_t b = d.upto(p.v.shape[0] - 1), g = d.upto(x.num_kv_heads - 1), row = d.upto(p.v.shape[2] - 1);
      const bool narrow = bytes_of(p.v.view.dtype) == 1;  // there Inf would saturate to something large
      for (int64_t c = 0; c < x.head_dim_v; c += 2) p.v.write(b, g, row, c, narrow || d.once_in(2) ? nan64 : inf);
      if (d.once_in(3)) p.k.write(b, g, row, 0, nan64);
    }
  return p;
}

}  // namespace
