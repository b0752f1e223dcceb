// SPDX-License-Identifier: Apache-2.0
// src/ops/attention/operands.cpp: every refusal of operands with its status and the numbers in its sentence, params from
// tensors, and the views of what is accepted.
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "check_fails.h"
#include "ops/attention/problem.h"

namespace {

using namespace cqsa;
using params = cqsa_attention_params;
using sizes = std::vector<int64_t>;

constexpr auto invalid = CQSA_ERROR_INVALID_ARGUMENT;

cqsa_backend_v1 backend_of(const char* name, uint32_t flags, int32_t device_type, int32_t pinned_type) {
  cqsa_backend_v1 backend{};
  backend.struct_size = sizeof backend;
  backend.name = name;
  backend.flags = flags;
  backend.device_type = device_type;
  backend.pinned_type = pinned_type;
  return backend;
}
const cqsa_backend_v1 cpu = backend_of("cpu", CQSA_BACKEND_HOST, CQSA_DEVICE_CPU, 0);
const cqsa_backend_v1 cuda = backend_of("cuda", 0, CQSA_DEVICE_CUDA, CQSA_DEVICE_CUDA_HOST);

// A tensor that owns shape, strides and data, the data filled with zero bytes.
struct box {
  sizes shape, strides;
  std::vector<char> bytes;
  cqsa_tensor t{};
  box(cqsa_dtype dtype, sizes shape_, sizes strides_ = {}) : shape(std::move(shape_)), strides(std::move(strides_)) {
    t.dtype = dtype;
    t.device_type = CQSA_DEVICE_CPU;
    reset();
  }
  void reset() {
    t.ndim = static_cast<int32_t>(shape.size());
    t.shape = shape.data();
    t.strides = strides.empty() ? nullptr : strides.data();
    int64_t room = 64;
    for (const int64_t n : shape) room *= std::max<int64_t>(n, 1);
    bytes.assign(static_cast<size_t>(std::min<int64_t>(room, 1 << 20)), 0);
    t.data = bytes.data();
  }
  void reshape(sizes shape_, sizes strides_ = {}) {
    shape = std::move(shape_);
    strides = std::move(strides_);
    reset();
  }
  template <class T>
  void fill(std::vector<T> values) {
    std::memcpy(bytes.data(), values.data(), values.size() * sizeof(T));
  }
};

// All operands a problem could have; use() puts one into args.
struct scene {
  params p = CQSA_ATTENTION_PARAMS_INIT;
  cqsa_attention_args args = CQSA_ATTENTION_ARGS_INIT;
  const cqsa_backend_v1* backend = &cpu;
  box q{CQSA_DTYPE_F32, {2, 4, 5, 8}}, k{CQSA_DTYPE_F32, {2, 2, 7, 8}}, v{CQSA_DTYPE_F32, {2, 2, 7, 6}},
      out{CQSA_DTYPE_F32, {2, 4, 5, 6}}, lse{CQSA_DTYPE_F32, {2, 4, 5}}, mask{CQSA_DTYPE_BOOL, {2, 4, 5, 7}},
      bias{CQSA_DTYPE_F16, {2, 4, 5, 7}}, slopes{CQSA_DTYPE_F32, {4}}, sinks{CQSA_DTYPE_F32, {4}},
      k_scale{CQSA_DTYPE_F32, {2, 2, 7}}, v_scale{CQSA_DTYPE_F32, {2, 2, 7}}, cu_q{CQSA_DTYPE_I32, {3}},
      cu_k{CQSA_DTYPE_I32, {3}}, used{CQSA_DTYPE_I64, {2}}, pages{CQSA_DTYPE_I32, {2, 3}};
  scene() {
    args.q = &q.t;
    args.k = &k.t;
    args.v = &v.t;
    args.out = &out.t;
  }
  scene(const scene&) = delete;
  std::vector<box*> boxes() {
    return {&q, &k, &v, &out, &lse, &mask, &bias, &slopes, &sinks, &k_scale, &v_scale, &cu_q, &cu_k, &used, &pages};
  }
  // params from the tensors, checked, bound.
  cqsa_status derive() { return params_of(*backend, args, p); }
  cqsa_status bind(cqsa_attention_leaf& leaf) {
    attention_problem problem;
    CQSA_TRY(make_problem(&p, problem));
    return bind_operands(problem, *backend, args, leaf);
  }
};

using scene_pointer = std::unique_ptr<scene>;

scene_pointer batched() { return std::make_unique<scene>(); }

// Everything a batched problem can have.
scene_pointer full() {
  auto s = batched();
  s->args.lse = &s->lse.t;
  s->args.mask = &s->mask.t;
  s->args.bias = &s->bias.t;
  s->args.alibi_slopes = &s->slopes.t;
  s->args.sinks = &s->sinks.t;
  s->args.seqused_k = &s->used.t;
  s->used.fill<int64_t>({7, 0});
  return s;
}

scene_pointer varlen() {
  auto s = batched();
  s->q.reshape({9, 4, 8});
  s->out.reshape({9, 4, 6});
  s->k.reshape({11, 2, 8});
  s->v.reshape({11, 2, 6});
  s->lse.reshape({4, 9});
  s->cu_q.fill<int32_t>({0, 3, 8});
  s->cu_k.fill<int32_t>({0, 6, 6});
  s->args.cu_seqlens_q = &s->cu_q.t;
  s->args.cu_seqlens_k = &s->cu_k.t;
  s->args.lse = &s->lse.t;
  return s;
}

scene_pointer paged() {
  auto s = batched();
  s->k.reshape({10, 4, 2, 8});
  s->v.reshape({10, 4, 2, 6});
  s->pages.fill<int32_t>({3, 9, 1, -1, 0, 77});
  s->used.fill<int64_t>({12, 8});
  s->args.page_table = &s->pages.t;
  s->args.seqused_k = &s->used.t;
  return s;
}

scene_pointer fp8() {
  auto s = batched();
  s->k.t.dtype = s->v.t.dtype = CQSA_DTYPE_E4M3FN;
  s->args.k_scale = &s->k_scale.t;
  s->args.v_scale = &s->v_scale.t;
  return s;
}

scene_pointer i8() {
  auto s = batched();
  s->k.t.dtype = s->v.t.dtype = CQSA_DTYPE_I8;
  s->q.reshape({2, 4, 5, 100});
  s->k.reshape({2, 2, 7, 100});
  s->k_scale.reshape({2, 2, 7, 4});
  s->v_scale.reshape({2, 2, 7, 1});
  s->k_scale.t.dtype = s->v_scale.t.dtype = CQSA_DTYPE_F16;
  s->args.k_scale = &s->k_scale.t;
  s->args.v_scale = &s->v_scale.t;
  return s;
}

#define WITH(...) [](scene& s) { __VA_ARGS__; }

struct bad_scene {
  scene_pointer (*base)();
  std::function<void(scene&)> spoil;
  cqsa_status status;
  parts message;
};

// Params derived from the good scene; then the tensors are spoiled and bound.
void check_bind_table(const std::vector<bad_scene>& rows) {
  for (const bad_scene& row : rows) {
    const scene_pointer s = row.base();
    cqsa_attention_leaf leaf{};
    const bool good = s->derive() == CQSA_OK && s->bind(leaf) == CQSA_OK;
    INFO(last_error_text());
    REQUIRE(good);
    row.spoil(*s);
    cqsa_attention_leaf untouched{};
    untouched.batch = 777;
    check_fails(s->bind(untouched), row.status, row.message);
    CHECK(untouched.batch == 777);
    CHECK(s->out.bytes == std::vector<char>(s->out.bytes.size(), 0));
  }
}

void check_derive_table(const std::vector<bad_scene>& rows) {
  for (const bad_scene& row : rows) {
    const scene_pointer s = row.base();
    row.spoil(*s);
    const params before = s->p;
    check_fails(s->derive(), row.status, row.message);
    CHECK(std::memcmp(&before, &s->p, sizeof before) == 0);
  }
}

sizes stride_of(const cqsa_view& view) { return {view.stride, view.stride + 4}; }

// The leaf of a scene that has to be good.
cqsa_attention_leaf good_leaf(scene& s) {
  cqsa_attention_leaf leaf{};
  const cqsa_status derived = s.derive(), bound = derived == CQSA_OK ? s.bind(leaf) : derived;
  INFO(last_error_text());
  REQUIRE(bound == CQSA_OK);
  return leaf;
}

}  // namespace

