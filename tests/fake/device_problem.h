// SPDX-License-Identifier: Apache-2.0
// Problems for the device tests: tensors that own host or fake device memory, random problems, and their f64 reference.
#pragma once
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include <dlfcn.h>

#include <atomic>
#include <cinttypes>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cqsa.h"
#include "dtype.h"
#include "fake_backend.h"

namespace device_test {

// ---- the fake backend's controls ------------------------------------------------------------------------------------------------

struct fake_controls {
  decltype(&fake_configure) configure;
  decltype(&fake_stats) stats;
  decltype(&fake_alloc) alloc;
  decltype(&fake_free) free;
  decltype(&fake_pinned_alloc) pinned_alloc;
  decltype(&fake_pinned_free) pinned_free;
  decltype(&fake_stream_create) stream_create;
  decltype(&fake_stream_destroy) stream_destroy;
  decltype(&fake_stream_sync) stream_sync;
  decltype(&fake_stream_call) stream_call;
  decltype(&fake_capture_begin) capture_begin;
  decltype(&fake_capture_end) capture_end;
  decltype(&fake_graph_size) graph_size;
  decltype(&fake_graph_launch) graph_launch;
  decltype(&fake_graph_destroy) graph_destroy;
  decltype(&fake_pretend) pretend;
  decltype(&fake_write) write;
  decltype(&fake_read) read;
};

inline const fake_controls& fake() {
  static const fake_controls controls = [] {
    void* library = dlopen(CQSA_TEST_PLUGIN_DIR "/libcqsa_fake.so", RTLD_NOW | RTLD_LOCAL);
    if (!library) std::fprintf(stderr, "%s\n", dlerror()), std::abort();
    fake_controls c{};
    c.configure = reinterpret_cast<decltype(c.configure)>(dlsym(library, "fake_configure"));
    c.stats = reinterpret_cast<decltype(c.stats)>(dlsym(library, "fake_stats"));
    c.alloc = reinterpret_cast<decltype(c.alloc)>(dlsym(library, "fake_alloc"));
    c.free = reinterpret_cast<decltype(c.free)>(dlsym(library, "fake_free"));
    c.pinned_alloc = reinterpret_cast<decltype(c.pinned_alloc)>(dlsym(library, "fake_pinned_alloc"));
    c.pinned_free = reinterpret_cast<decltype(c.pinned_free)>(dlsym(library, "fake_pinned_free"));
    c.stream_create = reinterpret_cast<decltype(c.stream_create)>(dlsym(library, "fake_stream_create"));
    c.stream_destroy = reinterpret_cast<decltype(c.stream_destroy)>(dlsym(library, "fake_stream_destroy"));
    c.stream_sync = reinterpret_cast<decltype(c.stream_sync)>(dlsym(library, "fake_stream_sync"));
    c.stream_call = reinterpret_cast<decltype(c.stream_call)>(dlsym(library, "fake_stream_call"));
    c.capture_begin = reinterpret_cast<decltype(c.capture_begin)>(dlsym(library, "fake_capture_begin"));
    c.capture_end = reinterpret_cast<decltype(c.capture_end)>(dlsym(library, "fake_capture_end"));
    c.graph_size = reinterpret_cast<decltype(c.graph_size)>(dlsym(library, "fake_graph_size"));
    c.graph_launch = reinterpret_cast<decltype(c.graph_launch)>(dlsym(library, "fake_graph_launch"));
    c.graph_destroy = reinterpret_cast<decltype(c.graph_destroy)>(dlsym(library, "fake_graph_destroy"));
    c.pretend = reinterpret_cast<decltype(c.pretend)>(dlsym(library, "fake_pretend"));
    c.write = reinterpret_cast<decltype(c.write)>(dlsym(library, "fake_write"));
    c.read = reinterpret_cast<decltype(c.read)>(dlsym(library, "fake_read"));
    return c;
  }();
  return controls;
}

inline fake_counters stats() {
  fake_counters c;
  fake().stats(&c);
  return c;
}

// What is still allocated, but for the one block of pinned memory that a context keeps.
inline int64_t leaked() {
  const fake_counters c = stats();
  return c.live_allocations - std::min<int64_t>(1, c.live_pinned);
}

inline cqsa_context* make_context(const char* backend) {
  cqsa_context_params params = CQSA_CONTEXT_PARAMS_INIT;
  params.backend = backend;
  params.backend_path = CQSA_TEST_PLUGIN_DIR;
  params.num_threads = 2;
  cqsa_context* context = nullptr;
  const cqsa_status status = cqsa_context_create(&params, &context);
  INFO(cqsa_last_error());
  REQUIRE(status == CQSA_OK);
  return context;
}

inline cqsa_context* device_context() {
  static cqsa_context* context = make_context("fake");
  return context;
}

inline cqsa_context* cpu_context() {
  static cqsa_context* context = make_context("cpu");
  return context;
}

inline void configure(const fake_config& config = {}) { fake().configure(&config); }

// ---- numbers and tensors ------------------------------------------------------------------------------------------------------------

inline int64_t bytes_of(cqsa_dtype dtype) { return (dtype >> 8 & 0xFF) / 8; }

inline void encode(cqsa_dtype dtype, double x, char* to) {
  const auto put = [to](auto value) { std::memcpy(to, &value, sizeof value); };
  switch (dtype) {
    case CQSA_DTYPE_F64: return put(x);
    case CQSA_DTYPE_F32: return put(static_cast<float>(x));
    case CQSA_DTYPE_F16: return put(cqsa::f64_to_f16(x));
    case CQSA_DTYPE_BF16: return put(cqsa::f64_to_bf16(x));
    case CQSA_DTYPE_E4M3FN: return put(cqsa::f32_to_e4m3fn(static_cast<float>(x)));
    case CQSA_DTYPE_E5M2: return put(cqsa::f32_to_e5m2(static_cast<float>(x)));
    case CQSA_DTYPE_E4M3FNUZ: return put(cqsa::f32_to_e4m3fnuz(static_cast<float>(x)));
    case CQSA_DTYPE_E5M2FNUZ: return put(cqsa::f32_to_e5m2fnuz(static_cast<float>(x)));
    case CQSA_DTYPE_E8M0FNU: return put(cqsa::f32_to_e8m0fnu(static_cast<float>(x)));
    case CQSA_DTYPE_I8: return put(static_cast<int8_t>(x));
    case CQSA_DTYPE_U8: return put(static_cast<uint8_t>(x));
    case CQSA_DTYPE_I32: return put(static_cast<int32_t>(x));
    default: return put(static_cast<int64_t>(x));
  }
}

inline double decode(cqsa_dtype dtype, const char* from) {
  const auto get = [from]<class T>(T value) {
    std::memcpy(&value, from, sizeof value);
    return value;
  };
  switch (dtype) {
    case CQSA_DTYPE_F64: return get(double{});
    case CQSA_DTYPE_F32: return get(float{});
    case CQSA_DTYPE_F16: return cqsa::f16_to_f64(get(uint16_t{}));
    case CQSA_DTYPE_BF16: return cqsa::bf16_to_f64(get(uint16_t{}));
    case CQSA_DTYPE_E4M3FN: return cqsa::e4m3fn_to_f32(get(uint8_t{}));
    case CQSA_DTYPE_E5M2: return cqsa::e5m2_to_f32(get(uint8_t{}));
    case CQSA_DTYPE_E4M3FNUZ: return cqsa::e4m3fnuz_to_f32(get(uint8_t{}));
    case CQSA_DTYPE_E5M2FNUZ: return cqsa::e5m2fnuz_to_f32(get(uint8_t{}));
    case CQSA_DTYPE_E8M0FNU: return cqsa::e8m0fnu_to_f32(get(uint8_t{}));
    case CQSA_DTYPE_I8: return get(int8_t{});
    case CQSA_DTYPE_U8: return get(uint8_t{});
    case CQSA_DTYPE_I32: return get(int32_t{});
    default: return static_cast<double>(get(int64_t{}));
  }
}

using sizes = std::vector<int64_t>;

// A tensor that owns its memory. `order` gives the axes from the slowest to the fastest, `gap` unused elements after each of the
// second fastest; they hold a pattern that nothing may change.
class array {
 public:
  array() = default;
  array(cqsa_dtype dtype, sizes shape, sizes order = {}, int64_t gap = 0) : dtype_(dtype), shape_(std::move(shape)) {
    const size_t n = shape_.size();
    if (order.empty())
      for (size_t i = 0; i < n; ++i) order.push_back(static_cast<int64_t>(i));
    strides_.assign(n, 0);
    int64_t stride = 1;
    for (size_t i = n; i-- > 0;) {
      strides_[static_cast<size_t>(order[i])] = stride;
      stride *= shape_[static_cast<size_t>(order[i])];
      if (i + 1 == n && n > 1) stride += gap;
    }
    memory_.assign(static_cast<size_t>(std::max<int64_t>(stride, 1) * bytes_of(dtype)), static_cast<char>(0xFF));
  }
  array(array&& other) noexcept { *this = std::move(other); }
  array& operator=(array&& other) noexcept {
    std::swap(dtype_, other.dtype_), std::swap(shape_, other.shape_), std::swap(strides_, other.strides_);
    std::swap(memory_, other.memory_), std::swap(device_, other.device_), std::swap(pinned_, other.pinned_);
    return *this;
  }
  ~array() {
    if (device_) pinned_ ? fake().pinned_free(device_) : fake().free(device_);
  }

