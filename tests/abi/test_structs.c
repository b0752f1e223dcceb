/* SPDX-License-Identifier: Apache-2.0
 *
 * The struct_size rule at every public function that takes a struct: a size nobody had, a dirty tail and an unknown flag are
 * refused with the right status; a clean larger struct of a newer caller is not. Linked with the library, as a program is. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cqsa.h"

static int failures;
static cqsa_context *context;
static cqsa_plan *plan;

/* Sizes and a tail that a newer header might have. */
enum { TAIL = 32 };
typedef struct {
  unsigned char bytes[1024 + TAIL];
} big;

/* A call with `memory` as the struct under test; everything else about it is right. */
typedef cqsa_status (*call_fn)(void *memory);

static float data[4];
static int64_t shape[4] = {1, 1, 1, 4}, lse_shape[3] = {1, 1, 1};
static float out_data[4], lse_data[1];
static cqsa_tensor q, out, lse;

static cqsa_attention_params small_params(void) {
  cqsa_attention_params params = CQSA_ATTENTION_PARAMS_INIT;
  params.batch = params.num_heads = params.num_kv_heads = params.seqlen_q = params.seqlen_k = 1;
  params.head_dim = params.head_dim_v = 4;
  params.dtype_q = params.dtype_kv = CQSA_DTYPE_F32;
  return params;
}

static cqsa_attention_args small_args(void) {
  cqsa_attention_args args = CQSA_ATTENTION_ARGS_INIT;
  args.q = args.k = args.v = &q;
  args.out = &out;
  return args;
}

static cqsa_status call_context(void *memory) {
  cqsa_context *made = NULL;
  cqsa_status status = cqsa_context_create(memory, &made);
  cqsa_context_destroy(made);
  return status;
}
static cqsa_status call_backend_info(void *memory) { return cqsa_backend_query("cpu", NULL, memory); }
static cqsa_status call_query(void *memory) { return cqsa_attention_query(context, memory); }
static cqsa_status call_create(void *memory) {
  cqsa_plan *made = NULL;
  cqsa_status status = cqsa_attention_plan_create(context, memory, &made);
  cqsa_plan_destroy(made);
  return status;
}
static cqsa_status call_params(void *memory) {
  cqsa_attention_args args = small_args();
  return cqsa_attention(context, memory, &args, NULL);
}
static cqsa_status call_params_of(void *memory) {
  cqsa_attention_args args = small_args();
  return cqsa_attention_params_of(context, &args, memory);
}
static cqsa_status call_args(void *memory) {
  cqsa_attention_params params = CQSA_ATTENTION_PARAMS_INIT;
  return cqsa_attention(context, &params, memory, NULL);
}
static cqsa_status call_execute(void *memory) { return cqsa_attention_execute(plan, memory, NULL); }
static cqsa_status call_run_info(void *memory) {
  cqsa_attention_params params = CQSA_ATTENTION_PARAMS_INIT;
  cqsa_attention_args args = small_args();
  args.info = memory;
  return cqsa_attention(context, &params, &args, NULL);
}
static cqsa_status call_describe(void *memory) { return cqsa_plan_describe(plan, memory); }
static cqsa_status call_merge(void *memory) { return cqsa_attention_merge(context, memory, NULL); }

/* A query over one cell of a pool of one page. */
static int32_t list[1] = {0}, count[1] = {1};
static int64_t pool_shape[4] = {1, 1, 1, 4}, row_shape[3] = {1, 1, 4}, list_shape[2] = {1, 1};
static cqsa_tensor row, pool, cells, page_table, counts, row_out;

static void make_selected(cqsa_attention_selected_args *args) {
  row = pool = q;
  row.ndim = 3;
  row.shape = row_shape;
  pool.shape = pool_shape;
  row_out = row;
  row_out.data = out_data;
  cells = counts = q;
  cells.dtype = counts.dtype = CQSA_DTYPE_I32;
  cells.data = list;
  cells.ndim = 2;
  cells.shape = list_shape;
  counts.data = count;
  counts.ndim = 1;
  counts.shape = list_shape;
  page_table = counts;
  page_table.data = list;
  args->q = &row;
  args->k = args->v = &pool;
  args->page_table = &page_table;
  args->cells = &cells;
  args->counts = &counts;
  args->out = &row_out;
}
static cqsa_status call_selected(void *memory) { return cqsa_attention_selected(context, memory, NULL); }
static cqsa_status call_selected_workspace(void *memory) {
  uint64_t bytes = 0;
  return cqsa_attention_selected_workspace(context, memory, &bytes);
}
static cqsa_status call_kv_append(void *memory) { return cqsa_kv_append(context, memory, NULL); }
static cqsa_status call_kv_gather(void *memory) { return cqsa_kv_gather(context, memory, NULL); }
static cqsa_tensor matrix_in, matrix_out;
static cqsa_status call_dequantize_rows(void *memory) { return cqsa_dequantize_rows(context, memory, 0, NULL, &matrix_out, NULL); }
static cqsa_status call_quantize_rows(void *memory) { return cqsa_quantize_rows(context, &matrix_in, memory, NULL); }
static cqsa_status call_format(void *memory) { return cqsa_quant_format_query(CQSA_QUANT_Q4_K, memory); }