TEST_CASE("bind: presence, both ways", "[operands]") {
  const auto null = CQSA_ERROR_NULL_POINTER;
  check_bind_table({
      {batched, WITH(s.args.q = nullptr), null, {"args->q is NULL"}},
      {batched, WITH(s.args.k = nullptr), null, {"args->k is NULL"}},
      {batched, WITH(s.args.v = nullptr), null, {"args->v is NULL"}},
      {batched, WITH(s.args.out = nullptr), null, {"args->out is NULL"}},
      {full, WITH(s.args.mask = nullptr), null, {"args->mask is NULL", "CQSA_ATTENTION_MASK"}},
      {full, WITH(s.args.bias = nullptr), null, {"args->bias is NULL", "CQSA_ATTENTION_BIAS"}},
      {full, WITH(s.args.alibi_slopes = nullptr), null, {"args->alibi_slopes is NULL", "CQSA_ATTENTION_ALIBI"}},
      {full, WITH(s.args.sinks = nullptr), null, {"args->sinks is NULL", "CQSA_ATTENTION_SINKS"}},
      {full, WITH(s.args.lse = nullptr), null, {"args->lse is NULL", "CQSA_ATTENTION_LSE"}},
      {full, WITH(s.args.seqused_k = nullptr), null, {"args->seqused_k is NULL", "CQSA_ATTENTION_SEQUSED_K"}},
      {varlen, WITH(s.args.cu_seqlens_q = nullptr), null, {"args->cu_seqlens_q is NULL", "CQSA_ATTENTION_VARLEN"}},
      {varlen, WITH(s.args.cu_seqlens_k = nullptr), null, {"args->cu_seqlens_k is NULL"}},
      {paged, WITH(s.args.page_table = nullptr), null, {"args->page_table is NULL", "CQSA_ATTENTION_PAGED"}},
      {fp8, WITH(s.args.k_scale = nullptr), null, {"args->k_scale is NULL", "scale_k"}},
      {i8, WITH(s.args.v_scale = nullptr), null, {"args->v_scale is NULL", "scale_v"}},
      {batched, WITH(s.args.mask = &s.mask.t), invalid, {"args->mask is given", "lack CQSA_ATTENTION_MASK"}},
      {batched, WITH(s.args.bias = &s.bias.t), invalid, {"args->bias is given"}},
      {batched, WITH(s.args.alibi_slopes = &s.slopes.t), invalid, {"args->alibi_slopes is given"}},
      {batched, WITH(s.args.sinks = &s.sinks.t), invalid, {"args->sinks is given"}},
      {batched, WITH(s.args.lse = &s.lse.t), invalid, {"args->lse is given"}},
      {batched, WITH(s.args.k_scale = &s.k_scale.t), invalid, {"args->k_scale is given", "scale_k"}},
      {batched, WITH(s.args.seqused_k = &s.used.t), invalid, {"args->seqused_k is given"}},
      {batched, WITH(s.args.page_table = &s.pages.t), invalid, {"args->page_table is given"}},
      {batched, WITH(s.args.cu_seqlens_q = &s.cu_q.t), invalid, {"args->cu_seqlens_q is given"}},
      {paged, WITH(s.args.cu_seqlens_k = &s.cu_k.t), invalid, {"args->cu_seqlens_k is given"}},
  });
}

