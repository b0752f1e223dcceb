// SPDX-License-Identifier: Apache-2.0
// src/ops/attention/problem.cpp: every refusal of params with its status and the numbers in its sentence, and what is filled
// in.
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "check_fails.h"
#include "ops/attention/problem.h"

namespace {

using namespace cqsa;
using params = cqsa_attention_params;

constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

params batched_params() {
  params p = CQSA_ATTENTION_PARAMS_INIT;
  p.batch = 2;
  p.num_heads = 4;
  p.num_kv_heads = 2;
  p.head_dim = 8;
  p.head_dim_v = 6;
  p.seqlen_q = 5;
  p.seqlen_k = 7;
  p.dtype_q = p.dtype_kv = CQSA_DTYPE_F32;
  return p;
}

params varlen_params() {
  params p = batched_params();
  p.flags = CQSA_ATTENTION_VARLEN;
  p.total_q = 9;
  p.total_k = 11;
  return p;
}

params paged_params() {
  params p = batched_params();
  p.flags = CQSA_ATTENTION_PAGED;
  p.page_size = 3;
  p.num_pages = 10;
  return p;
}

params i8_params() {
  params p = batched_params();
  p.dtype_kv = CQSA_DTYPE_I8;
  p.scale_k = p.scale_v = CQSA_SCALE_GROUP;
  p.kv_group = 32;
  return p;
}

params cqs_params() {
  params p = batched_params();
  p.seqlen_q = 7;
  p.schedule = CQSA_SCHEDULE_CQS;
  return p;
}

#define WITH(...) [](params& p) { __VA_ARGS__; }

struct bad_params {
  params (*base)();
  std::function<void(params&)> spoil;
  cqsa_status status;
  parts message;
};

void check_table(const std::vector<bad_params>& rows) {
  for (const bad_params& row : rows) {
    params p = row.base();
    attention_problem problem;
    problem.p.batch = 12345;
    REQUIRE(make_problem(&p, problem) == CQSA_OK);
    problem.p.batch = 12345;
    row.spoil(p);
    check_fails(make_problem(&p, problem), row.status, row.message);
    CHECK(problem.p.batch == 12345);  // untouched
  }
}

constexpr auto invalid = CQSA_ERROR_INVALID_ARGUMENT;
constexpr auto unknown = CQSA_ERROR_UNKNOWN_FLAG;
constexpr auto base = batched_params;

}  // namespace

TEST_CASE("params: struct and flags", "[problem]") {
  attention_problem problem;
  check_fails(make_problem(nullptr, problem), CQSA_ERROR_NULL_POINTER, {"params is NULL"});
  check_table({
      {base, WITH(p.struct_size = 8), CQSA_ERROR_STRUCT_SIZE, {"params->struct_size is 8"}},
      {base, WITH(p.struct_size -= 1), CQSA_ERROR_STRUCT_SIZE, {"params->struct_size"}},
      {base, WITH(p.flags = 1u << 11), unknown, {"params->flags", "0x800"}},
      {base, WITH(p.flags = 1u << 31 | 1), unknown, {"0x80000000"}},
      {base, WITH(p.precision = 4), CQSA_ERROR_UNKNOWN_FLAG, {"params->precision is 4"}},
  });
  struct {
    params p = batched_params();
    int64_t newer[2] = {0, 0};
  } large;
  large.p.struct_size = sizeof large;
  CHECK(make_problem(&large.p, problem) == CQSA_OK);
  large.newer[1] = 1;
  check_fails(make_problem(&large.p, problem), CQSA_ERROR_STRUCT_SIZE, {"params"});
}