/* Four numbers to codes and back, a ring, a product of 1 x 4 and 1 x 4. */
static int64_t codes_shape[2] = {1, 4}, product_shape[2] = {1, 1}, one[1] = {1};
static unsigned char codes_data[4], ring_state[256];
static float product_data[1], scale_data[1] = {1}, kept_data[4], row_kept[4];
static cqsa_tensor matrix, codes, matrix_out, product, scale;
static cqsa_fp8_ring ring = CQSA_FP8_RING_INIT;

/* Aligned to 64. */
static void *aligned(unsigned char *memory) { return memory + (64 - (uintptr_t)memory % 64) % 64; }

static void make_fp8(void) {
  matrix = q;
  matrix.ndim = 2;
  matrix.shape = codes_shape;
  codes = matrix_out = matrix;
  codes.data = codes_data;
  codes.dtype = CQSA_DTYPE_E4M3FN;
  matrix_out.data = kept_data;
  product = matrix;
  product.data = product_data;
  product.shape = product_shape;
  scale = product;
  scale.data = scale_data;
  scale.ndim = 1;
  scale.shape = one;
  ring.hist_len = 2;
  ring.format = CQSA_DTYPE_E4M3FN;
  ring.state = aligned(ring_state);
  ring.bytes = sizeof ring_state - 64;
}
static cqsa_status call_ring_bytes(void *memory) {
  uint64_t bytes = 0;
  return cqsa_fp8_ring_bytes(memory, &bytes);
}
static cqsa_status call_ring_init(void *memory) { return cqsa_fp8_ring_init(context, memory, 0.0f, NULL); }
static cqsa_status call_ring_fold(void *memory) { return cqsa_fp8_ring_fold(context, memory, 1, NULL, NULL); }
static cqsa_status call_ring_staged(void *memory) { return cqsa_fp8_ring_staged(context, memory, 1, &scale, NULL); }
static cqsa_status call_ring_read(void *memory) {
  cqsa_fp8_ring_info info = CQSA_FP8_RING_INFO_INIT;
  return cqsa_fp8_ring_read(context, memory, &info, NULL, NULL);
}
static cqsa_status call_ring_info(void *memory) { return cqsa_fp8_ring_read(context, &ring, memory, NULL, NULL); }
static cqsa_status call_quantize_ring(void *memory) {
  cqsa_fp8_quantize_args args = CQSA_FP8_QUANTIZE_ARGS_INIT;
  args.x = &matrix;
  args.row.out = &codes;
  args.source = CQSA_FP8_RING;
  args.ring = memory;
  return cqsa_fp8_quantize(context, &args, NULL);
}
static cqsa_status call_quantize(void *memory) { return cqsa_fp8_quantize(context, memory, NULL); }
static cqsa_status call_quantize_many(void *memory) {
  const cqsa_fp8_quantize_args *list[1];
  list[0] = memory;
  return cqsa_fp8_quantize_many(context, list, 1, NULL);
}
static cqsa_status call_quantize_workspace(void *memory) {
  const cqsa_fp8_quantize_args *list[1];
  uint64_t bytes = 0;
  list[0] = memory;
  return cqsa_fp8_quantize_workspace(context, list, 1, &bytes);
}
static cqsa_status call_scale_from_amax(void *memory) { return cqsa_fp8_scale_from_amax(context, memory, NULL); }
static cqsa_status call_dequantize(void *memory) { return cqsa_fp8_dequantize(context, memory, NULL); }
static cqsa_status call_gemm(void *memory) { return cqsa_fp8_gemm(context, memory, NULL); }
static cqsa_status call_gemm_workspace(void *memory) {
  uint64_t bytes = 0;
  return cqsa_fp8_gemm_workspace(context, memory, &bytes);
}
static cqsa_status call_gemm_explain(void *memory) { return cqsa_fp8_gemm_explain(context, memory, NULL, 0, NULL); }


