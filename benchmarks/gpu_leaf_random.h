// SPDX-License-Identifier: Apache-2.0
// Random attention problems for the portable GPU leaf, compared with cpu_reference: every type, stride, mask and form of call.
// On a device the operands are in managed memory (gpu_leaf.cu), in the SIMT harness in ordinary memory.
#pragma once

#include "backends/cpu/attention_job.h"
#include "backends/gpu/port.h"
#include "src/dtype.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace cqsa::random_leaf {

constexpr double infinite = std::numeric_limits<double>::infinity();

inline int bytes_of(cqsa_dtype t) { return ((t >> 8) & 0xff) / 8; }

inline char* address(const cqsa_view& x, int64_t b, int64_t h, int64_t r, int64_t c) {
  return static_cast<char*>(x.data) + bytes_of(x.dtype) * (b * x.stride[0] + h * x.stride[1] + r * x.stride[2] + c * x.stride[3]);
}

inline double value_at(const cqsa_view& x, int64_t b, int64_t h, int64_t r, int64_t c) {
  const char* p = address(x, b, h, r, c);
  float f;
  uint16_t u;
  if (x.dtype == CQSA_DTYPE_F32) return std::memcpy(&f, p, 4), f;
  std::memcpy(&u, p, 2);
  return x.dtype == CQSA_DTYPE_F16 ? f16_to_f64(u) : bf16_to_f64(u);
}

// Memory that the device under test can read; everything goes at once with reset().
struct memory {
  std::function<void*(size_t)> take;
  std::function<void()> reset;
};

struct problem {
  cqsa_attention_leaf leaf{}, reference{};
  bool varlen = false, paged = false, nan = false;
  int64_t q_rows = 0, k_rows = 0, q_items = 0, k_items = 0, last_row = 0;
  std::string form = "whole";
};

class maker {
 public:
  // simple: 16-bit operands of one type in aligned rows, nothing that changes logits: what the plain kernels of the tuned tiers take.
  // page_unit: 0, or what pages hold a multiple of, also in simple problems; problems without it are the same as ever.
  maker(uint64_t seed, memory& mem, int64_t most_keys, bool simple = false, int64_t page_unit = 0)
      : random_(seed), mem_(mem), most_keys_(most_keys), page_unit_(page_unit), simple_(simple) {}

  problem make() {
    problem p;
    sizes(p);
    lengths(p);
    operands(p);
    scales(p);
    masks(p);
    outputs(p);
    return p;
  }

  int64_t between(int64_t a, int64_t b) { return a + int64_t(random_() % uint64_t(b - a + 1)); }
  double unit() { return double(random_() >> 11) * 0x1p-53; }
  bool chance(double p) { return unit() < p; }
  template <class T> T* array(int64_t n) { return static_cast<T*>(mem_.take(size_t(n > 0 ? n : 1) * sizeof(T))); }

 private:
  static constexpr cqsa_dtype floats[3] = {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16};

  void put(char* to, cqsa_dtype t, double x) {
    const float f = float(x);
    const uint16_t half = t == CQSA_DTYPE_F16 ? f64_to_f16(x) : f64_to_bf16(x);
    switch (t) {
      case CQSA_DTYPE_F32: std::memcpy(to, &f, 4); break;
      case CQSA_DTYPE_F16:
      case CQSA_DTYPE_BF16: std::memcpy(to, &half, 2); break;
      case CQSA_DTYPE_I8: *to = char(int(x * 5)); break;
      case CQSA_DTYPE_E4M3FN: *to = char(random_() % 0x40 | (random_() % 2 ? 0x80 : 0)); break;
      case CQSA_DTYPE_E5M2: *to = char(random_() % 0x40 | (random_() % 2 ? 0x80 : 0)); break;
      default: *to = char(x > -1.0);
    }
  }
  void put_nan(char* to, cqsa_dtype t) {
    const float f = chance(.5) ? std::nanf("") : float(infinite);
    const uint16_t half = t == CQSA_DTYPE_F16 ? 0x7e00 : 0x7fc0;
    if (t == CQSA_DTYPE_F32) std::memcpy(to, &f, 4);
    else if (bytes_of(t) == 2) std::memcpy(to, &half, 2);
    else if (t == CQSA_DTYPE_E4M3FN) *to = 0x7f;
    else if (t == CQSA_DTYPE_E5M2) *to = 0x7d;
  }