TEST_CASE("params: sizes", "[problem]") {
  check_table({
      {base, WITH(p.batch = -1), invalid, {"params->batch is -1, wanted at least 0"}},
      {base, WITH(p.num_heads = 0), invalid, {"params->num_heads is 0, wanted at least 1"}},
      {base, WITH(p.num_kv_heads = 0), invalid, {"params->num_kv_heads is 0"}},
      {base, WITH(p.num_kv_heads = -2), invalid, {"params->num_kv_heads is -2"}},
      {base, WITH(p.num_heads = 33), invalid, {"params->num_heads is 33", "params->num_kv_heads", "2"}},
      {base, WITH(p.num_kv_heads = 8), invalid, {"params->num_heads is 4", "is 8"}},
      {base, WITH(p.head_dim = 0), invalid, {"params->head_dim is 0, wanted 1 to 576"}},
      {base, WITH(p.head_dim = 577), invalid, {"577", "1 to 576"}},
      {base, WITH(p.head_dim_v = 0), invalid, {"params->head_dim_v is 0"}},
      {base, WITH(p.head_dim_v = 513), invalid, {"params->head_dim_v is 513, wanted 1 to 512"}},
      {base, WITH(p.seqlen_q = -5), invalid, {"params->seqlen_q is -5"}},
      {base, WITH(p.seqlen_k = -1), invalid, {"params->seqlen_k is -1"}},
      {base, WITH(p.total_q = 3), invalid, {"params->total_q is 3", "CQSA_ATTENTION_VARLEN"}},
      {base, WITH(p.total_k = 4), invalid, {"params->total_k is 4", "CQSA_ATTENTION_VARLEN"}},
      {base, WITH(p.page_size = 16), invalid, {"params->page_size is 16", "CQSA_ATTENTION_PAGED"}},
      {base, WITH(p.num_pages = 16), invalid, {"params->num_pages is 16", "CQSA_ATTENTION_PAGED"}},
      {varlen_params, WITH(p.total_q = -1), invalid, {"params->total_q is -1"}},
      {varlen_params, WITH(p.total_k = -1), invalid, {"params->total_k is -1"}},
      {paged_params, WITH(p.page_size = 0), invalid, {"params->page_size is 0, wanted at least 1"}},
      {paged_params, WITH(p.num_pages = -1), invalid, {"params->num_pages is -1"}},
      {paged_params,
       WITH(p.flags |= CQSA_ATTENTION_VARLEN, p.total_k = 9),
       invalid,
       {"params->total_k is 9", "CQSA_ATTENTION_PAGED"}},
      {base, WITH(p.batch = p.seqlen_q = int64_t{1} << 31), CQSA_ERROR_SHAPE, {"2147483648 * 2147483648", "overflow"}},
      {base, WITH(p.batch = 0, p.seqlen_k = INT64_MAX), CQSA_ERROR_SHAPE, {"9223372036854775807", "seqlen_k"}},
      {base, WITH(p.num_heads = int64_t{1} << 61), CQSA_ERROR_SHAPE, {"2305843009213693952"}},
      {base, WITH(p.batch = INT64_MAX, p.seqlen_q = p.seqlen_k = 0), CQSA_ERROR_SHAPE, {"batch"}},
      {varlen_params, WITH(p.total_k = INT64_MAX / 8), CQSA_ERROR_SHAPE, {"total_k", "1152921504606846975"}},
      {varlen_params, WITH(p.seqlen_q = INT64_MAX), CQSA_ERROR_SHAPE, {"seqlen_q"}},
      {paged_params, WITH(p.num_pages = p.page_size = int64_t{1} << 32), CQSA_ERROR_SHAPE, {"num_pages", "page_size"}},
  });
}