/* One token, one expert of F32, hidden and inter 1. */
static float one_x[1] = {1}, one_w[1] = {1}, one_y[1] = {1};
static int32_t one_id[1], index_out[2], place_out[1];
static int64_t one_shape[2] = {1, 1}, two_shape[1] = {2};
static cqsa_tensor moe_x, moe_ids, moe_weights, moe_out, chosen_ids, chosen_weights, moe_offsets, moe_order, moe_y;
static cqsa_moe_weights expert = CQSA_MOE_WEIGHTS_INIT;
static cqsa_moe_shared shared = CQSA_MOE_SHARED_INIT;

static cqsa_moe_args small_moe(void) {
  cqsa_moe_args args = CQSA_MOE_ARGS_INIT;
  args.x = &moe_x;
  args.topk_ids = &moe_ids;
  args.topk_weights = &moe_weights;
  args.w_gate = args.w_up = args.w_down = &expert;
  args.out = &moe_out;
  return args;
}
static void make_moe(void) {
  moe_x = q;
  moe_x.ndim = 2;
  moe_x.shape = one_shape;
  moe_x.data = one_x;
  moe_weights = moe_out = chosen_weights = moe_ids = moe_y = moe_x;
  moe_weights.data = one_w;
  moe_y.data = one_y;
  moe_out.data = out_data;
  chosen_weights.data = out_data;
  moe_ids.dtype = CQSA_DTYPE_I32;
  chosen_ids = moe_ids;
  moe_ids.data = one_id;
  chosen_ids.data = place_out;
  moe_offsets = moe_order = chosen_ids;
  moe_offsets.ndim = moe_order.ndim = 1;
  moe_offsets.shape = two_shape;
  moe_offsets.data = index_out;
  expert.num_experts = expert.rows = expert.row_elements = 1;
  expert.all.data = one_w;
  expert.all.format = CQSA_QUANT_F32;
  shared.w_gate = shared.w_up = shared.w_down = &expert;
}
static cqsa_status call_moe(void *memory) { return cqsa_moe_prefill(context, memory, NULL); }
static cqsa_status call_moe_workspace(void *memory) {
  uint64_t bytes = 0;
  return cqsa_moe_workspace(context, memory, &bytes);
}
static cqsa_status call_moe_explain(void *memory) { return cqsa_moe_explain(context, memory, NULL, 0, NULL); }
static cqsa_status call_moe_weights(void *memory) {
  cqsa_moe_args args = small_moe();
  args.w_down = memory;
  return cqsa_moe_prefill(context, &args, NULL);
}
static cqsa_status call_moe_shared(void *memory) {
  cqsa_moe_args args = small_moe();
  args.shared = memory;
  return cqsa_moe_prefill(context, &args, NULL);
}
static cqsa_status call_moe_route(void *memory) { return cqsa_moe_route(context, memory, NULL); }
static cqsa_status call_moe_group(void *memory) { return cqsa_moe_group(context, memory, NULL); }
static cqsa_status call_moe_combine(void *memory) { return cqsa_moe_combine(context, memory, NULL); }

static void expect(const char *name, const char *what, call_fn call, big *memory, cqsa_status wanted) {
  cqsa_status status;
  memset(out_data, 0x5A, sizeof out_data);
  status = call(memory->bytes);
  if (status != wanted) {
    ++failures;
    printf("%s, %s: status is %s, wanted %s (%s)\n", name, what, cqsa_status_string(status), cqsa_status_string(wanted),
           cqsa_last_error());
  }
  if (wanted != CQSA_OK && out_data[0] != out_data[1]) {
    ++failures;
    printf("%s, %s: a refused call wrote its output\n", name, what);
  }
}

