// SPDX-License-Identifier: Apache-2.0
#include "ops/sparse/kv.h"

#include <algorithm>
#include <cinttypes>

#include "abi_struct.h"
#include "ops/attention/enqueue.h"
#include "tensor.h"

namespace cqsa {

namespace {

constexpr uint32_t first_kv_args = sizeof(cqsa_kv_args);
constexpr int64_t longest_rotation = 4096, quant_block = 32, quant_block_bytes = 18;

bool is_float(cqsa_dtype dtype) { return dtype == CQSA_DTYPE_F32 || dtype == CQSA_DTYPE_F16 || dtype == CQSA_DTYPE_BF16; }
bool is_power_of_two(int64_t n) { return n > 0 && (n & (n - 1)) == 0; }

// What is asked about one tensor, and of the driver, in one call.
struct operands {
  const cqsa_context& context;
  pointer_answers answers;

  cqsa_status check(const cqsa_tensor* tensor, const char* name, int min_ndim, int max_ndim) {
    const cqsa_backend_v1& backend = *context.backend;
    byte_extent extent;
    CQSA_TRY(check_tensor(tensor, name, min_ndim, max_ndim, &extent));
    if (tensor->device_type != backend.device_type)
      return fail(CQSA_ERROR_DEVICE, "%s is on device type %d, wanted %d (backend %s)", name, tensor->device_type, backend.device_type,
                  backend.name);
    if (context.is_host()) return CQSA_OK;
    if (tensor->device_id != context.device_index)
      return fail(CQSA_ERROR_DEVICE, "%s is on device %d, the context is for device %d", name, tensor->device_id, context.device_index);
    return check_pointer(context, *tensor, name, answers);
  }
};

cqsa_status check_float(const cqsa_tensor& tensor, const char* name) {
  if (is_float(tensor.dtype)) return CQSA_OK;
  return fail(CQSA_ERROR_DTYPE, "%s is %s, wanted f32, f16 or bf16", name, dtype_name(tensor.dtype));
}

// What the numbers of a call say, before any tensor is looked at.
cqsa_status check_format(const cqsa_kv_args& args) {
  if (args.format != CQSA_KV_FORMAT_ELEMENTS && args.format != CQSA_KV_FORMAT_Q4_0)
    return fail(CQSA_ERROR_UNKNOWN_FLAG, "args->format is %" PRId32 ", wanted one of CQSA_KV_FORMAT_*", args.format);
  const int32_t group = args.kv_group;
  if (group != 0 && group != 32 && group != 64 && group != 128)
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->kv_group is %" PRId32 ", wanted 32, 64, 128, or 0 for 64", group);
  return CQSA_OK;
}

cqsa_status check_pool_dtype(const cqsa_kv_args& args) {
  const cqsa_dtype dtype = args.pool->dtype;
  if (args.format == CQSA_KV_FORMAT_Q4_0) {
    if (dtype == CQSA_DTYPE_U8) return CQSA_OK;
    return fail(CQSA_ERROR_DTYPE, "args->pool is %s, wanted u8 for CQSA_KV_FORMAT_Q4_0", dtype_name(dtype));
  }
  if (is_float(dtype) || dtype == CQSA_DTYPE_I8) return CQSA_OK;
  return fail(CQSA_ERROR_DTYPE, "args->pool is %s, wanted f32, f16, bf16 or i8 for CQSA_KV_FORMAT_ELEMENTS", dtype_name(dtype));
}

cqsa_status check_pool(const cqsa_kv_args& args) {
  static const char* const axes[] = {"num_pages", "page_size", "num_kv_heads", "head_dim"};
  static const char* const q4_axes[] = {"num_pages", "page_size", "num_kv_heads", "head_dim / 32 * 18"};
  CQSA_TRY(check_pool_dtype(args));
  const bool q4 = args.format == CQSA_KV_FORMAT_Q4_0;
  const int64_t head_dim = args.x->shape[2];
  if (q4 && (!is_power_of_two(head_dim) || head_dim < quant_block || head_dim > longest_rotation))
    return fail(CQSA_ERROR_SHAPE, "args->x has head_dim %" PRId64 ", wanted a power of two, 32 to %" PRId64 ", for CQSA_KV_FORMAT_Q4_0",
                head_dim, longest_rotation);
  const cqsa_tensor& pool = *args.pool;
  const int64_t wanted[] = {pool.shape[0], pool.shape[1], args.x->shape[1], q4 ? head_dim / quant_block * quant_block_bytes : head_dim};
  CQSA_TRY(check_shape(pool, "args->pool", wanted, 4, false, q4 ? q4_axes : axes));
  int64_t strides[4];
  strides_of(pool, strides);
  if (q4 && strides[3] != 1)
    return fail(CQSA_ERROR_STRIDES, "args->pool has stride %" PRId64 " along its last axis, wanted 1 for CQSA_KV_FORMAT_Q4_0", strides[3]);
  return CQSA_OK;
}

int64_t group_of(const cqsa_kv_args& args) {
  if (args.pool->dtype != CQSA_DTYPE_I8) return 0;
  return args.kv_group ? args.kv_group : 64;
}

cqsa_status check_scale(const cqsa_kv_args& args, operands& all) {
  static const char* const axes[] = {"num_pages", "page_size", "num_kv_heads", "ceil(head_dim / kv_group)"};
  const char* const pool = args.format == CQSA_KV_FORMAT_Q4_0 ? "q4_0" : dtype_name(args.pool->dtype);
  const int64_t group = group_of(args);
  if (group == 0 && args.scale)
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->scale is given, but args->pool is %s, which has no scales: wanted NULL", pool);
  if (group == 0 && args.kv_group)
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->kv_group is %" PRId32 ", but args->pool is %s, which has no scales: wanted 0",
                args.kv_group, pool);
  if (group == 0) return CQSA_OK;
  CQSA_TRY(all.check(args.scale, "args->scale", 4, 4));
  if (args.scale->dtype != CQSA_DTYPE_F16)
    return fail(CQSA_ERROR_DTYPE, "args->scale is %s, wanted f16", dtype_name(args.scale->dtype));
  const int64_t head_dim = args.x->shape[2];
  const int64_t wanted[] = {args.pool->shape[0], args.pool->shape[1], args.x->shape[1], head_dim / group + (head_dim % group != 0)};
  return check_shape(*args.scale, "args->scale", wanted, 4, false, axes);
}

cqsa_status check_page_table(const cqsa_kv_args& args, operands& all) {
  static const char* const axes[] = {"rows", "pages"};
  CQSA_TRY(all.check(args.page_table, "args->page_table", 1, 2));
  const cqsa_tensor& table = *args.page_table;
  if (table.dtype != CQSA_DTYPE_I32)
    return fail(CQSA_ERROR_DTYPE, "args->page_table is %s, wanted i32", dtype_name(table.dtype));
  if (table.ndim == 1) return CQSA_OK;
  const int64_t wanted[] = {args.x->shape[0], table.shape[1]};
  return check_shape(table, "args->page_table", wanted, 2, false, axes);
}

cqsa_status check_cells(const cqsa_kv_args& args, operands& all) {
  static const char* const axes[] = {"rows"};
  CQSA_TRY(all.check(args.cells, "args->cells", 1, 1));
  if (args.cells->dtype != CQSA_DTYPE_I32 && args.cells->dtype != CQSA_DTYPE_I64)
    return fail(CQSA_ERROR_DTYPE, "args->cells is %s, wanted i32 or i64", dtype_name(args.cells->dtype));
  return check_shape(*args.cells, "args->cells", args.x->shape, 1, false, axes);
}

struct named {
  const cqsa_tensor* tensor;
  const char* name;
};

cqsa_status check_output(const named& output, const named (&inputs)[4]) {
  CQSA_TRY(check_no_self_overlap(*output.tensor, output.name));
  for (const named& input : inputs)
    if (input.tensor) CQSA_TRY(check_no_overlap(*output.tensor, output.name, *input.tensor, input.name));
  return CQSA_OK;
}

cqsa_status check_outputs(const cqsa_kv_args& args, kv_direction direction) {
  const named x{args.x, "args->x"}, pool{args.pool, "args->pool"}, scale{args.scale, "args->scale"};
  const named table{args.page_table, "args->page_table"}, cells{args.cells, "args->cells"};
  if (direction == kv_direction::gather) return check_output(x, {pool, scale, table, cells});
  CQSA_TRY(check_output(pool, {x, scale, table, cells}));
  return args.scale ? check_output(scale, {x, table, cells, {}}) : CQSA_OK;
}

cqsa_status check_args(const cqsa_kv_args& args, kv_direction direction, operands& all) {
  CQSA_TRY(check_format(args));
  CQSA_TRY(all.check(args.x, "args->x", 3, 3));
  CQSA_TRY(check_float(*args.x, "args->x"));
  CQSA_TRY(all.check(args.pool, "args->pool", 4, 4));
  CQSA_TRY(check_pool(args));
  CQSA_TRY(check_scale(args, all));
  CQSA_TRY(check_page_table(args, all));
  CQSA_TRY(check_cells(args, all));
  return check_outputs(args, direction);
}

// Nobody goes to an empty tensor, whose address may be anything.
void* first_element(const cqsa_tensor& tensor) {
  return is_empty(tensor) ? nullptr : static_cast<char*>(tensor.data) + tensor.byte_offset;
}

cqsa_view view_of(const cqsa_tensor* tensor, int page, int head, int row, int channel) {
  cqsa_view view{};
  if (tensor == nullptr) return view;
  int64_t strides[4];
  strides_of(*tensor, strides);
  view.data = first_element(*tensor);
  view.dtype = tensor->dtype;
  const int axes[] = {page, head, row, channel};
  for (int i = 0; i < 4; ++i) view.stride[i] = axes[i] < 0 ? 0 : strides[axes[i]];
  return view;
}

void fill(const cqsa_kv_args& args, cqsa_kv_leaf& leaf) {
  int64_t table[2] = {0, 0};
  leaf.struct_size = sizeof leaf;
  leaf.format = args.format;
  leaf.rows = args.x->shape[0], leaf.num_kv_heads = args.x->shape[1], leaf.head_dim = args.x->shape[2];
  leaf.num_pages = args.pool->shape[0], leaf.page_size = args.pool->shape[1];
  leaf.x = view_of(args.x, -1, 1, 0, 2);
  leaf.pool = view_of(args.pool, 0, 2, 1, 3);
  leaf.scale = view_of(args.scale, 0, 2, 1, 3);
  leaf.kv_group = group_of(args);
  const cqsa_tensor& pages = *args.page_table;
  strides_of(pages, table);
  leaf.page_table = static_cast<const int32_t*>(first_element(pages));
  leaf.pages = pages.shape[pages.ndim - 1];
  leaf.page_table_stride[0] = pages.ndim == 2 ? table[0] : 0;
  leaf.page_table_stride[1] = table[pages.ndim - 1];
  leaf.cells = first_element(*args.cells);
  leaf.cells_dtype = args.cells->dtype;
  strides_of(*args.cells, &leaf.cells_stride);
  // A pool without rows has no cell: a table without pages says the same without a page size that nobody can divide by.
  if (leaf.num_pages == 0 || leaf.page_size == 0) leaf.pages = 0, leaf.page_size = 1;
}

cqsa_status report(const cqsa_context& context, cqsa_status status, const char* what) {
  if (status == CQSA_OK || status == CQSA_ERROR_CALLBACK) return status;
  return fail(status, "%s failed: %s", what, context.backend->last_error());
}

cqsa_status no_leaf(const cqsa_context& context, const char* what) {
  return fail(CQSA_ERROR_UNSUPPORTED, "backend %s has no %s", context.backend->name, what);
}

}  // namespace