TEST_CASE("bind: shapes", "[operands]") {
  const auto shape = CQSA_ERROR_SHAPE;
  check_bind_table({
      {batched,
       WITH(s.q.reshape({2, 4, 6, 8})),
       shape,
       {"args->q has shape [2, 4, 6, 8], wanted [2, 4, 5, 8] (batch, num_heads, seqlen_q, head_dim)"}},
      {batched,
       WITH(s.k.reshape({2, 3, 7, 8})),
       shape,
       {"args->k has shape [2, 3, 7, 8], wanted [2, 2, 7, 8] (batch, num_kv_heads, seqlen_k, head_dim)"}},
      {batched, WITH(s.v.reshape({2, 2, 8, 6})), shape, {"args->v", "wanted [2, 2, 7, 6]", "head_dim_v)"}},
      {batched, WITH(s.k.reshape({2, 2, 7, 9})), shape, {"args->k", "[2, 2, 7, 9]"}},
      {batched, WITH(s.q.reshape({4, 5, 8})), shape, {"args->q has shape [4, 5, 8]"}},
      {batched, WITH(s.out.reshape({2, 4, 5, 8})), shape, {"args->out has shape [2, 4, 5, 8], wanted [2, 4, 5, 6]"}},
      {full, WITH(s.lse.reshape({2, 5, 4})), shape, {"args->lse has shape [2, 5, 4], wanted [2, 4, 5]"}},
      {full, WITH(s.mask.reshape({2, 2, 5, 7})), shape, {"args->mask has shape [2, 2, 5, 7]", "or 1 along any"}},
      {full, WITH(s.mask.reshape({5, 7})), shape, {"args->mask has shape [5, 7]"}},
      {full, WITH(s.bias.reshape({2, 4, 5, 8})), shape, {"args->bias", "[2, 4, 5, 8]", "[2, 4, 5, 7]"}},
      {full, WITH(s.slopes.reshape({2})), shape, {"args->alibi_slopes has shape [2], wanted [4] (num_heads)"}},
      {full, WITH(s.slopes.reshape({4, 2})), shape, {"args->alibi_slopes has shape [4, 2], wanted [2, 4]"}},
      {full, WITH(s.sinks.reshape({2, 4})), shape, {"args->sinks has shape [2, 4], wanted [4]"}},
      {full, WITH(s.used.reshape({3})), shape, {"args->seqused_k has shape [3], wanted [2] (batch)"}},
      {full,
       WITH(s.p.mask_broadcast = CQSA_BROADCAST_QUERY),
       shape,
       {"args->mask has size 5 and stride 7 along axis 2 (seqlen_q)", "params->mask_broadcast (0x4)"}},
      {full, WITH(s.p.bias_broadcast = CQSA_BROADCAST_KEY), shape, {"args->bias", "axis 3", "params->bias_broadcast"}},
      {varlen, WITH(s.q.reshape({8, 4, 8})), shape, {"args->q", "[8, 4, 8]", "[9, 4, 8] (total_q, num_heads, head_dim)"}},
      {varlen, WITH(s.v.reshape({10, 2, 6})), shape, {"args->v", "[11, 2, 6] (total_k, num_kv_heads, head_dim_v)"}},
      {varlen, WITH(s.lse.reshape({9, 4})), shape, {"args->lse", "[4, 9] (num_heads, total_q)"}},
      {varlen, WITH(s.cu_q.reshape({4})), shape, {"args->cu_seqlens_q has shape [4], wanted [3] (batch + 1)"}},
      {varlen, WITH(s.cu_k.reshape({2})), shape, {"args->cu_seqlens_k has shape [2], wanted [3]"}},
      {paged,
       WITH(s.v.reshape({10, 3, 2, 6})),
       shape,
       {"args->v", "[10, 4, 2, 6] (num_pages, page_size, num_kv_heads, head_dim_v)"}},
      {paged, WITH(s.pages.reshape({3, 3})), shape, {"args->page_table has shape [3, 3], wanted [2, 3]"}},
      {paged, WITH(s.pages.reshape({6})), shape, {"args->page_table has 1 axes, wanted 2"}},
      {fp8, WITH(s.k_scale.reshape({2, 2, 6})), shape, {"args->k_scale", "[2, 2, 7] (batch, num_kv_heads, seqlen_k)"}},
      {fp8, WITH(s.p.scale_k = CQSA_SCALE_HEAD), shape, {"args->k_scale", "wanted [2] (num_kv_heads)"}},
      {fp8, WITH(s.p.scale_v = CQSA_SCALE_TENSOR), shape, {"args->v_scale has shape [2, 2, 7], wanted []"}},
      {i8, WITH(s.k_scale.reshape({2, 2, 7, 3})), shape, {"args->k_scale has shape [2, 2, 7, 3], wanted [2, 2, 7, 4]"}},
      {i8, WITH(s.p.kv_group = 64), shape, {"args->k_scale", "wanted [2, 2, 7, 2]"}},
      {batched, WITH(s.q.shape[1] = -4), shape, {"args->q has shape [2, -4, 5, 8]"}},
  });
}