  // Compact, [batch, rows, heads, channels], transposed (maybe upside down), padded rows, or at an odd address.
  cqsa_view tensor(cqsa_dtype t, int64_t n0, int64_t n1, int64_t n2, int64_t n3) {
    const int64_t n[4] = {n0, n1, n2, n3};
    int64_t st[4] = {n3 * n2 * n1, n3 * n2, n3, 1};
    const int64_t mode = between(0, simple_ ? 1 : 4);
    if (mode == 1) st[1] = n3, st[2] = n3 * n1;
    if (mode == 2) st[2] = 1, st[3] = n2;
    if (mode == 3) st[2] = n3 + between(1, 8), st[1] = st[2] * n2 + between(0, 3), st[0] = st[1] * n1;
    int64_t total = 64;
    for (int i = 0; i < 4; ++i) total += (n[i] > 0 ? n[i] - 1 : 0) * st[i];
    char* base = array<char>(total * bytes_of(t) + 64) + (mode == 4 ? between(1, 15) : 0);
    for (int64_t i = 0; i < total; ++i) put(base + i * bytes_of(t), t, (unit() - .5) * 3);
    cqsa_view v{base, t, 0, {st[0], st[1], st[2], st[3]}};
    if (mode == 2 && n2 > 0 && chance(.3)) v.data = base + (n2 - 1) * st[2] * bytes_of(t), v.stride[2] = -st[2];
    return v;
  }

  void sizes(problem& p) {
    cqsa_attention_leaf& a = p.leaf;
    constexpr int64_t dims[] = {1, 3, 8, 33, 64, 64, 80, 100, 128, 128, 192, 256, 300, 512};
    a.struct_size = sizeof a;
    a.batch = between(1, 2), a.num_kv_heads = between(1, 2), a.num_heads = a.num_kv_heads * between(1, 5);
    a.head_dim = chance(.05) ? 576 : dims[between(0, 13)];
    a.head_dim_v = chance(.6) ? (a.head_dim > 512 ? 512 : a.head_dim) : dims[between(0, 13)];
    if (a.num_heads * a.head_dim_v > 600) a.batch = 1, a.num_kv_heads = 1, a.num_heads = between(1, 2);
    a.seqlen_q = chance(.4) ? between(1, 6) : between(1, 150);
    a.seqlen_k = chance(.2) ? between(0, 5) : between(1, most_keys_);
    if (simple_) {
      constexpr int64_t aligned[] = {8, 64, 80, 96, 128, 160, 192, 256};
      a.head_dim = aligned[between(0, 7)], a.head_dim_v = chance(.7) ? a.head_dim : aligned[between(0, 7)];
    }
    p.varlen = chance(.25), p.paged = chance(page_unit_ ? .4 : .2) && (!simple_ || page_unit_);
    a.causal = chance(.5) ? int32_t(between(0, 2)) : 0;
    a.window_left = a.window_right = -1;
    if (chance(.3)) a.window_left = chance(.3) ? -1 : between(0, 100), a.window_right = chance(.3) ? -1 : between(0, 100);
    a.softmax_scale = 1.0 / std::sqrt(double(a.head_dim));
    if (chance(.2) && !simple_) a.softcap = 2.0;
    a.tile_q = a.tile_k = 64;
  }

  void* index_array(const std::vector<int64_t>& x, bool wide) {
    int64_t* w = array<int64_t>(int64_t(x.size()));
    int32_t* n = array<int32_t>(int64_t(x.size()));
    for (size_t i = 0; i < x.size(); ++i) w[i] = x[i], n[i] = int32_t(x[i]);
    return wide ? static_cast<void*>(w) : static_cast<void*>(n);
  }