  bool there() const { return dtype_ != CQSA_DTYPE_NONE; }
  cqsa_dtype dtype() const { return dtype_; }
  const sizes& shape() const { return shape_; }
  int64_t count() const {
    int64_t n = 1;
    for (const int64_t s : shape_) n *= s;
    return n;
  }
  // Element number `index` in logical row-major order.
  int64_t offset(int64_t index) const {
    int64_t at = 0;
    for (size_t axis = shape_.size(); axis-- > 0;) {
      at += index % shape_[axis] * strides_[axis];
      index /= shape_[axis];
    }
    return at;
  }
  double get(int64_t index) const { return decode(dtype_, memory_.data() + offset(index) * bytes_of(dtype_)); }
  void set(int64_t index, double value) { encode(dtype_, value, memory_.data() + offset(index) * bytes_of(dtype_)); }

  void to_device() {
    device_ = fake().alloc(memory_.size());
    fake().write(device_, memory_.data(), memory_.size());
  }
  void to_pinned() {
    device_ = fake().pinned_alloc(memory_.size());
    pinned_ = true;
    fake().write(device_, memory_.data(), memory_.size());
  }
  void from_device() {
    if (device_) fake().read(memory_.data(), device_, memory_.size());
  }
  void upload_again() {
    if (device_) fake().write(device_, memory_.data(), memory_.size());
  }
  void fill(int byte) { std::memset(memory_.data(), byte, memory_.size()); }
  const std::vector<char>& memory() const { return memory_; }