TEST_CASE("params: element types and scales", "[problem]") {
  const auto dtype = CQSA_ERROR_DTYPE;
  check_table({
      {base, WITH(p.dtype_q = 0), dtype, {"params->dtype_q is not given", "f32, f16, bf16 or f64"}},
      {base, WITH(p.dtype_q = CQSA_DTYPE_I32), dtype, {"params->dtype_q is i32"}},
      {base, WITH(p.dtype_q = CQSA_DTYPE_E5M2), dtype, {"params->dtype_q is e5m2"}},
      {base, WITH(p.dtype_q = 77), unknown, {"params->dtype_q is 0x0000004d"}},
      {base, WITH(p.dtype_kv = 0), dtype, {"params->dtype_kv is not given", "f32"}},
      {base, WITH(p.dtype_kv = CQSA_DTYPE_F16), dtype, {"params->dtype_kv is f16", "params->dtype_q is f32"}},
      {base, WITH(p.dtype_kv = CQSA_DTYPE_U8), dtype, {"params->dtype_kv is u8"}},
      {base, WITH(p.dtype_q = CQSA_DTYPE_F64), dtype, {"params->dtype_kv is f32", "f64"}},
      {base, WITH(p.dtype_q = CQSA_DTYPE_F64, p.dtype_kv = CQSA_DTYPE_E4M3FN), dtype, {"e4m3fn", "params->dtype_q is f64"}},
      {base,
       WITH(p.dtype_q = p.dtype_kv = CQSA_DTYPE_F64, p.dtype_out = CQSA_DTYPE_F32),
       dtype,
       {"params->dtype_out is f32, wanted f64"}},
      {base, WITH(p.dtype_out = CQSA_DTYPE_F64), dtype, {"params->dtype_out is f64", "params->dtype_q is f32"}},
      {base, WITH(p.dtype_out = CQSA_DTYPE_I8), dtype, {"params->dtype_out is i8"}},
      {base, WITH(p.dtype_bias = CQSA_DTYPE_F32), invalid, {"params->dtype_bias is f32", "CQSA_ATTENTION_BIAS"}},
      {base, WITH(p.flags = CQSA_ATTENTION_BIAS), dtype, {"params->dtype_bias is not given"}},
      {base, WITH(p.flags = CQSA_ATTENTION_BIAS, p.dtype_bias = CQSA_DTYPE_F64), dtype, {"params->dtype_bias is f64"}},
      {base, WITH(p.scale_k = CQSA_SCALE_TENSOR), invalid, {"params->scale_k is 1", "params->dtype_kv is f32"}},
      {base, WITH(p.scale_v = CQSA_SCALE_GROUP), invalid, {"params->scale_v is 4", "CQSA_SCALE_NONE"}},
      {base, WITH(p.scale_v = 5), unknown, {"params->scale_v is 5", "CQSA_SCALE"}},
      {base, WITH(p.scale_k = -1), unknown, {"params->scale_k is -1"}},
      {base, WITH(p.kv_group = 32), invalid, {"params->kv_group is 32, wanted 0", "CQSA_DTYPE_I8"}},
      {base, WITH(p.dtype_kv = CQSA_DTYPE_E5M2, p.scale_k = CQSA_SCALE_GROUP), invalid, {"params->scale_k is 4", "e5m2"}},
      {i8_params, WITH(p.scale_k = CQSA_SCALE_NONE), invalid, {"params->scale_k is 0", "CQSA_SCALE_GROUP", "i8"}},
      {i8_params, WITH(p.scale_v = CQSA_SCALE_TOKEN), invalid, {"params->scale_v is 3", "CQSA_SCALE_GROUP"}},
      {i8_params, WITH(p.kv_group = 0), invalid, {"params->kv_group is 0, wanted 32, 64 or 128"}},
      {i8_params, WITH(p.kv_group = 96), invalid, {"params->kv_group is 96"}},
  });
}