  void lengths(problem& p) {
    cqsa_attention_leaf& a = p.leaf;
    const bool wide = chance(.5);
    a.index_dtype = a.seqused_dtype = wide ? CQSA_DTYPE_I64 : CQSA_DTYPE_I32;
    if (p.varlen) a.batch = between(1, 3);
    p.q_rows = a.seqlen_q, p.k_rows = a.seqlen_k, p.q_items = p.k_items = a.batch, p.last_row = a.seqlen_q;
    std::vector<int64_t> keys(size_t(a.batch), a.seqlen_k), q{0}, k{0};
    if (p.varlen) {
      for (int64_t b = 0; b < a.batch; ++b) {
        q.push_back(q.back() + between(0, a.seqlen_q));
        if (!p.paged) keys[size_t(b)] = between(0, a.seqlen_k);
        k.push_back(k.back() + keys[size_t(b)]);
      }
      a.total_q = p.q_rows = q.back() + between(0, 5), p.last_row = q.back();
      a.total_k = p.k_rows = k.back() + between(0, 3);
      p.q_items = p.k_items = 1;
      a.cu_seqlens_q = index_array(q, wide);
      if (!p.paged) a.cu_seqlens_k = index_array(k, wide);
      else a.total_k = 0;
    }
    if (p.paged || chance(.2)) {
      for (int64_t& n : keys) n = between(0, n);
      a.seqused_k = index_array(keys, wide);
    }
    if (!p.paged) return;
    a.page_size = chance(.5) ? between(1, 9) : between(16, 80);
    if (page_unit_) a.page_size = page_unit_ * (chance(.7) ? int64_t(1) << between(0, 4) : between(1, 20));
    const int64_t per = (a.seqlen_k + a.page_size - 1) / a.page_size + 1;
    a.num_pages = per * a.batch + 2;
    int32_t* table = array<int32_t>(per * a.batch);
    for (int64_t i = 0; i < per * a.batch; ++i) table[i] = chance(.1) ? -1 : int32_t(between(0, a.num_pages - 1));
    a.page_table = table, a.page_table_stride[0] = per, a.page_table_stride[1] = 1;
    p.k_items = a.num_pages, p.k_rows = a.page_size;
  }

  // Segments share one array.
  void no_batch(problem& p, cqsa_view& x, bool is_query) {
    if (p.varlen && (is_query || !p.paged)) x.stride[0] = 0;
  }

  void operands(problem& p) {
    cqsa_attention_leaf& a = p.leaf;
    constexpr cqsa_dtype narrow[] = {CQSA_DTYPE_I8, CQSA_DTYPE_E4M3FN, CQSA_DTYPE_E5M2};
    const cqsa_dtype tq = floats[between(simple_, 2)], tkv = chance(.3) && !simple_ ? narrow[between(0, 2)] : tq;
    a.q = tensor(tq, p.q_items, a.num_heads, p.q_rows, a.head_dim);
    a.k = tensor(tkv, p.k_items, a.num_kv_heads, p.k_rows, a.head_dim);
    a.v = tensor(tkv, p.k_items, a.num_kv_heads, p.k_rows, a.head_dim_v);
    no_batch(p, a.q, true), no_batch(p, a.k, false), no_batch(p, a.v, false);
    p.nan = chance(.4) && (page_unit_ || (!p.varlen && !p.paged));
    if (!p.nan) return;
    for (int64_t b = 0; b < p.k_items; ++b)
      for (int64_t g = 0; g < a.num_kv_heads; ++g)
        for (int64_t r = 0; r < p.k_rows; ++r)
          if (chance(.02)) {
            put_nan(address(a.k, b, g, r, between(0, a.head_dim - 1)), tkv);
            put_nan(address(a.v, b, g, r, between(0, a.head_dim_v - 1)), tkv);
          }
  }