TEST_CASE("bind: types, places, strides", "[operands]") {
  const auto dtype = CQSA_ERROR_DTYPE, device = CQSA_ERROR_DEVICE, strides = CQSA_ERROR_STRIDES;
  check_bind_table({
      {batched, WITH(s.q.t.dtype = CQSA_DTYPE_F16), dtype, {"args->q has dtype f16, wanted f32"}},
      {batched, WITH(s.v.t.dtype = CQSA_DTYPE_BF16), dtype, {"args->v has dtype bf16, wanted f32"}},
      {batched, WITH(s.out.t.dtype = CQSA_DTYPE_F64), dtype, {"args->out has dtype f64, wanted f32"}},
      {batched, WITH(s.k.t.dtype = 0x00022002), dtype, {"args->k has dtype 0x00022002"}},
      {full, WITH(s.lse.t.dtype = CQSA_DTYPE_F16), dtype, {"args->lse has dtype f16, wanted f32"}},
      {full, WITH(s.mask.t.dtype = CQSA_DTYPE_F32), dtype, {"args->mask has dtype f32, wanted bool or u8"}},
      {full, WITH(s.bias.t.dtype = CQSA_DTYPE_F32), dtype, {"args->bias has dtype f32, wanted f16"}},
      {full, WITH(s.slopes.t.dtype = CQSA_DTYPE_F64), dtype, {"args->alibi_slopes has dtype f64, wanted f32"}},
      {full, WITH(s.sinks.t.dtype = CQSA_DTYPE_BF16), dtype, {"args->sinks has dtype bf16"}},
      {full, WITH(s.used.t.dtype = CQSA_DTYPE_F32), dtype, {"args->seqused_k has dtype f32, wanted i32 or i64"}},
      {varlen, WITH(s.cu_q.t.dtype = CQSA_DTYPE_U8), dtype, {"args->cu_seqlens_q has dtype u8, wanted i32 or i64"}},
      {varlen,
       WITH(s.cu_k.t.dtype = CQSA_DTYPE_I64),
       dtype,
       {"args->cu_seqlens_k has dtype i64", "args->cu_seqlens_q, i32"}},
      {paged, WITH(s.pages.t.dtype = CQSA_DTYPE_I64), dtype, {"args->page_table has dtype i64, wanted i32"}},
      {fp8, WITH(s.k_scale.t.dtype = CQSA_DTYPE_F16), dtype, {"args->k_scale has dtype f16, wanted f32"}},
      {i8, WITH(s.v_scale.t.dtype = CQSA_DTYPE_F32), dtype, {"args->v_scale has dtype f32, wanted f16"}},
      {batched, WITH(s.q.t.device_type = CQSA_DEVICE_CUDA), device, {"args->q is on device type 2 (cuda)", "backend cpu"}},
      {varlen, WITH(s.cu_k.t.device_type = CQSA_DEVICE_ROCM), device, {"args->cu_seqlens_k", "10 (rocm)"}},
      {paged, WITH(s.pages.t.device_type = 99), device, {"args->page_table", "99 (unknown)"}},
      {batched,
       WITH(s.backend = &cuda, s.k.t.device_type = CQSA_DEVICE_CUDA),
       device,
       {"args->k is on device type 2 (cuda)", "CQSA_MEMORY_DEVICE", "params->memory_kv is CQSA_MEMORY_HOST (0)"}},
      {batched,
       WITH(s.backend = &cuda, s.p.memory_out = CQSA_MEMORY_DEVICE),
       device,
       {"args->out is on device type 1 (cpu)", "params->memory_out is CQSA_MEMORY_DEVICE (2)"}},
      {batched, WITH(s.backend = &cuda, s.p.memory_q = CQSA_MEMORY_PINNED), device, {"args->q", "CQSA_MEMORY_PINNED (1)"}},
      {full,
       WITH(s.backend = &cuda, s.used.t.device_type = CQSA_DEVICE_CUDA),
       device,
       {"args->seqused_k", "but args->q is on device type 1 (cpu)"}},
      {batched,
       WITH(s.backend = &cuda, s.out.t.device_type = CQSA_DEVICE_ROCM),
       device,
       {"args->out", "2 (cuda) or host memory"}},
      {batched, WITH(s.q.t.data = nullptr), CQSA_ERROR_NULL_POINTER, {"args->q->data is NULL", "[2, 4, 5, 8]"}},
      {batched, WITH(s.q.t.shape = nullptr), CQSA_ERROR_NULL_POINTER, {"args->q->shape is NULL"}},
      {batched, WITH(s.out.reshape({2, 4, 5, 6}, {0, 30, 6, 1})), strides, {"args->out is an output", "[0, 30, 6, 1]"}},
      {batched, WITH(s.k.reshape({2, 2, 7, 8}, {INT64_MAX, 8, 8, 1})), strides, {"args->k"}},
      {full, WITH(s.lse.reshape({2, 4, 5}, {20, 4, 1})), strides, {"args->lse is an output", "[20, 4, 1]"}},
      {full, WITH(s.used.reshape({2}, {2})), strides, {"args->seqused_k has stride 2, wanted 1"}},
      {varlen, WITH(s.cu_q.reshape({3}, {-1})), strides, {"args->cu_seqlens_q has stride -1", "contiguous"}},
  });
}

TEST_CASE("bind: all device operands are on one device", "[operands]") {
  const auto s = batched();
  s->backend = &cuda;
  for (box* b : s->boxes()) b->t.device_type = CQSA_DEVICE_CUDA, b->t.device_id = 1;
  good_leaf(*s);
  s->v.t.device_id = 0;
  cqsa_attention_leaf leaf{};
  check_fails(s->bind(leaf), CQSA_ERROR_DEVICE, {"args->v is on device 0, but args->k is on device 1"});
  s->v.t.device_id = 1;
  s->p.memory_q = CQSA_MEMORY_HOST;
  check_fails(s->bind(leaf), CQSA_ERROR_DEVICE,
              {"args->q", "CQSA_MEMORY_DEVICE", "params->memory_q is CQSA_MEMORY_HOST (0)"});
}

