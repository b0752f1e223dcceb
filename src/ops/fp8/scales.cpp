// SPDX-License-Identifier: Apache-2.0
#include "ops/fp8/scales.h"

#include <cinttypes>

#include "abi_struct.h"
#include "ops/fp8/operands.h"

namespace cqsa::fp8 {

namespace {

constexpr uint32_t first_scale_args = sizeof(cqsa_fp8_scale_args);

cqsa_status launch(const cqsa_context& context, const cqsa_fp8_scale_leaf& leaf, const char* what, void* stream) {
  if (context.backend->fp8_scale == nullptr) return no_leaf(context, what);
  if (leaf.scale_inv.rows == 0 || leaf.scale_inv.columns == 0) return CQSA_OK;
  const cqsa_exec exec = plain_exec(context);
  return report(context, context.backend->fp8_scale(context.device, &leaf, context.is_host() ? &exec : nullptr, stream), what);
}

// One scale may have fewer axes.
cqsa_scale_grid grid_like(const cqsa_tensor& t) {
  cqsa_scale_grid grid{};
  grid.dtype = CQSA_DTYPE_F32;
  const bool two = t.ndim == 2 && t.shape;  // what is wrong with it is found later
  grid.rows = two ? t.shape[0] : 1;
  grid.columns = two ? t.shape[1] : 1;
  grid.block[0] = grid.block[1] = 1;
  return grid;
}

cqsa_status check_scale_numbers(const cqsa_fp8_scale_args& args) {
  CQSA_TRY(check_format("args->format", args.format));
  CQSA_TRY(check_margin(args.margin, "args->margin"));
  CQSA_TRY(check_bounds(args.eps, args.amax_limit, "args->eps", "args->amax_limit"));
  if (args.reserved != 0) return fail(CQSA_ERROR_UNKNOWN_FLAG, "args->reserved is %g, wanted 0", static_cast<double>(args.reserved));
  if (args.scale || args.scale_inv) return CQSA_OK;
  return fail(CQSA_ERROR_NULL_POINTER, "args->scale and args->scale_inv are both NULL, wanted an output");
}

}  // namespace

cqsa_status scale_from_amax(const cqsa_context& context, const cqsa_fp8_scale_args* caller, void* stream) {
  cqsa_fp8_scale_args args;
  operand room[3];
  operand_list list(context, room, look::everywhere);
  cqsa_fp8_scale_leaf leaf{};
  CQSA_TRY(copy_struct(caller, "args", first_scale_args, CQSA_FP8_POW2, args));
  CQSA_TRY(check_scale_numbers(args));
  if (args.amax == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "args->amax is NULL");
  leaf.amax = leaf.scale = leaf.scale_inv = leaf.scale_inv_in = grid_like(*args.amax);
  CQSA_TRY(take_f32_grid(list, args.amax, "args->amax", false, leaf.amax));
  CQSA_TRY(take_f32_grid(list, args.scale, "args->scale", true, leaf.scale));
  CQSA_TRY(take_grid(list, args.scale_inv, {"args->scale_inv", "args->scale_layout"}, args.scale_layout, true, leaf.scale_inv));
  CQSA_TRY(list.check_overlap());
  leaf.format = args.format;
  leaf.margin = args.margin;
  leaf.pow2 = (args.flags & CQSA_FP8_POW2) || is_e8m0(leaf.scale_inv);
  leaf.eps = args.eps, leaf.amax_limit = args.amax_limit;
  return launch(context, leaf, "fp8_scale_from_amax", stream);
}

cqsa_status scale_relayout(const cqsa_context& context, const cqsa_tensor* scales, int32_t layout, const cqsa_tensor* scales_out, int32_t layout_out,
                           int64_t block_rows, int64_t block_columns, void* stream) {
  operand room[2];
  operand_list list(context, room, look::everywhere);
  cqsa_fp8_scale_leaf leaf{};
  if (block_rows < 0) return fail(CQSA_ERROR_INVALID_ARGUMENT, "block_rows is %" PRId64 ", wanted at least 0", block_rows);
  if (block_columns < 0) return fail(CQSA_ERROR_INVALID_ARGUMENT, "block_columns is %" PRId64 ", wanted at least 0", block_columns);
  if (scales == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "scales is NULL");
  if (scales_out == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "scales_out is NULL");
  cqsa_scale_grid grid{};
  grid.dtype = CQSA_DTYPE_F32;
  grid.rows = block_rows, grid.columns = block_columns;
  grid.block[0] = grid.block[1] = 1;
  leaf.scale_inv_in = leaf.scale_inv = leaf.scale = leaf.amax = grid;
  CQSA_TRY(take_grid(list, scales, {"scales", "layout"}, layout, false, leaf.scale_inv_in));
  CQSA_TRY(take_grid(list, scales_out, {"scales_out", "layout_out"}, layout_out, true, leaf.scale_inv));
  CQSA_TRY(list.check_overlap());
  leaf.format = CQSA_DTYPE_E4M3FN;
  return launch(context, leaf, "fp8_scale_relayout", stream);
}

}  // namespace cqsa::fp8