  void scales(problem& p) {
    cqsa_attention_leaf& a = p.leaf;
    if (bytes_of(a.k.dtype) > 1) return;
    if (a.k.dtype == CQSA_DTYPE_I8) a.kv_group = 32 << between(0, 2);
    for (int w = 0; w < 2; ++w) {
      cqsa_view& s = w ? a.v_scale : a.k_scale;
      int32_t& kind = w ? a.scale_v : a.scale_k;
      kind = a.k.dtype == CQSA_DTYPE_I8 ? int32_t(CQSA_SCALE_GROUP) : int32_t(between(0, 3));
      const int64_t channels = w ? a.head_dim_v : a.head_dim;
      if (kind == CQSA_SCALE_GROUP)
        s = tensor(CQSA_DTYPE_F16, p.k_items, a.num_kv_heads, p.k_rows, (channels + a.kv_group - 1) / a.kv_group);
      if (kind == CQSA_SCALE_TENSOR) s = tensor(CQSA_DTYPE_F32, 1, 1, 1, 1);
      if (kind == CQSA_SCALE_HEAD) s = tensor(CQSA_DTYPE_F32, 1, a.num_kv_heads, 1, 1);
      if (kind == CQSA_SCALE_TOKEN) s = tensor(CQSA_DTYPE_F32, p.k_items, a.num_kv_heads, p.k_rows, 1);
      if (kind >= CQSA_SCALE_TOKEN) no_batch(p, s, false);
    }
  }

  cqsa_view plane(const cqsa_attention_leaf& a, cqsa_dtype t) {
    cqsa_view v = tensor(t, a.batch, a.num_heads, a.seqlen_q, a.seqlen_k);
    for (int64_t& stride : v.stride)
      if (chance(.25)) stride = 0;
    return v;
  }

  void masks(problem& p) {
    cqsa_attention_leaf& a = p.leaf;
    if (simple_) {
      if (chance(.3)) a.sinks = tensor(CQSA_DTYPE_F32, 1, a.num_heads, 1, 1);
      return;
    }
    if (chance(.3)) a.mask = plane(a, CQSA_DTYPE_BOOL);
    if (chance(.3)) a.bias = plane(a, floats[between(0, 2)]);
    if (chance(.2)) {
      a.slopes = tensor(CQSA_DTYPE_F32, a.batch, a.num_heads, 1, 1);
      if (chance(.5)) a.slopes.stride[0] = 0;
    }
    if (chance(.3)) a.sinks = tensor(CQSA_DTYPE_F32, 1, a.num_heads, 1, 1);
  }

  void outputs(problem& p) {
    cqsa_attention_leaf& a = p.leaf;
    a.out = tensor(chance(.3) ? floats[between(0, 2)] : cqsa_dtype(CQSA_DTYPE_F32), p.q_items, a.num_heads, p.q_rows, a.head_dim_v);
    a.lse = tensor(CQSA_DTYPE_F32, p.q_items, a.num_heads, p.q_rows, 1);
    no_batch(p, a.out, true), no_batch(p, a.lse, true);
    p.reference = a;
    const int64_t rows = a.num_heads * p.q_rows;
    p.reference.out = {array<float>(p.q_items * rows * a.head_dim_v), CQSA_DTYPE_F32, 0,
                       {p.varlen ? 0 : rows * a.head_dim_v, p.q_rows * a.head_dim_v, a.head_dim_v, 1}};
    p.reference.lse = {array<float>(p.q_items * rows), CQSA_DTYPE_F32, 0, {p.varlen ? 0 : rows, p.q_rows, 1, 1}};
  }

  std::mt19937_64 random_;
  memory& mem_;
  int64_t most_keys_, page_unit_;
  bool simple_;
};

// One way to call the leaf: whole, in rectangles, or in rectangles with a state between calls.
class caller {
 public:
  caller(problem& p, maker& m, const cqsa_attention_impl& impl, void* device, void (*sync)(void*))
      : p_(p), a_(p.leaf), m_(m), impl_(impl), device_(device), sync_(sync) {}

