// SPDX-License-Identifier: Apache-2.0
#include "ops/fp8/dequantize.h"

#include <cinttypes>

#include "abi_struct.h"
#include "ops/fp8/quantize_check.h"

namespace cqsa::fp8 {

namespace {

constexpr uint32_t first_args = sizeof(cqsa_fp8_dequantize_args);

cqsa_status check_blocks(const cqsa_fp8_dequantize_args& a) {
  CQSA_TRY(check_block(a.block, "args->block"));
  if (a.reserved) return fail(CQSA_ERROR_UNKNOWN_FLAG, "args->reserved is %" PRId32 ", wanted 0", a.reserved);
  if (a.groups == nullptr || a.block[0] == 1 || (a.block[0] == 0 && a.block[1] == 0)) return CQSA_OK;
  return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->block is {%" PRId64 ", %" PRId64 "}, wanted {0, 0}, {1, 0} or {1, g} with args->groups", a.block[0],
              a.block[1]);
}

cqsa_status take_operands(operand_list& list, const cqsa_fp8_dequantize_args& a, shape_of_x& shape, cqsa_fp8_dequantize_leaf& leaf) {
  groups_view groups;
  CQSA_TRY(list.input(a.codes, "args->codes", 2, 3));
  CQSA_TRY(check_format("args->codes", *a.codes));
  CQSA_TRY(take_shape(*a.codes, "args->codes", shape));
  CQSA_TRY(take_groups(list, a.groups, groups));
  leaf.groups = groups.data, leaf.groups_dtype = groups.dtype, leaf.groups_stride = groups.stride, leaf.num_groups = groups.count;
  leaf.scale_inv = grid_of(shape.all_rows, shape.columns, a.block);
  leaf.per_group = a.groups && a.block[0] == 0;
  if (leaf.per_group) leaf.scale_inv.rows = groups.count;
  if (a.scale_inv == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "args->scale_inv is NULL");
  CQSA_TRY(take_grid(list, a.scale_inv, {"args->scale_inv", "args->scale_layout"}, a.scale_layout, false, leaf.scale_inv));
  CQSA_TRY(list.output(a.out, "args->out", a.codes->ndim, a.codes->ndim));
  CQSA_TRY(check_float("args->out", *a.out));
  return check_shape(*a.out, "args->out", a.codes->shape, a.codes->ndim);
}

void fill_matrices(const operand_list& list, const cqsa_fp8_dequantize_args& a, const shape_of_x& shape, cqsa_fp8_dequantize_leaf& leaf) {
  leaf.codes = matrix_of(list, *a.codes);
  leaf.out = matrix_of(list, *a.out);
  cqsa_matrix* const both[] = {&leaf.codes, &leaf.out};
  const bool folded = fold_batch(shape.batch, shape.rows, both, 2);
  leaf.batch = folded ? 1 : shape.batch, leaf.rows = folded ? shape.all_rows : shape.rows, leaf.columns = shape.columns;
}

}  // namespace

cqsa_status dequantize(const cqsa_context& context, const cqsa_fp8_dequantize_args* caller, void* stream) {
  cqsa_fp8_dequantize_args args;
  cqsa_fp8_dequantize_leaf leaf{};
  shape_of_x shape{};
  operand room[4];
  operand_list list(context, room, look::everywhere);
  CQSA_TRY(copy_struct(caller, "args", first_args, 0, args));
  CQSA_TRY(check_blocks(args));
  CQSA_TRY(take_operands(list, args, shape, leaf));
  CQSA_TRY(list.check_overlap());
  fill_matrices(list, args, shape, leaf);
  if (leaf.groups && context.is_host()) CQSA_TRY(check_groups({leaf.groups, leaf.groups_dtype, leaf.groups_stride, leaf.num_groups}, shape.all_rows));
  if (context.backend->fp8_dequantize == nullptr) return no_leaf(context, "fp8_dequantize");
  if (is_empty(*args.out)) return CQSA_OK;
  const cqsa_exec exec = plain_exec(context);
  return report(context, context.backend->fp8_dequantize(context.device, &leaf, context.is_host() ? &exec : nullptr, stream), "fp8_dequantize");
}

// ---- transpose --------------------------------------------------------------------------------------------------------------

namespace {

cqsa_status check_transpose(operand_list& list, const cqsa_tensor* x, const cqsa_tensor* out) {
  static const char* const axes[] = {"cols of x", "rows of x"};
  CQSA_TRY(list.input(x, "x", 2, 2));
  if (dtype_bits(x->dtype) != 8) return wrong_dtype("x", *x, "a type of one byte");
  CQSA_TRY(list.output(out, "out", 2, 2));
  CQSA_TRY(check_dtype("out", *out, x->dtype));
  const int64_t wanted[] = {x->shape[1], x->shape[0]};
  CQSA_TRY(check_shape(*out, "out", wanted, 2, false, axes));
  return list.check_overlap();
}

}  // namespace

cqsa_status transpose(const cqsa_context& context, const cqsa_tensor* x, const cqsa_tensor* out, void* stream) {
  operand room[2];
  operand_list list(context, room, look::everywhere);
  CQSA_TRY(check_transpose(list, x, out));
  if (context.backend->fp8_transpose == nullptr) return no_leaf(context, "fp8_transpose");
  if (is_empty(*x)) return CQSA_OK;
  int64_t strides[2];
  cqsa_fp8_transpose_leaf leaf{};
  leaf.rows = x->shape[0], leaf.columns = x->shape[1];
  leaf.x = static_cast<const uint8_t*>(list.first(*x));
  leaf.out = static_cast<uint8_t*>(list.first(*out));
  strides_of(*x, leaf.x_stride);
  strides_of(*out, strides);
  leaf.out_stride[0] = strides[1], leaf.out_stride[1] = strides[0];
  const cqsa_exec exec = plain_exec(context);
  return report(context, context.backend->fp8_transpose(context.device, &leaf, context.is_host() ? &exec : nullptr, stream), "fp8_transpose");
}

}  // namespace cqsa::fp8
