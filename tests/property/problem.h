// SPDX-License-Identifier: Apache-2.0
// Random attention problems with their operands, for the property tests. Public API only.
#pragma once
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "cqsa.h"
#include "elements.h"

namespace property {

using vectors::element_type;

class generator {
 public:
  explicit generator(uint64_t seed) : engine_(seed) {}
  int64_t integer(int64_t low, int64_t high) { return low + static_cast<int64_t>(engine_() % static_cast<uint64_t>(high - low + 1)); }
  bool chance(double p) { return static_cast<double>(engine_() >> 11) * 0x1p-53 < p; }
  double real(double low, double high) { return low + (high - low) * (static_cast<double>(engine_() >> 11) * 0x1p-53); }
  template <class T>
  T one_of(std::initializer_list<T> list) {
    return list.begin()[integer(0, static_cast<int64_t>(list.size()) - 1)];
  }
  uint64_t bits() { return engine_(); }

 private:
  std::mt19937_64 engine_;
};

// A strided array that owns its memory. Absent when it has no axes.
struct array {
  std::vector<int64_t> shape, strides;
  cqsa_dtype dtype = CQSA_DTYPE_F32;
  std::vector<unsigned char> bytes;
  int64_t first = 0;
  mutable cqsa_tensor tensor{};

  array() = default;
  array(cqsa_dtype type, std::vector<int64_t> sizes) : shape(std::move(sizes)), strides(shape.size()), dtype(type) {
    int64_t step = 1;
    for (size_t i = shape.size(); i-- > 0; step *= shape[i]) strides[i] = step;
    bytes.assign(static_cast<size_t>(step * type_bytes()), 0xFF);
  }

  bool present() const { return !shape.empty(); }
  int64_t type_bytes() const { return vectors::type_of(dtype).bytes; }
  int64_t count() const {
    int64_t n = present();
    for (const int64_t size : shape) n *= size;
    return n;
  }
  size_t offset(int64_t n) const {
    int64_t at = first;
    for (size_t i = shape.size(); i-- > 0; n /= shape[i]) at += n % shape[i] * strides[i];
    return static_cast<size_t>(at * type_bytes());
  }
  // By row-major number of the element.
  double get(int64_t n) const { return vectors::load(bytes.data() + offset(n), vectors::type_of(dtype)); }
  void set(int64_t n, double value) { vectors::store(bytes.data() + offset(n), vectors::type_of(dtype), value); }

  cqsa_tensor* view() const {
    tensor = {const_cast<unsigned char*>(bytes.data()), CQSA_DEVICE_CPU, 0, static_cast<int32_t>(shape.size()), dtype,
              const_cast<int64_t*>(shape.data()), const_cast<int64_t*>(strides.data()), static_cast<uint64_t>(first * type_bytes())};
    return &tensor;
  }