  cqsa_status call() {
    char reason[256];
    const cqsa_status status = impl_.probe(&a_, reason, sizeof reason);
    if (status != CQSA_OK) return status;
    if (p_.varlen || p_.paged || a_.seqused_k || m_.chance(.5)) {
      if (p_.varlen) a_.flags |= CQSA_LEAF_CLEAR_TAIL;
      return launch();
    }
    const bool with_state = m_.chance(.5);
    p_.form = with_state ? "rectangles with a state" : "rectangles";
    queries_ = m_.between(1, 3), keys_ = m_.between(1, 3);
    return with_state ? call_with_state() : call_at_once();
  }

 private:
  static int64_t cut(int64_t n, int64_t i, int64_t of) { return n * i / of; }

  void add(int64_t i, int64_t j) {
    cqsa_rect r{};
    r.q_pos = r.q_row = cut(a_.seqlen_q, i, queries_);
    r.q_len = cut(a_.seqlen_q, i + 1, queries_) - r.q_row;
    r.state_row = r.q_row + 2;
    r.k_pos = r.k_row = cut(a_.seqlen_k, j, keys_);
    r.k_len = cut(a_.seqlen_k, j + 1, keys_) - r.k_row;
    rects_.push_back(r);
  }

  cqsa_status call_at_once() {
    for (int64_t i = 0; i < queries_; ++i)
      for (int64_t j = 0; j < keys_; ++j) add(i, j);
    return launch();
  }

  cqsa_status call_with_state() {
    a_.state_rows = a_.seqlen_q + 3;
    const int64_t rows = a_.batch * a_.num_heads * a_.state_rows;
    a_.state_acc = m_.array<float>(rows * a_.head_dim_v), a_.state_m = m_.array<float>(rows), a_.state_l = m_.array<float>(rows);
    std::memset(a_.state_acc, 0xff, size_t(rows * a_.head_dim_v) * 4);
    for (int64_t j = 0; j < keys_; ++j) {
      rects_.clear();
      for (int64_t i = 0; i < queries_; ++i) add(i, j);
      a_.flags = (j ? CQSA_LEAF_STATE_IN : 0) | CQSA_LEAF_STATE_OUT;
      const cqsa_status status = launch();
      if (status != CQSA_OK) return status;
    }
    rects_.clear();
    for (int64_t i = 0; i < queries_; ++i) {
      add(i, 0);
      rects_.back().k_len = 0;
    }
    a_.flags = CQSA_LEAF_STATE_IN;
    return launch();
  }

  cqsa_status launch() {
    a_.rects = rects_.empty() ? nullptr : rects_.data();
    a_.num_rects = int64_t(rects_.size());
    const uint64_t bytes = impl_.workspace(&a_, 1);
    const cqsa_status status = impl_.launch(device_, &a_, m_.array<char>(int64_t(bytes)), bytes, nullptr, nullptr);
    if (sync_) sync_(device_);
    return status;
  }

  problem& p_;
  cqsa_attention_leaf& a_;
  maker& m_;
  const cqsa_attention_impl& impl_;
  void* device_;
  void (*sync_)(void*);
  int64_t queries_ = 1, keys_ = 1;
  std::vector<cqsa_rect> rects_;
};

inline std::string describe(const problem& p, uint64_t seed) {
  const cqsa_attention_leaf& a = p.leaf;
  char t[640];
  std::snprintf(t, sizeof t,
                "seed %llu: batch %lld heads %lld/%lld dims %lld/%lld q %lld k %lld types %x %x out %x varlen %d page %lld used %d mask %d "
                "bias %d slopes %d sinks %d causal %d window %lld %lld softcap %g nan %d scales %d %d %s",
                (unsigned long long)seed, (long long)a.batch, (long long)a.num_heads, (long long)a.num_kv_heads, (long long)a.head_dim,
                (long long)a.head_dim_v, (long long)a.seqlen_q, (long long)a.seqlen_k, a.q.dtype, a.k.dtype, a.out.dtype, p.varlen,
                (long long)a.page_size, a.seqused_k != nullptr, a.mask.data != nullptr, a.bias.data != nullptr, a.slopes.data != nullptr,
                a.sinks.data != nullptr, a.causal, (long long)a.window_left, (long long)a.window_right, a.softcap, p.nan, a.scale_k,
                a.scale_v, p.form.c_str());
  return t;
}