cqsa_status kv_rows(const cqsa_context& context, const cqsa_kv_args* caller, kv_direction direction, void* stream) {
  const bool append = direction == kv_direction::append;
  const char* const what = append ? "kv_append" : "kv_gather";
  cqsa_kv_args args{};
  CQSA_TRY(copy_struct(caller, "args", first_kv_args, 0, args));
  operands all{context, {}};
  CQSA_TRY(check_args(args, direction, all));
  const auto work = append ? context.backend->kv_append : context.backend->kv_gather;
  if (work == nullptr) return no_leaf(context, what);
  if (is_empty(*args.x) || (append && is_empty(*args.pool))) return CQSA_OK;
  cqsa_kv_leaf leaf{};
  fill(args, leaf);
  const cqsa_exec exec = plain_exec(context);
  return report(context, work(context.device, &leaf, context.is_host() ? &exec : nullptr, stream), what);
}

namespace {

cqsa_status check_hadamard(const cqsa_tensor* x, const cqsa_tensor* out, operands& all) {
  CQSA_TRY(all.check(x, "x", 1, 4));
  CQSA_TRY(check_float(*x, "x"));
  const int64_t n = x->shape[x->ndim - 1];
  if (!is_power_of_two(n) || n > longest_rotation)
    return fail(CQSA_ERROR_SHAPE, "x has %" PRId64 " elements along its last axis, wanted a power of two, 1 to %" PRId64, n,
                longest_rotation);
  CQSA_TRY(all.check(out, "out", x->ndim, x->ndim));
  CQSA_TRY(check_float(*out, "out"));
  CQSA_TRY(check_shape(*out, "out", x->shape, x->ndim));
  CQSA_TRY(check_no_self_overlap(*out, "out"));
  if (x->dtype == out->dtype && same_view(*x, *out)) return CQSA_OK;
  return check_no_overlap(*out, "out", *x, "x", " without being the same view");
}

}  // namespace