  // The same elements in another layout: any order of axes, some backwards, gaps filled with 0xFF.
  array scattered(generator& random) const {
    array other = *this;
    std::vector<size_t> order(shape.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[static_cast<size_t>(random.integer(0, static_cast<int64_t>(i) - 1))]);
    int64_t step = random.integer(1, 2);
    other.first = random.integer(0, 3);
    for (const size_t axis : order) {
      other.strides[axis] = step;
      step = step * std::max<int64_t>(1, shape[axis]) + random.integer(0, 3);
      if (shape[axis] > 0 && random.chance(0.3)) {
        other.first += other.strides[axis] * (shape[axis] - 1);
        other.strides[axis] = -other.strides[axis];
      }
    }
    other.bytes.assign(static_cast<size_t>((step + 8) * type_bytes()), 0xFF);
    for (int64_t n = 0; n < count(); ++n)
      std::memcpy(other.bytes.data() + other.offset(n), bytes.data() + offset(n), static_cast<size_t>(type_bytes()));
    return other;
  }
};

// The elements of an output, packed, to compare bit for bit.
inline std::vector<unsigned char> packed(const array& a) {
  std::vector<unsigned char> out;
  for (int64_t n = 0; n < a.count(); ++n) {
    const unsigned char* at = a.bytes.data() + a.offset(n);
    out.insert(out.end(), at, at + a.type_bytes());
  }
  return out;
}

enum operand { Q, K, V, K_SCALE, V_SCALE, MASK, BIAS, SLOPES, SINKS, CU_Q, CU_K, USED, PAGES, num_operands };
inline constexpr const cqsa_tensor* cqsa_attention_args::* slots[num_operands] = {
    &cqsa_attention_args::q,    &cqsa_attention_args::k,            &cqsa_attention_args::v,
    &cqsa_attention_args::k_scale, &cqsa_attention_args::v_scale,   &cqsa_attention_args::mask,
    &cqsa_attention_args::bias, &cqsa_attention_args::alibi_slopes, &cqsa_attention_args::sinks,
    &cqsa_attention_args::cu_seqlens_q, &cqsa_attention_args::cu_seqlens_k, &cqsa_attention_args::seqused_k,
    &cqsa_attention_args::page_table};

struct result {
  array out, lse;
  bool operator==(const result& other) const { return packed(out) == packed(other.out) && packed(lse) == packed(other.lse); }
};

struct problem {
  cqsa_attention_params params = CQSA_ATTENTION_PARAMS_INIT;
  std::array<array, num_operands> operands;