  const cqsa_tensor* tensor() {
    if (!there()) return nullptr;
    view_ = {device_ ? device_ : memory_.data(), pinned_ ? CQSA_DEVICE_CUDA_HOST : device_ ? CQSA_DEVICE_EXT : CQSA_DEVICE_CPU, 0, static_cast<int32_t>(shape_.size()),
             dtype_, shape_.data(), strides_.data(), 0};
    return &view_;
  }

 private:
  cqsa_dtype dtype_ = CQSA_DTYPE_NONE;
  sizes shape_, strides_;
  std::vector<char> memory_;
  void* device_ = nullptr;  // device memory, or pinned host memory
  bool pinned_ = false;
  cqsa_tensor view_{};
};

// ---- problems ---------------------------------------------------------------------------------------------------------------------------

struct spec {
  int64_t batch = 1, heads = 2, kv_heads = 1, dim = 16, dim_v = 16, nq = 40, nk = 40;
  cqsa_dtype q = CQSA_DTYPE_F32, kv = CQSA_DTYPE_F32, out = CQSA_DTYPE_F32;
  int32_t scale_k = CQSA_SCALE_NONE, scale_v = CQSA_SCALE_NONE;
  int64_t kv_group = 0;
  int32_t causal = CQSA_CAUSAL_NONE;
  bool window = false;
  int64_t left = -1, right = -1;
  double softcap = 0;
  int mask = -1, bias = -1;  // broadcast bits, -1: none
  bool alibi = false, alibi_per_item = false, sinks = false, lse = true;
  bool varlen = false, paged = false, seqused = false, wide_index = false;
  int64_t page_size = 0, tail = 0;  // tail: rows past the last segment
  bool q_device = false, kv_device = false, out_device = false;
  bool heads_inside = false;  // memory order batch, row, head, channel
  int64_t gap = 0;
};

struct operands {
  spec s;
  array q, k, v, k_scale, v_scale, mask, bias, slopes, sinks, cu_q, cu_k, used, pages, out, lse;