TEST_CASE("bind: values of the index arrays", "[operands]") {
  const auto index = CQSA_ERROR_INDEX;
  check_bind_table({
      {varlen, WITH(s.cu_q.fill<int32_t>({1, 3, 8})), index, {"args->cu_seqlens_q[0] is 1, wanted 0"}},
      {varlen,
       WITH(s.cu_q.fill<int32_t>({0, 5, 3})),
       index,
       {"args->cu_seqlens_q[2] = 3 is less than the entry before it, 5"}},
      {varlen, WITH(s.cu_k.fill<int32_t>({0, 6, 12})), index, {"args->cu_seqlens_k[2] = 12", "total_k = 11"}},
      {varlen, WITH(s.cu_q.fill<int32_t>({0, 6, 8})), index, {"args->cu_seqlens_q", "length 6", "params->seqlen_q, 5"}},
      {varlen, WITH(s.cu_k.fill<int32_t>({0, 0, 7})), index, {"args->cu_seqlens_k", "length 7", "params->seqlen_k, 6"}},
      {full, WITH(s.used.fill<int64_t>({7, 8})), index, {"args->seqused_k[1] is 8, wanted 0 to 7"}},
      {full, WITH(s.used.fill<int64_t>({-1, 7})), index, {"args->seqused_k[0] is -1"}},
      {paged, WITH(s.used.fill<int64_t>({13, 8})), index, {"args->seqused_k[0] is 13, wanted 0 to 12"}},
      {paged, WITH(s.pages.fill<int32_t>({3, 10, 1})), index, {"args->page_table[0][1] is 10, wanted -1 to 9"}},
      {paged, WITH(s.pages.fill<int32_t>({3, 9, 1, -2})), index, {"args->page_table[1][0] is -2"}},
      {paged, WITH(s.used.fill<int64_t>({12, 9})), index, {"args->page_table[1][2] is 77"}},
      {paged,
       WITH(s.pages.reshape({2, 2})),
       CQSA_ERROR_SHAPE,
       {"args->page_table has 2 pages per sequence of 4 keys", "sequence 0 may have 12 keys", "3 pages"}},
  });
  // seqused_k of a segment.
  const auto s = varlen();
  s->args.seqused_k = &s->used.t;
  s->used.fill<int64_t>({6, 0});
  good_leaf(*s);
  s->used.fill<int64_t>({6, 1});
  cqsa_attention_leaf leaf{};
  check_fails(s->bind(leaf), index, {"args->seqused_k[1] is 1, wanted 0 to 0"});
}

TEST_CASE("bind: index arrays on a device are not read", "[operands]") {
  const auto s = varlen();
  s->backend = &cuda;
  for (box* b : s->boxes()) b->t.device_type = CQSA_DEVICE_CUDA;
  s->cu_q.t.data = s->cu_k.t.data = reinterpret_cast<void*>(uintptr_t{4096});
  const cqsa_attention_leaf leaf = good_leaf(*s);
  CHECK(s->p.seqlen_q == 9);  // no better bound than the rows
  CHECK(s->p.seqlen_k == 11);
  CHECK(leaf.cu_seqlens_q == reinterpret_cast<void*>(uintptr_t{4096}));
  const auto t = paged();
  t->backend = &cuda;
  for (box* b : t->boxes()) b->t.device_type = CQSA_DEVICE_CUDA;
  t->pages.t.data = t->used.t.data = reinterpret_cast<void*>(uintptr_t{4096});
  good_leaf(*t);
  CHECK(t->p.seqlen_k == 12);
  t->p.seqlen_k = 13;
  cqsa_attention_leaf other{};
  check_fails(t->bind(other), CQSA_ERROR_SHAPE, {"args->page_table has 3 pages", "13 keys", "4 pages"});
}

TEST_CASE("bind: outputs overlap nothing", "[operands]") {
  const auto overlap = CQSA_ERROR_OVERLAP;
  check_bind_table({
      {batched, WITH(s.out.t.data = s.q.t.data), overlap, {"args->out overlaps args->q", "bytes 0x"}},
      {batched, WITH(s.out.t.data = s.k.bytes.data() + 40), overlap, {"args->out overlaps args->k"}},
      {batched, WITH(s.v.t.data = s.out.bytes.data(), s.v.t.byte_offset = 956), overlap, {"args->out overlaps args->v"}},
      {full, WITH(s.lse.t.data = s.out.t.data), overlap, {"args->lse overlaps args->out"}},
      {full, WITH(s.lse.t.data = s.mask.t.data), overlap, {"args->lse overlaps args->mask"}},
      {full, WITH(s.sinks.t.data = s.out.t.data), overlap, {"args->out overlaps args->sinks"}},
      {full, WITH(s.slopes.t.data = s.lse.t.data), overlap, {"args->lse overlaps args->alibi_slopes"}},
      {full,
       WITH(s.used.t.data = s.lse.t.data, s.lse.fill<int64_t>({7, 0})),
       overlap,
       {"args->lse overlaps args->seqused_k"}},
      {fp8, WITH(s.v_scale.t.data = s.out.t.data), overlap, {"args->out overlaps args->v_scale"}},
  });
}