  bool has(uint32_t flag) const { return params.flags & flag; }
  bool takes_cqs() const {
    return params.seqlen_q == params.seqlen_k && params.dtype_q != CQSA_DTYPE_F64 &&
           !has(CQSA_ATTENTION_VARLEN | CQSA_ATTENTION_PAGED | CQSA_ATTENTION_SEQUSED_K | CQSA_ATTENTION_BATCH_INVARIANT);
  }
  result empty_result() const {
    const auto& p = params;
    const cqsa_dtype lse_type = p.dtype_q == CQSA_DTYPE_F64 ? CQSA_DTYPE_F64 : CQSA_DTYPE_F32;
    if (has(CQSA_ATTENTION_VARLEN))
      return {array(p.dtype_out, {p.total_q, p.num_heads, p.head_dim_v}), array(lse_type, {p.num_heads, p.total_q})};
    return {array(p.dtype_out, {p.batch, p.num_heads, p.seqlen_q, p.head_dim_v}), array(lse_type, {p.batch, p.num_heads, p.seqlen_q})};
  }
  cqsa_attention_args args(const result& r) const {
    cqsa_attention_args a = CQSA_ATTENTION_ARGS_INIT;
    for (int i = 0; i < num_operands; ++i)
      if (operands[i].present()) a.*slots[i] = operands[i].view();
    a.out = r.out.view();
    a.lse = r.lse.view();
    return a;
  }
};

inline void fill(array& a, generator& random, double low, double high) {
  for (int64_t n = 0; n < a.count(); ++n) a.set(n, random.real(low, high));
}

// The last four axes of a mask or bias, each of size 1 now and then.
inline std::vector<int64_t> plane_shape(const cqsa_attention_params& p, generator& random, uint32_t* broadcast_out) {
  std::vector<int64_t> shape = {p.batch, p.num_heads, p.seqlen_q, p.seqlen_k};
  for (int i = 0; i < 4; ++i)
    if (shape[static_cast<size_t>(i)] != 1 && random.chance(0.4)) {
      shape[static_cast<size_t>(i)] = 1;
      *broadcast_out |= 1u << i;
    }
  return shape;
}

struct wishes {
  bool batched = false;      // neither varlen nor paged nor seqused_k
  bool f32 = false;          // q, k, v, out f32
  bool square = false;       // seqlen_q = seqlen_k
  bool by_position = false;  // no mask, bias or sinks
  bool large = false;        // enough work for several threads
};

inline void choose_types(cqsa_attention_params& p, generator& random, const wishes& wish) {
  p.dtype_q = wish.f32 ? CQSA_DTYPE_F32 : random.one_of({CQSA_DTYPE_F32, CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16});
  p.dtype_kv = p.dtype_out = p.dtype_q;
  if (wish.f32) return;
  if (random.chance(0.25)) p.dtype_out = random.one_of({CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16});
  if (random.chance(0.35)) p.dtype_kv = random.one_of({CQSA_DTYPE_I8, CQSA_DTYPE_E4M3FN, CQSA_DTYPE_E5M2});
  if (p.dtype_kv == CQSA_DTYPE_I8) {
    p.scale_k = p.scale_v = CQSA_SCALE_GROUP;
    p.kv_group = random.one_of<int64_t>({32, 64, 128});
  } else if (p.dtype_kv != p.dtype_q) {
    p.scale_k = static_cast<int32_t>(random.integer(CQSA_SCALE_NONE, CQSA_SCALE_TOKEN));
    p.scale_v = static_cast<int32_t>(random.integer(CQSA_SCALE_NONE, CQSA_SCALE_TOKEN));
  }
}

inline void choose_sizes(cqsa_attention_params& p, generator& random, const wishes& wish) {
  p.batch = random.integer(1, 3);
  p.num_kv_heads = random.integer(1, 3);
  p.num_heads = p.num_kv_heads * random.integer(1, 4);
  p.head_dim = random.one_of<int64_t>({1, 3, 8, 16, 17, 32, 40, 64, 80, 128});
  p.head_dim_v = random.chance(0.7) ? p.head_dim : random.one_of<int64_t>({1, 7, 16, 48, 64});
  p.seqlen_q = random.chance(0.2) ? 1 : random.integer(1, 180);
  p.seqlen_k = random.integer(1, 220);
  if (wish.large) {
    p.num_heads = p.num_kv_heads * 4;
    p.head_dim = p.head_dim_v = 32;
    p.seqlen_q = random.integer(150, 200), p.seqlen_k = random.integer(150, 200);
  }
  if (wish.square || (!wish.large && random.chance(0.3))) p.seqlen_k = p.seqlen_q = std::max(p.seqlen_q, wish.square ? p.seqlen_k : 1);
  // The f64 reference takes some 20 ns for each of these.
  while (!wish.large && p.batch * p.num_heads * p.seqlen_q * p.seqlen_k * p.head_dim > 3000000) {
    if (p.batch > 1) --p.batch;
    else if (p.num_heads > p.num_kv_heads) p.num_heads -= p.num_kv_heads;
    else p.head_dim = std::max<int64_t>(1, p.head_dim / 2);
  }
}

// Lengths that fall in [0, longest], the first one longest; as first rows.
inline array segments(generator& random, cqsa_dtype dtype, int64_t batch, int64_t longest, int64_t* total_out) {
  array cu(dtype, {batch + 1});
  int64_t row = 0;
  cu.set(0, 0);
  for (int64_t b = 0; b < batch; ++b) {
    row += b == 0 ? longest : random.chance(0.3) ? 0 : random.integer(0, longest);
    cu.set(b + 1, static_cast<double>(row));
  }
  *total_out = row + random.integer(0, 3);
  return cu;
}

inline void choose_layout(problem& out, generator& random) {
  cqsa_attention_params& p = out.params;
  const cqsa_dtype index = random.one_of({CQSA_DTYPE_I32, CQSA_DTYPE_I64});
  const bool varlen = random.chance(0.35), paged = random.chance(0.25);
  if (varlen) {
    p.flags |= CQSA_ATTENTION_VARLEN;
    out.operands[CU_Q] = segments(random, index, p.batch, p.seqlen_q, &p.total_q);
  }
  if (varlen && !paged) out.operands[CU_K] = segments(random, index, p.batch, p.seqlen_k, &p.total_k);
  if (paged) {
    p.flags |= CQSA_ATTENTION_PAGED;
    p.page_size = random.one_of<int64_t>({1, 3, 16, 64});
    const int64_t columns = (p.seqlen_k + p.page_size - 1) / p.page_size;
    p.num_pages = columns * p.batch + 2;
    out.operands[PAGES] = array(CQSA_DTYPE_I32, {p.batch, columns});
    for (int64_t n = 0; n < p.batch * columns; ++n)
      out.operands[PAGES].set(n, static_cast<double>(random.chance(0.1) ? -1 : random.integer(0, p.num_pages - 1)));
  }
  if (random.chance(paged ? 0.6 : 0.2)) {
    p.flags |= CQSA_ATTENTION_SEQUSED_K;
    array& used = out.operands[USED] = array(random.one_of({CQSA_DTYPE_I32, CQSA_DTYPE_I64}), {p.batch});
    for (int64_t b = 0; b < p.batch; ++b) {
      const array& cu = out.operands[CU_K];
      const int64_t length = cu.present() ? static_cast<int64_t>(cu.get(b + 1) - cu.get(b)) : p.seqlen_k;
      used.set(b, static_cast<double>(b == 0 && !cu.present() ? length : random.integer(0, length)));
    }
  }
}

inline void make_operands(problem& out, generator& random) {
  const cqsa_attention_params& p = out.params;
  const bool varlen = out.has(CQSA_ATTENTION_VARLEN), paged = out.has(CQSA_ATTENTION_PAGED);
  std::vector<int64_t> queries = {p.batch, p.num_heads, p.seqlen_q}, keys = {p.batch, p.num_kv_heads, p.seqlen_k};
  if (varlen) queries = {p.total_q, p.num_heads}, keys = {p.total_k, p.num_kv_heads};
  if (paged) keys = {p.num_pages, p.page_size, p.num_kv_heads};
  const auto with = [](std::vector<int64_t> axes, int64_t last) {
    axes.push_back(last);
    return axes;
  };
  out.operands[Q] = array(p.dtype_q, with(queries, p.head_dim));
  out.operands[K] = array(p.dtype_kv, with(keys, p.head_dim));
  out.operands[V] = array(p.dtype_kv, with(keys, p.head_dim_v));
  const double range = p.dtype_kv == CQSA_DTYPE_I8 ? 127 : 2;
  fill(out.operands[Q], random, -2, 2);
  fill(out.operands[K], random, -range, range);
  fill(out.operands[V], random, -range, range);
  for (const auto& [kind, which, dim] : {std::tuple{p.scale_k, K_SCALE, p.head_dim}, std::tuple{p.scale_v, V_SCALE, p.head_dim_v}}) {
    array& scale = out.operands[which];
    if (kind == CQSA_SCALE_TENSOR) scale = array(CQSA_DTYPE_F32, {1});
    if (kind == CQSA_SCALE_HEAD) scale = array(CQSA_DTYPE_F32, {p.num_kv_heads});
    if (kind == CQSA_SCALE_TOKEN) scale = array(CQSA_DTYPE_F32, keys);
    if (kind == CQSA_SCALE_GROUP) scale = array(CQSA_DTYPE_F16, with(keys, (dim + p.kv_group - 1) / p.kv_group));
    fill(scale, random, kind == CQSA_SCALE_GROUP ? 0.005 : 0.2, kind == CQSA_SCALE_GROUP ? 0.015 : 1.0);
  }
}

inline void choose_logits(problem& out, generator& random, const wishes& wish) {
  cqsa_attention_params& p = out.params;
  p.causal = static_cast<int32_t>(random.integer(0, 2));
  if (random.chance(0.3)) {
    p.flags |= CQSA_ATTENTION_WINDOW;
    p.window_left = random.integer(-1, p.seqlen_k);
    p.window_right = random.integer(-1, p.seqlen_k);
  }
  if (random.chance(0.2)) p.softcap = random.real(0.5, 10);
  if (random.chance(0.2)) p.softmax_scale = random.real(0.05, 0.5);
  if (random.chance(0.2)) {
    p.flags |= CQSA_ATTENTION_ALIBI;
    out.operands[SLOPES] = array(CQSA_DTYPE_F32, random.chance(0.5) ? std::vector<int64_t>{p.num_heads} : std::vector<int64_t>{p.batch, p.num_heads});
    fill(out.operands[SLOPES], random, 0, 0.5);
  }
  if (wish.by_position) return;
  if (random.chance(0.2)) {
    p.flags |= CQSA_ATTENTION_SINKS;
    out.operands[SINKS] = array(CQSA_DTYPE_F32, {p.num_heads});
    fill(out.operands[SINKS], random, -4, 4);
  }
  if (random.chance(0.3)) {
    p.flags |= CQSA_ATTENTION_MASK;
    array& mask = out.operands[MASK] = array(random.one_of({CQSA_DTYPE_BOOL, CQSA_DTYPE_U8}), plane_shape(p, random, &p.mask_broadcast));
    for (int64_t n = 0; n < mask.count(); ++n) mask.set(n, random.chance(0.75));
  }
  if (random.chance(0.3)) {
    p.flags |= CQSA_ATTENTION_BIAS;
    p.dtype_bias = random.one_of({CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16});
    fill(out.operands[BIAS] = array(p.dtype_bias, plane_shape(p, random, &p.bias_broadcast)), random, -3, 3);
  }
}

inline problem random_problem(generator& random, const wishes& wish = {}) {
  problem out;
  out.params.flags = CQSA_ATTENTION_LSE;
  choose_types(out.params, random, wish);
  choose_sizes(out.params, random, wish);
  if (!wish.batched) choose_layout(out, random);
  choose_logits(out, random, wish);
  make_operands(out, random);
  return out;
}

// The factor of element n of k or v.
inline double scale_of(const problem& p, int32_t kind, const array& scale, const array& keys, int64_t n) {
  const int64_t dim = keys.shape.back(), row = n / dim, channel = n % dim;
  if (kind == CQSA_SCALE_TENSOR) return scale.get(0);
  if (kind == CQSA_SCALE_TOKEN) return scale.get(row);
  if (kind == CQSA_SCALE_GROUP) return scale.get(row * scale.shape.back() + channel / p.params.kv_group);
  if (kind != CQSA_SCALE_HEAD) return 1;
  const bool heads_inside = p.has(CQSA_ATTENTION_VARLEN | CQSA_ATTENTION_PAGED);
  return scale.get(heads_inside ? row % p.params.num_kv_heads : row / p.params.seqlen_k % p.params.num_kv_heads);
}

// The same problem for the f64 reference: every operand converted exactly, scales multiplied in.
inline problem in_f64(const problem& p) {
  problem out = p;
  const auto widen = [&](operand which, int32_t kind, operand scale) {
    const array& from = p.operands[which];
    array to(CQSA_DTYPE_F64, from.shape);
    for (int64_t n = 0; n < from.count(); ++n) to.set(n, from.get(n) * scale_of(p, kind, p.operands[scale], from, n));
    out.operands[which] = to;
  };
  widen(Q, CQSA_SCALE_NONE, K_SCALE);
  widen(K, p.params.scale_k, K_SCALE);
  widen(V, p.params.scale_v, V_SCALE);
  if (p.has(CQSA_ATTENTION_BIAS)) widen(BIAS, CQSA_SCALE_NONE, K_SCALE), out.params.dtype_bias = CQSA_DTYPE_F64;
  out.operands[K_SCALE] = out.operands[V_SCALE] = array();
  out.params.scale_k = out.params.scale_v = CQSA_SCALE_NONE;
  out.params.kv_group = 0;
  out.params.dtype_q = out.params.dtype_kv = out.params.dtype_out = CQSA_DTYPE_F64;
  out.params.schedule = CQSA_SCHEDULE_AUTO, out.params.cqs_c = out.params.cqs_itr = 0;
  out.params.max_host_bytes = 0;
  return out;
}

}  // namespace property