  cqsa_attention_args args() {
    cqsa_attention_args a = CQSA_ATTENTION_ARGS_INIT;
    a.q = q.tensor(), a.k = k.tensor(), a.v = v.tensor(), a.k_scale = k_scale.tensor(), a.v_scale = v_scale.tensor();
    a.mask = mask.tensor(), a.bias = bias.tensor(), a.alibi_slopes = slopes.tensor(), a.sinks = sinks.tensor();
    a.cu_seqlens_q = cu_q.tensor(), a.cu_seqlens_k = cu_k.tensor(), a.seqused_k = used.tensor(), a.page_table = pages.tensor();
    a.out = out.tensor(), a.lse = lse.tensor();
    return a;
  }
};

inline cqsa_attention_params params_of(cqsa_context* context, operands& o) {
  cqsa_attention_params p = CQSA_ATTENTION_PARAMS_INIT;
  const cqsa_attention_args args = o.args();
  p.kv_group = o.s.kv == CQSA_DTYPE_I8 && o.k.dtype() == CQSA_DTYPE_I8 ? o.s.kv_group : 0;
  const cqsa_status status = cqsa_attention_params_of(context, &args, &p);
  INFO(cqsa_last_error());
  REQUIRE(status == CQSA_OK);
  p.causal = o.s.causal;
  p.softcap = o.s.softcap;
  if (o.s.window) p.flags |= CQSA_ATTENTION_WINDOW, p.window_left = o.s.left, p.window_right = o.s.right;
  return p;
}

using generator = std::mt19937_64;
inline int64_t between(generator& r, int64_t low, int64_t high) { return low + static_cast<int64_t>(r() % static_cast<uint64_t>(high - low + 1)); }
inline bool chance(generator& r, int percent) { return between(r, 1, 100) <= percent; }
inline double normal(generator& r) { return std::normal_distribution<double>()(r); }

inline sizes lengths(generator& r, int64_t batch, int64_t longest) {
  sizes cu = {0};
  for (int64_t i = 0; i < batch; ++i) cu.push_back(cu.back() + (chance(r, 25) ? 0 : between(r, 1, longest)));
  return cu;
}

inline array index_array(const spec& s, const sizes& values) {
  array a(s.wide_index ? CQSA_DTYPE_I64 : CQSA_DTYPE_I32, {static_cast<int64_t>(values.size())});
  for (size_t i = 0; i < values.size(); ++i) a.set(static_cast<int64_t>(i), static_cast<double>(values[i]));
  return a;
}

inline void fill_normal(generator& r, array& a, double size = 1) {
  for (int64_t i = 0; i < a.count(); ++i) a.set(i, normal(r) * size);
}

inline sizes plane_shape(const spec& s, int bits) {
  return {bits & CQSA_BROADCAST_BATCH ? 1 : s.batch, bits & CQSA_BROADCAST_HEAD ? 1 : s.heads, bits & CQSA_BROADCAST_QUERY ? 1 : s.nq,
          bits & CQSA_BROADCAST_KEY ? 1 : s.nk};
}

inline void make_scales(generator& r, operands& o) {
  const auto make = [&](int32_t kind, const array& of) -> array {
    sizes shape(of.shape().begin(), of.shape().end() - 1);
    if (kind == CQSA_SCALE_NONE) return {};
    if (kind == CQSA_SCALE_TENSOR) shape = {1};
    if (kind == CQSA_SCALE_HEAD) shape = {o.s.kv_heads};
    if (kind == CQSA_SCALE_GROUP) shape.push_back((of.shape().back() + o.s.kv_group - 1) / o.s.kv_group);
    array a(kind == CQSA_SCALE_GROUP ? CQSA_DTYPE_F16 : CQSA_DTYPE_F32, shape);
    for (int64_t i = 0; i < a.count(); ++i) a.set(i, (0.5 + 0.01 * static_cast<double>(between(r, 0, 100))) * (o.s.kv == CQSA_DTYPE_I8 ? 0.02 : 1));
    return a;
  };
  o.k_scale = make(o.s.scale_k, o.k);
  o.v_scale = make(o.s.scale_v, o.v);
}

// Page tables with holes; pages that no sequence has, and rows past the last key, keep their NaN.
inline void make_pages(generator& r, operands& o) {
  const spec& s = o.s;
  const int64_t columns = s.nk / s.page_size, pool = s.batch * columns + 2;
  o.pages = array(CQSA_DTYPE_I32, {s.batch, columns});
  sizes ids;
  for (int64_t i = 0; i < pool; ++i) ids.push_back(i);
  std::shuffle(ids.begin(), ids.end(), r);
  const sizes order = s.heads_inside ? sizes{} : sizes{0, 2, 1, 3};
  o.k = array(s.kv, {pool, s.page_size, s.kv_heads, s.dim}, order, s.gap);
  o.v = array(s.kv, {pool, s.page_size, s.kv_heads, s.dim_v}, order, s.gap);
  for (array* a : {&o.k, &o.v})
    for (int64_t i = 0; i < a->count(); ++i)
      if (i / (a->count() / pool) != ids.back()) a->set(i, s.kv == CQSA_DTYPE_I8 ? static_cast<double>(between(r, -127, 127)) : normal(r));
  for (int64_t i = 0; i < o.pages.count(); ++i) o.pages.set(i, chance(r, 12) ? -1 : static_cast<double>(ids[static_cast<size_t>(i)]));
}

inline void make_keys(generator& r, operands& o, int64_t total_k) {
  const spec& s = o.s;
  const sizes four = s.heads_inside ? sizes{0, 2, 1, 3} : sizes{}, three = s.heads_inside ? sizes{} : sizes{1, 0, 2};
  const auto shape = [&](int64_t dim) { return s.varlen ? sizes{total_k, s.kv_heads, dim} : sizes{s.batch, s.kv_heads, s.nk, dim}; };
  o.k = array(s.kv, shape(s.dim), s.varlen ? three : four, s.gap);
  o.v = array(s.kv, shape(s.dim_v), s.varlen ? three : four, s.gap);
  for (array* a : {&o.k, &o.v})
    for (int64_t i = 0; i < a->count(); ++i) a->set(i, s.kv == CQSA_DTYPE_I8 ? static_cast<double>(between(r, -127, 127)) : normal(r));
}

inline void make_extras(generator& r, operands& o) {
  const spec& s = o.s;
  if (s.mask >= 0) {
    o.mask = array(CQSA_DTYPE_U8, plane_shape(s, s.mask));
    for (int64_t i = 0; i < o.mask.count(); ++i) o.mask.set(i, chance(r, 80));
  }
  if (s.bias >= 0) {
    o.bias = array(CQSA_DTYPE_F32, plane_shape(s, s.bias));
    fill_normal(r, o.bias);
  }
  if (s.alibi) {
    o.slopes = array(CQSA_DTYPE_F32, s.alibi_per_item ? sizes{s.batch, s.heads} : sizes{s.heads});
    fill_normal(r, o.slopes, 0.1);
  }
  if (!s.sinks) return;
  o.sinks = array(CQSA_DTYPE_F32, {s.heads});
  fill_normal(r, o.sinks);
}

inline operands make(const spec& s, uint64_t seed) {
  generator r(seed);
  operands o;
  o.s = s;
  const sizes four = s.heads_inside ? sizes{0, 2, 1, 3} : sizes{}, three = s.heads_inside ? sizes{} : sizes{1, 0, 2};
  const sizes cu_q = lengths(r, s.batch, s.nq), cu_k = lengths(r, s.batch, s.nk);
  const int64_t total_q = cu_q.back() + s.tail;
  if (s.varlen) o.cu_q = index_array(s, cu_q);
  if (s.varlen && !s.paged) o.cu_k = index_array(s, cu_k);
  s.paged ? make_pages(r, o) : make_keys(r, o, cu_k.back() + between(r, 0, 2));
  if (s.seqused) {
    sizes used;
    for (int64_t b = 0; b < s.batch; ++b) {
      const auto at = static_cast<size_t>(b);
      used.push_back(between(r, 0, s.varlen && !s.paged ? cu_k[at + 1] - cu_k[at] : s.nk));
    }
    o.used = index_array(s, used);
  }
  const auto shape = [&](int64_t dim) { return s.varlen ? sizes{total_q, s.heads, dim} : sizes{s.batch, s.heads, s.nq, dim}; };
  o.q = array(s.q, shape(s.dim), s.varlen ? three : four, s.gap);
  fill_normal(r, o.q);
  make_scales(r, o);
  make_extras(r, o);
  o.out = array(s.out, shape(s.dim_v), s.varlen ? three : four, s.gap);
  if (s.lse) o.lse = array(s.q == CQSA_DTYPE_F64 ? CQSA_DTYPE_F64 : CQSA_DTYPE_F32, s.varlen ? sizes{s.heads, total_q} : sizes{s.batch, s.heads, s.nq});
  return o;
}

inline void place(operands& o) {
  if (o.s.q_device)
    for (array* a : {&o.q, &o.mask, &o.bias, &o.slopes, &o.sinks, &o.cu_q, &o.cu_k, &o.used, &o.pages})
      if (a->there()) a->to_device();
  if (o.s.kv_device)
    for (array* a : {&o.k, &o.v, &o.k_scale, &o.v_scale})
      if (a->there()) a->to_device();
  if (o.s.out_device)
    for (array* a : {&o.out, &o.lse})
      if (a->there()) a->to_device();
}

// ---- the reference ------------------------------------------------------------------------------------------------------------------------

inline array widened(const array& from) {
  if (!from.there()) return {};
  array a(CQSA_DTYPE_F64, from.shape());
  for (int64_t i = 0; i < a.count(); ++i) a.set(i, from.get(i));
  return a;
}

inline array copied(const array& from) {
  if (!from.there()) return {};
  array a(from.dtype(), from.shape());
  for (int64_t i = 0; i < a.count(); ++i) a.set(i, from.get(i));
  return a;
}

// Keys or values in f64 with their scales multiplied in.
inline array dequantised(const operands& o, const array& from, const array& scale, int32_t kind) {
  array a = widened(from);
  const int64_t dim = from.shape().back(), groups = kind == CQSA_SCALE_GROUP ? scale.shape().back() : 1;
  const size_t axes = from.shape().size();
  // The key head's axis: batched 1, varlen 1, paged 2.
  const size_t head_axis = o.s.paged ? 2 : 1;
  int64_t below = 1;
  for (size_t axis = head_axis + 1; axis < axes; ++axis) below *= from.shape()[axis];
  for (int64_t i = 0; i < a.count() && kind != CQSA_SCALE_NONE; ++i) {
    const int64_t row = i / dim, head = i / below % o.s.kv_heads;
    const int64_t at = kind == CQSA_SCALE_TENSOR ? 0 : kind == CQSA_SCALE_HEAD ? head : kind == CQSA_SCALE_TOKEN ? row
                       : row * groups + i % dim / o.s.kv_group;
    a.set(i, a.get(i) * scale.get(at));
  }
  return a;
}

// out and lse in f64, computed before anything is moved to the device.
inline operands reference(const operands& o) {
  operands f;
  f.s = o.s;
  f.s.kv = CQSA_DTYPE_F64;
  f.q = widened(o.q);
  f.k = dequantised(o, o.k, o.k_scale, o.s.scale_k);
  f.v = dequantised(o, o.v, o.v_scale, o.s.scale_v);
  f.mask = copied(o.mask), f.bias = widened(o.bias), f.slopes = copied(o.slopes), f.sinks = copied(o.sinks);
  f.cu_q = copied(o.cu_q), f.cu_k = copied(o.cu_k), f.used = copied(o.used), f.pages = copied(o.pages);
  f.out = array(CQSA_DTYPE_F64, o.out.shape());
  if (o.lse.there()) f.lse = array(CQSA_DTYPE_F64, o.lse.shape());
  const cqsa_attention_params p = params_of(cpu_context(), f);
  const cqsa_attention_args args = f.args();
  const cqsa_status status = cqsa_attention(cpu_context(), &p, &args, nullptr);
  INFO(cqsa_last_error());
  REQUIRE(status == CQSA_OK);
  return f;
}

inline double tolerance(cqsa_dtype dtype) { return dtype == CQSA_DTYPE_BF16 ? 8e-3 : dtype == CQSA_DTYPE_F16 ? 1e-3 : 2e-5; }

// With q in bf16 the probabilities may be rounded to bf16 (docs/backends/cpu.md), whatever the type of out.
// Largest error relative to 1 + |wanted|.
inline double error_of(const array& got, const array& wanted) {
  double worst = 0;
  for (int64_t i = 0; i < got.count(); ++i) {
    const double a = got.get(i), b = wanted.get(i);
    if (a == b) continue;
    const double e = std::fabs(a - b) / (1 + std::fabs(b));
    worst = e <= worst ? worst : e;  // a NaN becomes the worst
    if (!(e == e)) return HUGE_VAL;
  }
  return worst;
}

inline void compare(operands& o, const operands& wanted) {
  o.out.from_device();
  o.lse.from_device();
  CHECK(error_of(o.out, wanted.out) < tolerance(o.s.out) + (o.s.q == CQSA_DTYPE_BF16 ? 8e-3 : 0));
  if (o.lse.there()) CHECK(error_of(o.lse, wanted.lse) < 3e-5);
}

// Bytes of out between its rows are the caller's.
inline void check_gaps(const operands& o) {
  std::vector<char> seen(o.out.memory());
  const auto element = static_cast<size_t>(bytes_of(o.out.dtype()));
  for (int64_t i = 0; i < o.out.count(); ++i) std::memset(seen.data() + static_cast<size_t>(o.out.offset(i)) * element, 0xFF, element);
  CHECK(seen == std::vector<char>(seen.size(), static_cast<char>(0xFF)));
}

}  // namespace device_test