TEST_CASE("views: batched", "[operands]") {
  const auto s = full();
  s->mask.reshape({1, 4, 1, 7});
  s->mask.t.dtype = CQSA_DTYPE_U8;
  s->bias.reshape({2, 4, 5, 7}, {0, -35, 7, 1});
  s->bias.t.byte_offset = 3 * 35 * 2;
  s->slopes.reshape({2, 4});
  s->q.reshape({2, 4, 5, 8}, {160, 8, 32, 1});  // [batch, seq, heads, dim]
  s->q.t.byte_offset = 3;                       // any alignment
  const cqsa_attention_leaf leaf = good_leaf(*s);
  CHECK(s->p.mask_broadcast == (CQSA_BROADCAST_BATCH | CQSA_BROADCAST_QUERY));
  CHECK(s->p.bias_broadcast == CQSA_BROADCAST_BATCH);
  CHECK(stride_of(leaf.q) == sizes{160, 8, 32, 1});
  CHECK(leaf.q.data == s->q.bytes.data() + 3);
  CHECK(stride_of(leaf.k) == sizes{112, 56, 8, 1});
  CHECK(stride_of(leaf.v) == sizes{84, 42, 6, 1});
  CHECK(stride_of(leaf.out) == sizes{120, 30, 6, 1});
  CHECK(stride_of(leaf.lse) == sizes{20, 5, 1, 0});
  CHECK(stride_of(leaf.mask) == sizes{0, 7, 0, 1});
  CHECK(leaf.mask.dtype == CQSA_DTYPE_U8);
  CHECK(stride_of(leaf.bias) == sizes{0, -35, 7, 1});
  CHECK(leaf.bias.data == s->bias.bytes.data() + 210);
  CHECK(stride_of(leaf.slopes) == sizes{4, 1, 0, 0});
  CHECK(stride_of(leaf.sinks) == sizes{0, 1, 0, 0});
  CHECK(leaf.k_scale.data == nullptr);
  CHECK(leaf.seqused_k == s->used.t.data);
  CHECK(leaf.seqused_dtype == CQSA_DTYPE_I64);
  CHECK(leaf.cu_seqlens_q == nullptr);
  CHECK(leaf.page_table == nullptr);
  CHECK(leaf.struct_size == sizeof leaf);
  CHECK((leaf.batch == 2 && leaf.num_heads == 4 && leaf.num_kv_heads == 2 && leaf.head_dim == 8 && leaf.head_dim_v == 6));
  CHECK((leaf.seqlen_q == 5 && leaf.seqlen_k == 7 && leaf.window_left == -1 && leaf.window_right == -1));
  CHECK(leaf.softmax_scale == 1 / std::sqrt(8.0));
  s->slopes.reshape({4});
  CHECK(stride_of(good_leaf(*s).slopes) == sizes{0, 1, 0, 0});
}

TEST_CASE("views: varlen and paged", "[operands]") {
  const auto s = varlen();
  s->args.mask = &s->mask.t;
  s->mask.reshape({1, 1, 5, 6});
  cqsa_attention_leaf leaf = good_leaf(*s);
  CHECK((s->p.batch == 2 && s->p.total_q == 9 && s->p.total_k == 11 && s->p.seqlen_q == 5 && s->p.seqlen_k == 6));
  CHECK(stride_of(leaf.q) == sizes{0, 8, 32, 1});
  CHECK(stride_of(leaf.k) == sizes{0, 8, 16, 1});
  CHECK(stride_of(leaf.v) == sizes{0, 6, 12, 1});
  CHECK(stride_of(leaf.out) == sizes{0, 6, 24, 1});
  CHECK(stride_of(leaf.lse) == sizes{0, 9, 1, 0});
  CHECK(stride_of(leaf.mask) == sizes{0, 0, 6, 1});
  CHECK((leaf.cu_seqlens_q == s->cu_q.t.data && leaf.cu_seqlens_k == s->cu_k.t.data && leaf.index_dtype == CQSA_DTYPE_I32));
  s->mask.reshape({1, 1, 8, 16});  // padded past the longest segment: as good a bound
  leaf = good_leaf(*s);
  CHECK((leaf.seqlen_q == 8 && leaf.seqlen_k == 16));

  const auto t = paged();
  t->pages.reshape({2, 3}, {1, 2});
  t->pages.fill<int32_t>({3, -1, 9, 0, 1, 77});
  leaf = good_leaf(*t);
  CHECK((t->p.page_size == 4 && t->p.num_pages == 10 && t->p.seqlen_k == 12 && t->p.total_k == 0));
  CHECK(stride_of(leaf.k) == sizes{64, 8, 16, 1});
  CHECK(stride_of(leaf.v) == sizes{48, 6, 12, 1});
  CHECK((leaf.page_table == t->pages.t.data && leaf.page_table_stride[0] == 1 && leaf.page_table_stride[1] == 2));
  CHECK(leaf.page_size == 4);
  t->used.fill<int64_t>({5, 2});
  CHECK(good_leaf(*t).seqlen_k == 5);
  t->args.seqused_k = nullptr;
  t->pages.fill<int32_t>({3, -1, 9, 0, 1, 7});
  CHECK(good_leaf(*t).seqlen_k == 12);

  t->q.reshape({9, 4, 8});  // varlen queries over paged keys
  t->out.reshape({9, 4, 6});
  t->cu_q.fill<int32_t>({0, 9, 9});
  t->args.cu_seqlens_q = &t->cu_q.t;
  leaf = good_leaf(*t);
  CHECK((leaf.seqlen_q == 9 && leaf.cu_seqlens_k == nullptr && leaf.page_table != nullptr));
}

TEST_CASE("views: scales", "[operands]") {
  const auto s = fp8();
  cqsa_attention_leaf leaf = good_leaf(*s);
  CHECK((leaf.scale_k == CQSA_SCALE_TOKEN && leaf.scale_v == CQSA_SCALE_TOKEN));
  CHECK(stride_of(leaf.k_scale) == sizes{14, 7, 1, 0});
  s->k_scale.reshape({});
  s->v_scale.reshape({2});
  leaf = good_leaf(*s);
  CHECK((leaf.scale_k == CQSA_SCALE_TENSOR && leaf.scale_v == CQSA_SCALE_HEAD));
  CHECK(stride_of(leaf.k_scale) == sizes{0, 0, 0, 0});
  CHECK(stride_of(leaf.v_scale) == sizes{0, 1, 0, 0});
  s->k_scale.reshape({1, 1});
  s->args.v_scale = nullptr;
  leaf = good_leaf(*s);
  CHECK((leaf.scale_k == CQSA_SCALE_TENSOR && leaf.scale_v == CQSA_SCALE_NONE && leaf.v_scale.data == nullptr));
  s->args.page_table = &s->pages.t;
  s->k.reshape({10, 4, 2, 8});
  s->v.reshape({10, 4, 2, 6});
  s->k_scale.reshape({10, 4, 2});
  CHECK(stride_of(good_leaf(*s).k_scale) == sizes{8, 1, 2, 0});

  const auto t = i8();
  leaf = good_leaf(*t);
  CHECK((leaf.kv_group == 32 && leaf.scale_k == CQSA_SCALE_GROUP));
  CHECK(stride_of(leaf.k_scale) == sizes{56, 28, 4, 1});
  CHECK(stride_of(leaf.v_scale) == sizes{14, 7, 1, 1});
  t->p.kv_group = 0;
  t->k_scale.reshape({2, 2, 7, 2});
  CHECK(good_leaf(*t).kv_group == 64);
  t->p.kv_group = 0;
  t->k_scale.reshape({2, 2, 7, 1});
  CHECK(good_leaf(*t).kv_group == 128);
}

