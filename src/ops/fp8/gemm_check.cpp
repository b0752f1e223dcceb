// SPDX-License-Identifier: Apache-2.0
// The arguments of a product: each checked, then turned into the leaf.
#include <algorithm>
#include <cinttypes>
#include <cmath>

#include "backends/fp8_rules.h"
#include "ops/fp8/gemm.h"

namespace cqsa::fp8 {

namespace {

using args_type = cqsa_fp8_gemm_args;

cqsa_status check_numbers(const args_type& a) {
  if (a.accumulate != CQSA_FP8_PROMOTE_128 && a.accumulate != CQSA_FP8_FAST)
    return fail(CQSA_ERROR_UNKNOWN_FLAG, "args->accumulate is %" PRId32 ", wanted CQSA_FP8_PROMOTE_128 or CQSA_FP8_FAST", a.accumulate);
  if (a.provider < CQSA_FP8_PROVIDER_AUTO || a.provider > CQSA_FP8_PROVIDER_VENDOR)
    return fail(CQSA_ERROR_UNKNOWN_FLAG, "args->provider is %" PRId32 ", wanted one of CQSA_FP8_PROVIDER_*", a.provider);
  for (const auto& [value, name] : {std::pair{a.alpha, "args->alpha"}, std::pair{a.beta, "args->beta"}})
    if (!std::isfinite(static_cast<float>(value))) return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s is %g, wanted a number that is finite in f32", name, value);
  return CQSA_OK;
}

int64_t batch_of(const cqsa_tensor& t) { return t.ndim == 3 ? t.shape[0] : 1; }
int64_t rows_of(const cqsa_tensor& t) { return t.shape[t.ndim - 2]; }
int64_t columns_of(const cqsa_tensor& t) { return t.shape[t.ndim - 1]; }

// A factor or c has the batch of d, or 1 where it may be the same for all.
cqsa_status check_batch(const cqsa_tensor& t, const char* name, int64_t batch) {
  if (batch_of(t) == batch || batch_of(t) == 1) return CQSA_OK;
  return fail(CQSA_ERROR_SHAPE, "%s has shape %s, wanted a batch of %" PRId64 " as args->d, or of 1", name, shape_text(t.shape, t.ndim).text, batch);
}

cqsa_status check_factors(operand_list& list, const args_type& a, cqsa_fp8_gemm_leaf& leaf) {
  CQSA_TRY(list.input(a.a, "args->a", 2, 3));
  CQSA_TRY(check_format("args->a", *a.a));
  CQSA_TRY(list.input(a.b, "args->b", 2, 3));
  CQSA_TRY(check_format("args->b", *a.b));
  leaf.m = rows_of(*a.a), leaf.n = rows_of(*a.b), leaf.k = columns_of(*a.a);
  if (columns_of(*a.b) != leaf.k)
    return fail(CQSA_ERROR_SHAPE, "args->b has shape %s, wanted k = %" PRId64 " along its last axis, as args->a of shape %s",
                shape_text(a.b->shape, a.b->ndim).text, leaf.k, shape_text(a.a->shape, a.a->ndim).text);
  return CQSA_OK;
}

// The result may be one matrix only where there is no batch.
cqsa_status check_result_shape(const args_type& a, const cqsa_fp8_gemm_leaf& leaf) {
  static const char* const axes[] = {"batch", "m", "n"};
  const cqsa_tensor& d = *a.d;
  const int64_t wanted[] = {d.ndim == 3 ? d.shape[0] : std::max(batch_of(*a.a), batch_of(*a.b)), leaf.m, leaf.n};
  if (d.ndim == 2 && wanted[0] == 1) return check_shape(d, "args->d", wanted + 1, 2, false, axes + 1);
  return check_shape(d, "args->d", wanted, 3, false, axes);
}

cqsa_status check_result(operand_list& list, const args_type& a, cqsa_fp8_gemm_leaf& leaf) {
  CQSA_TRY(list.output(a.d, "args->d", 2, 3));
  if (!is_float(a.d->dtype) && !is_format(a.d->dtype)) return wrong_dtype("args->d", *a.d, "f32, f16, bf16 or a format");
  CQSA_TRY(check_result_shape(a, leaf));
  leaf.batch = batch_of(*a.d);
  CQSA_TRY(check_batch(*a.a, "args->a", leaf.batch));
  return check_batch(*a.b, "args->b", leaf.batch);
}

cqsa_status check_c(operand_list& list, const args_type& a) {
  if (a.c == nullptr && a.beta != 0) return fail(CQSA_ERROR_NULL_POINTER, "args->c is NULL, but args->beta is %g", a.beta);
  if (a.c == nullptr) return CQSA_OK;
  if (a.beta == 0) return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->c is given, but args->beta is 0: wanted NULL");
  CQSA_TRY(list.input(a.c, "args->c", a.d->ndim, a.d->ndim));
  CQSA_TRY(check_float("args->c", *a.c));
  return check_shape(*a.c, "args->c", a.d->shape, a.d->ndim);
}

cqsa_matrix batched(const operand_list& list, const cqsa_tensor& t) {
  cqsa_matrix m = matrix_of(list, t);
  if (batch_of(t) == 1) m.stride[0] = 0;
  return m;
}

// ---- scales -----------------------------------------------------------------------------------------------------------------

struct factor {
  const cqsa_tensor* scale;
  const int64_t* block;
  const char *name, *block_name;
  int64_t rows;
  bool squares;  // {128, 128} too
};

cqsa_status check_block_of(const factor& f) {
  const auto is = [&f](int64_t rows, int64_t columns) { return f.block[0] == rows && f.block[1] == columns; };
  if (is(0, 0) || is(1, 0) || is(1, 128) || (f.squares && is(128, 128))) return CQSA_OK;
  return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s is {%" PRId64 ", %" PRId64 "}, wanted {0, 0}, {1, 0}%s", f.block_name, f.block[0], f.block[1],
              f.squares ? ", {1, 128} or {128, 128}" : " or {1, 128}");
}

bool is_one(const cqsa_tensor& t) {
  return std::all_of(t.shape, t.shape + t.ndim, [](int64_t size) { return size == 1; });
}

// One scale, [block rows, block columns] for all of a batch, or a matrix of them for each.
cqsa_status take_scales(operand_list& list, const factor& f, int64_t k, int64_t batch, cqsa_scale_grid& grid, int64_t& batch_stride) {
  static const char* const axes[] = {"batch or 1", "block rows", "block columns"};
  CQSA_TRY(check_block_of(f));
  grid = grid_of(f.rows, k, f.block);
  batch_stride = 0;
  if (f.scale == nullptr) return CQSA_OK;
  const cqsa_tensor& t = *f.scale;
  CQSA_TRY(list.input(&t, f.name, 0, 3));
  CQSA_TRY(check_dtype(f.name, t, CQSA_DTYPE_F32));
  const bool one = grid.rows == 1 && grid.columns == 1 && is_one(t);
  const int64_t wanted[] = {t.ndim == 3 && t.shape[0] == 1 ? 1 : batch, grid.rows, grid.columns};
  const bool shared = t.ndim == 2 || (batch == 1 && t.ndim != 3);
  if (!one) CQSA_TRY(shared ? check_shape(t, f.name, wanted + 1, 2, false, axes + 1) : check_shape(t, f.name, wanted, 3, false, axes));
  int64_t strides[max_axes];
  strides_of(t, strides);
  grid.data = list.first(t);
  if (one) return CQSA_OK;
  grid.stride[0] = strides[t.ndim - 2], grid.stride[1] = strides[t.ndim - 1];
  if (t.ndim == 3 && t.shape[0] != 1) batch_stride = strides[0];
  return CQSA_OK;
}

cqsa_status take_factor_scales(operand_list& list, const args_type& a, cqsa_fp8_gemm_leaf& leaf) {
  const factor fa{a.scale_inv_a, a.block_a, "args->scale_inv_a", "args->block_a", leaf.m, false};
  const factor fb{a.scale_inv_b, a.block_b, "args->scale_inv_b", "args->block_b", leaf.n, true};
  CQSA_TRY(take_scales(list, fa, leaf.k, leaf.batch, leaf.scale_inv_a, leaf.scale_batch_stride_a));
  return take_scales(list, fb, leaf.k, leaf.batch, leaf.scale_inv_b, leaf.scale_batch_stride_b);
}

cqsa_status take_rest(operand_list& list, const args_type& a, cqsa_fp8_gemm_leaf& leaf) {
  void* one = nullptr;
  if (a.d_scale && !is_format(a.d->dtype))
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->d_scale is given, but args->d is %s, which has no scale: wanted NULL", dtype_name(a.d->dtype));
  CQSA_TRY(take_one(list, a.d_scale, "args->d_scale", CQSA_DTYPE_F32, false, one));
  leaf.d_scale = static_cast<const float*>(one);
  CQSA_TRY(take_one(list, a.d_amax, "args->d_amax", CQSA_DTYPE_F32, true, one));
  leaf.d_amax = static_cast<float*>(one);
  if (a.bias == nullptr) return CQSA_OK;
  CQSA_TRY(take_row(list, a.bias, "args->bias", leaf.n, "n", false));
  CQSA_TRY(check_float("args->bias", *a.bias));
  leaf.bias = list.first(*a.bias), leaf.bias_dtype = a.bias->dtype;
  strides_of(*a.bias, &leaf.bias_stride);
  return CQSA_OK;
}

cqsa_status check_gemm_overlap(const operand_list& list, const args_type& a) {
  const bool in_place = a.c && a.c->dtype == a.d->dtype && same_view(*a.c, *a.d);
  return in_place ? list.check_overlap(a.c, a.d) : list.check_overlap();
}

}  // namespace

cqsa_status bind_gemm(operand_list& list, const args_type& a, cqsa_fp8_gemm_leaf& leaf) {
  leaf = {};
  leaf.struct_size = sizeof leaf;
  CQSA_TRY(check_numbers(a));
  CQSA_TRY(check_factors(list, a, leaf));
  CQSA_TRY(check_result(list, a, leaf));
  CQSA_TRY(check_c(list, a));
  CQSA_TRY(take_factor_scales(list, a, leaf));
  CQSA_TRY(take_rest(list, a, leaf));
  CQSA_TRY(check_gemm_overlap(list, a));
  leaf.a = batched(list, *a.a), leaf.b = batched(list, *a.b), leaf.d = matrix_of(list, *a.d);
  if (a.c) leaf.c = matrix_of(list, *a.c);
  if (is_empty(*a.d)) leaf.batch = leaf.m = leaf.n = 0;  // the other two may be so large that nobody can count to their product
  leaf.accumulate = a.accumulate;
  leaf.alpha = a.alpha == 0 ? 1 : a.alpha, leaf.beta = a.beta;
  leaf.chip = list.context().chip;
  return CQSA_OK;
}

}  // namespace cqsa::fp8