TEST_CASE("params: rules, places, schedule", "[problem]") {
  check_table({
      {base, WITH(p.memory_q = CQSA_MEMORY_TILE), invalid, {"params->memory_q", "CQSA_MEMORY_TILE (3)"}},
      {base, WITH(p.memory_kv = 5), unknown, {"params->memory_kv is 5"}},
      {base, WITH(p.memory_out = -1), unknown, {"params->memory_out is -1"}},
      {base, WITH(p.causal = 3), unknown, {"params->causal is 3", "CQSA_CAUSAL"}},
      {base, WITH(p.window_left = 128), invalid, {"params->window_left is 128", "CQSA_ATTENTION_WINDOW"}},
      {base, WITH(p.window_right = -2), invalid, {"params->window_right is -2"}},
      {base,
       WITH(p.flags = CQSA_ATTENTION_WINDOW, p.window_left = -2),
       invalid,
       {"params->window_left is -2, wanted at least -1"}},
      {base, WITH(p.flags = CQSA_ATTENTION_WINDOW, p.window_right = -9), invalid, {"params->window_right is -9"}},
      {base, WITH(p.softmax_scale = not_a_number), invalid, {"params->softmax_scale is nan"}},
      {base, WITH(p.softmax_scale = -infinity), invalid, {"params->softmax_scale is -inf"}},
      {base, WITH(p.softcap = -1), invalid, {"params->softcap is -1"}},
      {base, WITH(p.softcap = not_a_number), invalid, {"params->softcap is nan"}},
      {base, WITH(p.softcap = infinity), invalid, {"params->softcap is inf"}},
      {base, WITH(p.dropout = 0.1), CQSA_ERROR_UNSUPPORTED, {"params->dropout is 0.1", "no dropout"}},
      {base, WITH(p.dropout = not_a_number), CQSA_ERROR_UNSUPPORTED, {"params->dropout is nan"}},
      {base, WITH(p.flags = CQSA_ATTENTION_MASK, p.mask_broadcast = 16), unknown, {"params->mask_broadcast", "0x10"}},
      {base, WITH(p.mask_broadcast = 1), invalid, {"params->mask_broadcast is 1", "CQSA_ATTENTION_MASK"}},
      {base, WITH(p.bias_broadcast = 2), invalid, {"params->bias_broadcast is 2", "CQSA_ATTENTION_BIAS"}},
      {base, WITH(p.schedule = 4), unknown, {"params->schedule is 4"}},
      {base, WITH(p.tile_q = -1), invalid, {"params->tile_q is -1"}},
      {base, WITH(p.tile_k = -64), invalid, {"params->tile_k is -64"}},
      {base, WITH(p.cqs_c = 7), invalid, {"params->cqs_c is 7", "CQSA_SCHEDULE_CQS"}},
      {base, WITH(p.schedule = CQSA_SCHEDULE_STREAM, p.cqs_itr = 1), invalid, {"params->cqs_itr is 1", "CQSA_SCHEDULE_CQS"}},
      {cqs_params, WITH(p.cqs_c = 8), invalid, {"params->cqs_c is 8", "133"}},
      {cqs_params, WITH(p.cqs_c = -3), invalid, {"params->cqs_c is -3"}},
      {cqs_params, WITH(p.cqs_itr = 4), invalid, {"params->cqs_itr is 4, wanted 0 to 3"}},
      {cqs_params, WITH(p.cqs_itr = -1), invalid, {"params->cqs_itr is -1"}},
      {cqs_params, WITH(p.seqlen_q = 6), invalid, {"CQSA_SCHEDULE_CQS", "seqlen_q = seqlen_k", "6 and 7"}},
      {cqs_params, WITH(p.flags = CQSA_ATTENTION_VARLEN), CQSA_ERROR_UNSUPPORTED, {"CQSA_ATTENTION_VARLEN"}},
      {cqs_params, WITH(p.flags = CQSA_ATTENTION_PAGED, p.page_size = 1), CQSA_ERROR_UNSUPPORTED, {"CQSA_ATTENTION_PAGED"}},
      {cqs_params, WITH(p.flags = CQSA_ATTENTION_SEQUSED_K), CQSA_ERROR_UNSUPPORTED, {"CQSA_ATTENTION_SEQUSED_K"}},
  });
}