TEST_CASE("views: empty problems bind, and an empty operand is not an absent one", "[operands]") {
  const auto s = full();
  s->k.reshape({2, 2, 0, 8});
  s->v.reshape({2, 2, 0, 6});
  s->mask.reshape({1, 1, 1, 0});
  s->bias.reshape({1, 1, 1, 1});
  s->used.fill<int64_t>({0, 0});
  s->k.t.data = s->v.t.data = s->mask.t.data = nullptr;
  const cqsa_attention_leaf leaf = good_leaf(*s);
  CHECK((leaf.k.data != nullptr && leaf.v.data != nullptr && leaf.mask.data != nullptr));
  CHECK(leaf.seqlen_k == 0);
  const auto t = batched();
  for (box* b : {&t->q, &t->k, &t->v, &t->out}) {
    b->shape[0] = 0;
    b->t.data = nullptr;
  }
  CHECK(good_leaf(*t).batch == 0);
}

TEST_CASE("a packed qkv buffer with its output in the fourth slot", "[operands]") {
  std::vector<float> buffer(2 * 5 * 4 * 4 * 8);  // [batch, seq, slot, head, dim]
  const auto s = batched();
  const sizes strides{5 * 128, 8, 128, 1};
  s->q.reshape({2, 4, 5, 8}, strides);
  s->k.reshape({2, 4, 5, 8}, strides);
  s->v.reshape({2, 4, 5, 8}, strides);
  s->out.reshape({2, 4, 5, 8}, strides);
  uint64_t slot = 0;
  for (box* b : {&s->q, &s->k, &s->v, &s->out}) {
    b->t.data = buffer.data();
    b->t.byte_offset = slot++ * 32 * sizeof(float);
  }
  const cqsa_attention_leaf leaf = good_leaf(*s);
  CHECK(leaf.out.data == buffer.data() + 96);
  s->out.t.byte_offset -= 4;
  cqsa_attention_leaf other{};
  check_fails(s->bind(other), CQSA_ERROR_OVERLAP, {"args->out overlaps args->v"});
}

TEST_CASE("params_of: refusals", "[operands]") {
  const auto shape = CQSA_ERROR_SHAPE, null = CQSA_ERROR_NULL_POINTER;
  check_derive_table({
      {batched, WITH(s.args.q = nullptr), null, {"args->q is NULL"}},
      {batched, WITH(s.args.k = nullptr), null, {"args->k is NULL"}},
      {batched, WITH(s.args.v = nullptr), null, {"args->v is NULL"}},
      {batched, WITH(s.args.out = nullptr), null, {"args->out is NULL"}},
      {batched,
       WITH(s.q.reshape({4, 5, 8})),
       shape,
       {"args->q has shape [4, 5, 8], wanted 4 axes (batch, num_heads, seqlen_q, head_dim)"}},
      {varlen, WITH(s.k.reshape({2, 2, 7, 8})), shape, {"args->k", "wanted 3 axes (total_k, num_kv_heads, head_dim)"}},
      {paged, WITH(s.v.reshape({40, 2, 6})), shape, {"args->v", "wanted 4 axes (num_pages, page_size"}},
      {full, WITH(s.mask.reshape({5, 7})), shape, {"args->mask has shape [5, 7], wanted 4 axes"}},
      {varlen, WITH(s.args.cu_seqlens_k = nullptr), null, {"args->cu_seqlens_k is NULL"}},
      {batched, WITH(s.args.cu_seqlens_k = &s.cu_k.t), invalid, {"args->cu_seqlens_k is given", "CQSA_ATTENTION_VARLEN"}},
      {varlen, WITH(s.cu_q.reshape({0})), shape, {"args->cu_seqlens_q has shape [0]"}},
      {varlen, WITH(s.cu_q.t.dtype = CQSA_DTYPE_F32), CQSA_ERROR_DTYPE, {"args->cu_seqlens_q has dtype f32"}},
      {varlen, WITH(s.cu_q.fill<int32_t>({0, 9, 7})), CQSA_ERROR_INDEX, {"args->cu_seqlens_q[2] = 7", "9"}},
      {varlen, WITH(s.cu_k.reshape({3}, {2})), CQSA_ERROR_STRIDES, {"args->cu_seqlens_k has stride 2"}},
      {paged, WITH(s.pages.reshape({6})), shape, {"args->page_table has 1 axes, wanted 2"}},
      {batched, WITH(s.q.t.device_type = CQSA_DEVICE_EXT), CQSA_ERROR_DEVICE, {"args->q", "12 (ext)", "cpu"}},
      {batched, WITH(s.backend = &cuda, s.out.t.device_type = CQSA_DEVICE_ROCM), CQSA_ERROR_DEVICE, {"args->out", "rocm"}},
      {i8,
       WITH(s.k_scale.reshape({2, 2, 7, 5})),
       shape,
       {"5 and 1 groups", "head_dim 100", "head_dim_v 6", "params->kv_group"}},
  });
}