/* `good`: a whole struct of `size` bytes that the call accepts; `first`: the size it was born with. has_flags: the flags are the caller's (not an output). */
static void check(const char *name, call_fn call, const void *good, uint32_t first, uint32_t size, int has_flags) {
  static const uint32_t wrong[] = {0, 4, 7, 8, 70000, 0xFFFFFFFFu};
  uint32_t stated, i, flag = 1u << 31;
  big memory;
#define FRESH() (memset(memory.bytes, 0, sizeof memory.bytes), memcpy(memory.bytes, good, size))
#define STATE(number) (stated = (number), memcpy(memory.bytes, &stated, sizeof stated))
  FRESH();
  expect(name, "as it is", call, &memory, CQSA_OK);
  for (i = 0; i < sizeof wrong / sizeof *wrong; ++i) {
    FRESH();
    STATE(wrong[i]);
    expect(name, "a size nobody had", call, &memory, CQSA_ERROR_STRUCT_SIZE);
  }
  FRESH();
  STATE(first - 8);
  expect(name, "smaller than the first version", call, &memory, CQSA_ERROR_STRUCT_SIZE);
  FRESH();
  STATE(first);
  expect(name, "as the first version had it", call, &memory, CQSA_OK);
  FRESH();
  STATE(size + TAIL);
  expect(name, "larger with a clean tail", call, &memory, CQSA_OK);
  memcpy(&stated, memory.bytes, sizeof stated);
  if (stated != size + TAIL) ++failures, printf("%s: struct_size was changed to %u\n", name, (unsigned)stated);
  FRESH();
  STATE(size + TAIL);
  memory.bytes[size + TAIL - 1] = 1;
  expect(name, "larger with a dirty tail", call, &memory, CQSA_ERROR_STRUCT_SIZE);
  FRESH();
  memory.bytes[size] = 1;
  expect(name, "dirty beyond its own size", call, &memory, CQSA_OK);
  FRESH();
  memcpy(memory.bytes + 4, &flag, sizeof flag);
  if (has_flags) expect(name, "an unknown flag", call, &memory, CQSA_ERROR_UNKNOWN_FLAG);
}

static void make_tensors(void) {
  q.data = data;
  q.device_type = CQSA_DEVICE_CPU;
  q.ndim = 4;
  q.dtype = CQSA_DTYPE_F32;
  q.shape = shape;
  lse = out = q;
  out.data = out_data;
  lse.data = lse_data;
  lse.ndim = 3;
  lse.shape = lse_shape;
}