// What rounding p, and int8 values times the scale of their group, to q's type may do: half a unit of each, times the largest value.
inline double rounding_of(const cqsa_attention_leaf& a) {
  const double unit = a.q.dtype == CQSA_DTYPE_F32 ? 0 : a.q.dtype == CQSA_DTYPE_F16 ? 0x1p-11 : 0x1p-8;
  return unit * (a.v.dtype == CQSA_DTYPE_I8 ? 10.5 : 3);
}

// "" or the first element that is wrong. NaN must meet NaN. rounds: p and scaled codes are rounded to q's type.
inline std::string compare(const problem& p, bool rounds) {
  const cqsa_attention_leaf &a = p.leaf, &r = p.reference;
  const double rounding = rounds ? rounding_of(a) : 0;
  const double out_bound = rounding + (a.out.dtype == CQSA_DTYPE_F32 ? 5e-5 : a.out.dtype == CQSA_DTYPE_F16 ? 1e-3 : 8e-3);
  const double lse_bound = 3e-5 + (a.scale_k == CQSA_SCALE_GROUP ? rounding : 0);
  auto differs = [](double x, double want, double bound) {
    if (x == want || (x != x && want != want)) return false;
    return !(std::fabs(x - want) <= bound * (1 + std::fabs(want)));
  };
  char t[160];
  for (int64_t b = 0; b < p.q_items; ++b)
    for (int64_t h = 0; h < a.num_heads; ++h)
      for (int64_t row = 0; row < p.q_rows; ++row) {
        const bool past = p.varlen && row >= p.last_row;
        const double lse = value_at(a.lse, b, h, row, 0), want_lse = past ? -infinite : value_at(r.lse, b, h, row, 0);
        if (differs(lse, want_lse, lse_bound)) {
          std::snprintf(t, sizeof t, "lse[%d, %d, %d] is %g, wanted %g", int(b), int(h), int(row), lse, want_lse);
          return t;
        }
        for (int64_t c = 0; c < a.head_dim_v; ++c) {
          const double x = value_at(a.out, b, h, row, c), want = past ? 0 : value_at(r.out, b, h, row, c);
          if (!differs(x, want, out_bound)) continue;
          std::snprintf(t, sizeof t, "out[%d, %d, %d, %d] is %g, wanted %g", int(b), int(h), int(row), int(c), x, want);
          return t;
        }
      }
  return "";
}

// "" when the leaf agrees with the reference on problem `seed`, "declined" when it does not take it.
inline std::string check(uint64_t seed, memory& mem, int64_t most_keys, void* device, void (*sync)(void*), const cqsa_exec* exec,
                         const cqsa_attention_impl& impl = gpu::portable_attention, const cqsa_chip& chip = {}, bool simple = false, int64_t page_unit = 0) {
  mem.reset();
  maker m(seed, mem, most_keys, simple, page_unit);
  problem p = m.make();
  p.leaf.chip = chip;
  char reason[256];
  if (impl.probe(&p.leaf, reason, sizeof reason) == CQSA_ERROR_UNSUPPORTED) return "declined";
  cpu::reference_impl.launch(nullptr, &p.reference, nullptr, 0, exec, nullptr);
  const cqsa_status status = caller(p, m, impl, device, sync).call();
  if (status != CQSA_OK) return "status " + std::to_string(status) + ", " + describe(p, seed);
  const std::string wrong = compare(p, chip.tier != 0);
  return wrong.empty() ? wrong : wrong + ", " + describe(p, seed);
}

}  // namespace cqsa::random_leaf