TEST_CASE("params: what is accepted is completed", "[problem]") {
  attention_problem problem;
  params p = batched_params();
  REQUIRE(make_problem(&p, problem) == CQSA_OK);
  CHECK(problem.p.dtype_out == CQSA_DTYPE_F32);
  CHECK(problem.p.softmax_scale == 1 / std::sqrt(8.0));
  CHECK(problem.p.window_left == -1);
  CHECK(problem.p.window_right == -1);
  CHECK(problem.p.struct_size == sizeof p);
  CHECK(problem.ratio() == 2);
  CHECK(problem.q_row_bytes() == 32);
  CHECK(problem.k_row_bytes() == 32);
  CHECK(problem.v_row_bytes() == 24);
  CHECK(problem.out_row_bytes() == 24);
  CHECK(problem.k_scale_row_bytes() == 0);

  p.softmax_scale = -0.5;
  p.window_left = 3;
  p.window_right = INT64_MAX;  // longer than everything: no limit
  p.flags = CQSA_ATTENTION_WINDOW | CQSA_ATTENTION_BATCH_INVARIANT | CQSA_ATTENTION_DETERMINISTIC;
  REQUIRE(make_problem(&p, problem) == CQSA_OK);
  CHECK(problem.p.softmax_scale == -0.5);
  CHECK(problem.p.window_left == 3);
  CHECK(problem.p.window_right == -1);
  CHECK(problem.batch_invariant());
  p.window_left = 11;  // the last length that could hide something is seqlen_q + seqlen_k - 1
  p.window_right = 12;
  REQUIRE(make_problem(&p, problem) == CQSA_OK);
  CHECK(problem.p.window_left == 11);
  CHECK(problem.p.window_right == -1);

  p = i8_params();
  p.head_dim = 33;
  REQUIRE(make_problem(&p, problem) == CQSA_OK);
  CHECK(problem.k_row_bytes() == 33);
  CHECK(problem.k_scale_row_bytes() == 4);
  CHECK(problem.v_scale_row_bytes() == 2);
  p.dtype_kv = CQSA_DTYPE_E4M3FN;
  p.kv_group = 0;
  p.scale_k = CQSA_SCALE_TOKEN;
  p.scale_v = CQSA_SCALE_HEAD;
  REQUIRE(make_problem(&p, problem) == CQSA_OK);
  CHECK(problem.k_scale_row_bytes() == 4);
  CHECK(problem.v_scale_row_bytes() == 0);

  p = varlen_params();
  p.seqlen_q = p.seqlen_k = 0;
  REQUIRE(make_problem(&p, problem) == CQSA_OK);
  CHECK(problem.p.seqlen_q == 9);
  CHECK(problem.p.seqlen_k == 11);
  p = paged_params();
  p.flags |= CQSA_ATTENTION_VARLEN | CQSA_ATTENTION_SEQUSED_K;
  p.total_q = 9;
  REQUIRE(make_problem(&p, problem) == CQSA_OK);
  p = cqs_params();
  for (const int32_t c : {0, 3, 7, 13, 21, 31, 57, 73, 91, 133}) {
    p.cqs_c = c;
    p.cqs_itr = c == 0 ? 0 : 3;
    CHECK(make_problem(&p, problem) == CQSA_OK);
  }
  p = batched_params();
  p.batch = p.seqlen_k = 0;
  REQUIRE(make_problem(&p, problem) == CQSA_OK);
  CHECK(problem.empty());
}

TEST_CASE("copy_args", "[problem]") {
  cqsa_attention_args args = CQSA_ATTENTION_ARGS_INIT, copy{};
  args.cancel = reinterpret_cast<const int32_t*>(uintptr_t{64});
  CHECK(copy_args(&args, copy) == CQSA_OK);
  CHECK(copy.cancel == args.cancel);
  check_fails(copy_args(nullptr, copy), CQSA_ERROR_NULL_POINTER, {"args is NULL"});
  args.flags = 1;
  check_fails(copy_args(&args, copy), CQSA_ERROR_UNKNOWN_FLAG, {"args->flags", "0x1"});
  args.flags = 0;
  args.struct_size = 40;
  check_fails(copy_args(&args, copy), CQSA_ERROR_STRUCT_SIZE, {"args->struct_size is 40"});
}