#define CHECK_FROM(call, object, first, has_flags) \
  check(#call, call, &(object), (uint32_t)(first), (uint32_t)sizeof(object), has_flags)
#define CHECK(call, object, has_flags) CHECK_FROM(call, object, sizeof(object), has_flags)

int main(void) {
  cqsa_context_params context_params = CQSA_CONTEXT_PARAMS_INIT;
  cqsa_attention_params params = small_params(), empty_params = CQSA_ATTENTION_PARAMS_INIT;
  cqsa_attention_args args = small_args();
  cqsa_attention_merge_args merge = CQSA_ATTENTION_MERGE_ARGS_INIT;
  cqsa_attention_selected_args selected = CQSA_ATTENTION_SELECTED_ARGS_INIT;
  cqsa_kv_args append = CQSA_KV_ARGS_INIT, gather = CQSA_KV_ARGS_INIT;
  cqsa_fp8_ring_info ring_info = CQSA_FP8_RING_INFO_INIT;
  cqsa_fp8_quantize_args quantize = CQSA_FP8_QUANTIZE_ARGS_INIT;
  cqsa_fp8_scale_args from_amax = CQSA_FP8_SCALE_ARGS_INIT;
  cqsa_fp8_dequantize_args dequantize = CQSA_FP8_DEQUANTIZE_ARGS_INIT;
  cqsa_fp8_gemm_args gemm = CQSA_FP8_GEMM_ARGS_INIT;
  cqsa_moe_args moe;
  cqsa_moe_route_args route = CQSA_MOE_ROUTE_ARGS_INIT;
  cqsa_moe_group_args group = CQSA_MOE_GROUP_ARGS_INIT;
  cqsa_moe_combine_args combine = CQSA_MOE_COMBINE_ARGS_INIT;
  cqsa_tensor rows, cells, taken, another_scale;
  cqsa_quant_tensor coded = CQSA_QUANT_TENSOR_INIT, made;
  cqsa_quant_format_info format_info = CQSA_QUANT_FORMAT_INFO_INIT;
  int32_t zero = 0;
  cqsa_backend_info backend_info = CQSA_BACKEND_INFO_INIT;
  cqsa_run_info run_info = CQSA_RUN_INFO_INIT;
  cqsa_plan_info plan_info = CQSA_PLAN_INFO_INIT;
  make_tensors();
  make_selected(&selected);
  make_fp8();
  make_moe();
  moe = small_moe();
  route.logits = &moe_x;
  route.topk_ids = &chosen_ids;
  route.topk_weights = &chosen_weights;
  group.topk_ids = &moe_ids;
  group.offsets = &moe_offsets;
  group.order = &moe_order;
  combine.y = &moe_y;
  combine.topk_weights = &moe_weights;
  combine.out = &moe_out;
  quantize.x = &matrix;
  quantize.row.out = &codes;
  another_scale = scale;
  another_scale.data = row_kept;
  from_amax.amax = &scale;
  from_amax.scale = &another_scale;
  from_amax.format = CQSA_DTYPE_E5M2;
  dequantize.codes = &codes;
  dequantize.scale_inv = &scale;
  dequantize.out = &matrix_out;
  gemm.a = gemm.b = &codes;
  gemm.d = &product;
  context_params.backend = "cpu";
  merge.out_a = merge.out_b = &q;
  merge.lse_a = merge.lse_b = &lse;
  merge.out = &out;
  merge.lse = &lse;
  rows = q;
  rows.ndim = 3;
  rows.shape = shape + 1;
  taken = rows;
  taken.data = out_data;
  cells = lse;
  cells.data = &zero;
  cells.dtype = CQSA_DTYPE_I32;
  cells.ndim = 1;
  append.x = &rows;
  append.pool = &out;
  gather.x = &taken;
  gather.pool = &q;
  append.page_table = append.cells = gather.page_table = gather.cells = &cells;
  matrix_in = q;
  matrix_in.ndim = 2;
  matrix_in.shape = shape + 2;
  matrix_out = matrix_in;
  matrix_out.data = out_data;
  coded.format = CQSA_QUANT_F32;
  coded.device_type = CQSA_DEVICE_CPU;
  coded.data = data;
  coded.rows = 1;
  coded.row_elements = 4;
  coded.data_bytes = sizeof data;
  made = coded;
  made.data = out_data;
  if (cqsa_context_create(&context_params, &context) || cqsa_attention_plan_create(context, &params, &plan)) {
    printf("%s\n", cqsa_last_error());
    return 1;
  }
  CHECK(call_context, context_params, 1);
  CHECK(call_backend_info, backend_info, 0);
  CHECK(call_query, params, 1);
  CHECK(call_create, params, 1);
  CHECK(call_params, params, 1);
  CHECK(call_params, empty_params, 1);
  CHECK(call_params_of, empty_params, 1);
  CHECK_FROM(call_args, args, offsetof(cqsa_attention_args, checkpoint), 1);
  CHECK_FROM(call_execute, args, offsetof(cqsa_attention_args, checkpoint), 1);
  CHECK(call_run_info, run_info, 0);
  CHECK(call_describe, plan_info, 0);
  CHECK(call_merge, merge, 1);
  CHECK(call_selected, selected, 1);
  CHECK(call_selected_workspace, selected, 1);
  CHECK(call_kv_append, append, 1);
  CHECK(call_kv_gather, gather, 1);
  CHECK(call_ring_bytes, ring, 1);
  CHECK(call_ring_init, ring, 1);
  CHECK(call_ring_fold, ring, 1);
  CHECK(call_ring_staged, ring, 1);
  CHECK(call_ring_read, ring, 1);
  CHECK(call_ring_info, ring_info, 0);
  CHECK(call_quantize_ring, ring, 1);
  CHECK(call_quantize, quantize, 1);
  CHECK(call_quantize_many, quantize, 1);
  CHECK(call_quantize_workspace, quantize, 1);
  scale_data[0] = 1;
  CHECK(call_scale_from_amax, from_amax, 1);
  CHECK(call_dequantize, dequantize, 1);
  CHECK(call_gemm, gemm, 1);
  CHECK(call_gemm_workspace, gemm, 1);
  CHECK(call_gemm_explain, gemm, 1);
  CHECK(call_dequantize_rows, coded, 1);
  CHECK(call_quantize_rows, made, 1);
  CHECK(call_format, format_info, 0);
  CHECK(call_moe, moe, 1);
  CHECK(call_moe_workspace, moe, 1);
  CHECK(call_moe_explain, moe, 1);
  CHECK(call_moe_weights, expert, 1);
  CHECK(call_moe_shared, shared, 1);
  CHECK(call_moe_route, route, 1);
  CHECK(call_moe_group, group, 1);
  CHECK(call_moe_combine, combine, 1);
  cqsa_plan_destroy(plan);
  cqsa_context_destroy(context);
  printf("%d failures\n", failures);
  return failures != 0;
}