cqsa_status hadamard(const cqsa_context& context, const cqsa_tensor* x, const cqsa_tensor* out, void* stream) {
  operands all{context, {}};
  CQSA_TRY(check_hadamard(x, out, all));
  if (context.backend->hadamard == nullptr) return no_leaf(context, "hadamard");
  if (is_empty(*x)) return CQSA_OK;
  cqsa_hadamard_leaf leaf{};
  int64_t x_strides[4], out_strides[4];
  strides_of(*x, x_strides);
  strides_of(*out, out_strides);
  const int leading = x->ndim - 1, missing = 3 - leading;
  std::fill_n(leaf.shape, 3, 1);
  std::copy_n(x->shape, leading, leaf.shape + missing);
  std::copy_n(x_strides, x->ndim, leaf.x_stride + missing);
  std::copy_n(out_strides, x->ndim, leaf.out_stride + missing);
  leaf.n = x->shape[leading];
  leaf.x = first_element(*x), leaf.out = first_element(*out);
  leaf.dtype_x = x->dtype, leaf.dtype_out = out->dtype;
  const cqsa_exec exec = plain_exec(context);
  return report(context, context.backend->hadamard(context.device, &leaf, context.is_host() ? &exec : nullptr, stream), "hadamard");
}

}  // namespace cqsa