TEST_CASE("params_of: takes what the tensors say and leaves the rest", "[operands]") {
  const auto s = full();
  s->p.flags = CQSA_ATTENTION_WINDOW | CQSA_ATTENTION_BATCH_INVARIANT | CQSA_ATTENTION_VARLEN;
  s->p.total_q = 99;
  s->p.page_size = 16;
  s->p.causal = CQSA_CAUSAL_TOP_LEFT;
  s->p.softcap = 30;
  s->p.max_host_bytes = 1 << 20;
  s->p.tile_q = 64;
  REQUIRE(s->derive() == CQSA_OK);
  const params& p = s->p;
  CHECK(p.flags == (CQSA_ATTENTION_WINDOW | CQSA_ATTENTION_BATCH_INVARIANT | CQSA_ATTENTION_SEQUSED_K | CQSA_ATTENTION_MASK |
                    CQSA_ATTENTION_BIAS | CQSA_ATTENTION_ALIBI | CQSA_ATTENTION_SINKS | CQSA_ATTENTION_LSE));
  CHECK((p.batch == 2 && p.num_heads == 4 && p.num_kv_heads == 2 && p.head_dim == 8 && p.head_dim_v == 6));
  CHECK((p.seqlen_q == 5 && p.seqlen_k == 7 && p.total_q == 0 && p.page_size == 0));
  CHECK((p.dtype_q == CQSA_DTYPE_F32 && p.dtype_kv == CQSA_DTYPE_F32 && p.dtype_out == CQSA_DTYPE_F32));
  CHECK(p.dtype_bias == CQSA_DTYPE_F16);
  CHECK((p.causal == CQSA_CAUSAL_TOP_LEFT && p.softcap == 30 && p.max_host_bytes == 1 << 20 && p.tile_q == 64));
  CHECK((p.mask_broadcast == 0 && p.bias_broadcast == 0));

  const auto t = batched();
  t->backend = &cuda;
  t->q.t.device_type = CQSA_DEVICE_CUDA_HOST;
  t->k.t.device_type = t->v.t.device_type = CQSA_DEVICE_CUDA;
  t->out.t.device_type = CQSA_DEVICE_ROCM_HOST;
  good_leaf(*t);
  CHECK(
      (t->p.memory_q == CQSA_MEMORY_PINNED && t->p.memory_kv == CQSA_MEMORY_DEVICE && t->p.memory_out == CQSA_MEMORY_HOST));
  t->p.memory_q = CQSA_MEMORY_HOST;  // pinned memory is host memory too
  cqsa_attention_leaf leaf{};
  CHECK(t->bind(leaf) == CQSA_OK);
  t->backend = &cpu;
  t->k.t.device_type = t->v.t.device_type = CQSA_DEVICE_CPU;
  good_leaf(*t);
  CHECK((t->p.memory_q == CQSA_MEMORY_HOST && t->p.memory_kv == CQSA_MEMORY_HOST));
}

TEST_CASE("shape_of_leaf agrees with the leaf of compact tensors", "[operands]") {
  for (const auto make : {batched, full, varlen, paged, fp8, i8}) {
    const auto s = make();
    const cqsa_attention_leaf bound = good_leaf(*s);
    attention_problem problem;
    REQUIRE(make_problem(&s->p, problem) == CQSA_OK);
    const cqsa_attention_leaf shape = shape_of_leaf(problem);
    for (const auto view :
         {&cqsa_attention_leaf::q, &cqsa_attention_leaf::k, &cqsa_attention_leaf::v, &cqsa_attention_leaf::k_scale,
          &cqsa_attention_leaf::v_scale, &cqsa_attention_leaf::mask, &cqsa_attention_leaf::bias,
          &cqsa_attention_leaf::slopes, &cqsa_attention_leaf::sinks, &cqsa_attention_leaf::out, &cqsa_attention_leaf::lse}) {
      CHECK(((shape.*view).data == nullptr) == ((bound.*view).data == nullptr));
      CHECK((shape.*view).dtype == (bound.*view).dtype);
      CHECK(stride_of(shape.*view) == stride_of(bound.*view));
    }
    CHECK((shape.cu_seqlens_q == nullptr) == (bound.cu_seqlens_q == nullptr));
    CHECK((shape.cu_seqlens_k == nullptr) == (bound.cu_seqlens_k == nullptr));
    CHECK((shape.seqused_k == nullptr) == (bound.seqused_k == nullptr));
    CHECK((shape.page_table == nullptr) == (bound.page_table == nullptr));
    CHECK((shape.page_table_stride[0] == bound.page_table_stride[0] &&
           shape.page_table_stride[1] == bound.page_table_stride[1]));
    CHECK((shape.seqlen_k == bound.seqlen_k && shape.kv_group == bound.kv_group && shape.page_size == bound.page_size));
  }
  const auto s = batched();
  REQUIRE(s->derive() == CQSA_OK);
  s->p.flags = CQSA_ATTENTION_MASK;
  s->p.mask_broadcast = CQSA_BROADCAST_HEAD | CQSA_BROADCAST_KEY;
  attention_problem problem;
  REQUIRE(make_problem(&s->p, problem) == CQSA_OK);
  CHECK(stride_of(shape_of_leaf(problem).mask) == sizes{5, 0, 1, 0});
}

TEST_CASE("cost of binding", "[.cost]") {
  const auto s = batched();
  attention_problem problem;
  cqsa_attention_leaf leaf{};
  REQUIRE(s->derive() == CQSA_OK);
  REQUIRE(make_problem(&s->p, problem) == CQSA_OK);
  const int rounds = 1000000;
  const auto time = [&](const char* what, const auto& body) {
    const auto start = std::chrono::steady_clock::now();
    bool good = true;
    for (int i = 0; i < rounds; ++i) good = good && body() == CQSA_OK;
    CHECK(good);
    WARN(what << ": " << std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / rounds * 1e9
              << " ns");
  };
  time("params_of", [&] { return s->derive(); });
  time("make_problem", [&] { return make_problem(&s->p, problem); });
  time("bind_operands", [&] { return bind_operands(problem, cpu, s->args, leaf); });
}
