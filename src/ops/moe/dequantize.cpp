// SPDX-License-Identifier: Apache-2.0
#include "ops/moe/dequantize.h"

#include <cinttypes>

#include "ops/attention/enqueue.h"
#include "quant_format.h"
#include "tensor.h"

namespace cqsa {

namespace {

// What is asked about one tensor, and of the driver, in one call.
struct operands {
  const cqsa_context& context;
  pointer_answers answers;

  cqsa_status check(const cqsa_tensor* tensor, const char* name, int ndim) {
    byte_extent extent;
    CQSA_TRY(check_tensor(tensor, name, ndim, ndim, &extent));
    return check_device(*tensor, name);
  }
  cqsa_status check_device(const cqsa_tensor& tensor, const char* name) {
    const cqsa_backend_v1& backend = *context.backend;
    if (tensor.device_type != backend.device_type)
      return fail(CQSA_ERROR_DEVICE, "%s is on device type %d, wanted %d (backend %s)", name, tensor.device_type, backend.device_type,
                  backend.name);
    if (context.is_host()) return CQSA_OK;
    if (tensor.device_id != context.device_index)
      return fail(CQSA_ERROR_DEVICE, "%s is on device %d, the context is for device %d", name, tensor.device_id, context.device_index);
    return check_pointer(context, tensor, name, answers);
  }
  cqsa_status check_matrix(const cqsa_quant_tensor* caller, quant_matrix& matrix) {
    CQSA_TRY(matrix.read(caller, "w"));
    return check_device(matrix.bytes(), "w");
  }
  cqsa_status check_float(const cqsa_tensor* tensor, const char* name) {
    CQSA_TRY(check(tensor, name, 2));
    const cqsa_dtype dtype = tensor->dtype;
    if (dtype == CQSA_DTYPE_F32 || dtype == CQSA_DTYPE_F16 || dtype == CQSA_DTYPE_BF16) return CQSA_OK;
    return fail(CQSA_ERROR_DTYPE, "%s is %s, wanted f32, f16 or bf16", name, dtype_name(dtype));
  }
};

const char* const matrix_axes[] = {"rows", "row_elements"};

// Nobody goes to an empty tensor, whose address may be anything.
void* first_element(const cqsa_tensor& tensor) {
  return is_empty(tensor) ? nullptr : static_cast<char*>(tensor.data) + tensor.byte_offset;
}

cqsa_status check_ids(const cqsa_context& context, const cqsa_tensor& ids, int64_t rows) {
  if (!context.is_host()) return CQSA_OK;
  int64_t stride = 0;
  strides_of(ids, &stride);
  const void* const first = first_element(ids);
  for (int64_t n = 0; n < ids.shape[0]; ++n) {
    const int64_t id = index_at(first, ids.dtype, n * stride);
    if (id < 0 || id >= rows)
      return fail(CQSA_ERROR_INDEX, "row_ids[%" PRId64 "] is %" PRId64 ", wanted 0 to %" PRId64 ": w has %" PRId64 " rows", n, id, rows - 1, rows);
  }
  return CQSA_OK;
}

cqsa_status check_range(int64_t first_row, int64_t count, int64_t rows) {
  if (first_row >= 0 && first_row <= rows && count <= rows - first_row) return CQSA_OK;
  return fail(CQSA_ERROR_INDEX, "first_row is %" PRId64 " and out has %" PRId64 " rows, but w has %" PRId64, first_row, count, rows);
}

cqsa_status check_rows(operands& all, const quant_matrix& w, int64_t first_row, const cqsa_tensor* row_ids, const cqsa_tensor& out) {
  static const char* const axes[] = {"rows"};
  if (row_ids == nullptr) return check_range(first_row, out.shape[0], w.rows());
  CQSA_TRY(all.check(row_ids, "row_ids", 1));
  if (row_ids->dtype != CQSA_DTYPE_I32 && row_ids->dtype != CQSA_DTYPE_I64)
    return fail(CQSA_ERROR_DTYPE, "row_ids is %s, wanted i32 or i64", dtype_name(row_ids->dtype));
  CQSA_TRY(check_shape(*row_ids, "row_ids", out.shape, 1, false, axes));
  if (first_row != 0) return fail(CQSA_ERROR_INVALID_ARGUMENT, "first_row is %" PRId64 ", wanted 0 with row_ids", first_row);
  CQSA_TRY(check_no_overlap(out, "out", *row_ids, "row_ids"));
  return check_ids(all.context, *row_ids, w.rows());
}

cqsa_status check_dequantize(operands& all, const quant_matrix& w, int64_t first_row, const cqsa_tensor* row_ids, const cqsa_tensor* out) {
  CQSA_TRY(all.check_float(out, "out"));
  const int64_t wanted[] = {out->shape[0], w.row_elements()};
  CQSA_TRY(check_shape(*out, "out", wanted, 2, false, matrix_axes));
  CQSA_TRY(check_no_self_overlap(*out, "out"));
  CQSA_TRY(check_no_overlap(*out, "out", w.bytes(), "w"));
  return check_rows(all, w, first_row, row_ids, *out);
}

cqsa_dequantize_leaf dequantize_leaf(const quant_matrix& w, int64_t first_row, const cqsa_tensor* row_ids, const cqsa_tensor& out) {
  cqsa_dequantize_leaf leaf{};
  leaf.struct_size = sizeof leaf;
  leaf.format = w.format_id();
  leaf.data = w.data();
  leaf.rows = w.rows(), leaf.row_elements = w.row_elements(), leaf.row_bytes = w.row_bytes();
  leaf.count = out.shape[0], leaf.first_row = first_row;
  if (row_ids) {
    leaf.row_ids = first_element(*row_ids), leaf.row_ids_dtype = row_ids->dtype;
    strides_of(*row_ids, &leaf.row_ids_stride);
  }
  leaf.out = first_element(out), leaf.out_dtype = out.dtype;
  strides_of(out, leaf.out_stride);
  return leaf;
}

cqsa_quantize_leaf quantize_leaf(const cqsa_tensor& x, const quant_matrix& w) {
  cqsa_quantize_leaf leaf{};
  leaf.struct_size = sizeof leaf;
  leaf.format = w.format_id();
  leaf.x = first_element(x), leaf.x_dtype = x.dtype;
  strides_of(x, leaf.x_stride);
  leaf.rows = w.rows(), leaf.row_elements = w.row_elements(), leaf.row_bytes = w.row_bytes();
  leaf.data = w.data();
  return leaf;
}

template <class Leaf> cqsa_status run(const cqsa_context& context, cqsa_status (*work)(void*, const Leaf*, const cqsa_exec*, void*), const Leaf& leaf,
                                      const char* what, void* stream) {
  const cqsa_exec exec = plain_exec(context);
  const cqsa_status status = work(context.device, &leaf, context.is_host() ? &exec : nullptr, stream);
  if (status == CQSA_OK || status == CQSA_ERROR_CALLBACK) return status;
  return fail(status, "%s failed: %s", what, context.backend->last_error());
}

cqsa_status no_leaf(const cqsa_context& context, const char* what) {
  return fail(CQSA_ERROR_UNSUPPORTED, "backend %s has no %s", context.backend->name, what);
}

}  // namespace

cqsa_status dequantize_rows(const cqsa_context& context, const cqsa_quant_tensor* caller, int64_t first_row, const cqsa_tensor* row_ids,
                            const cqsa_tensor* out, void* stream) {
  operands all{context, {}};
  quant_matrix w;
  CQSA_TRY(all.check_matrix(caller, w));
  CQSA_TRY(check_dequantize(all, w, first_row, row_ids, out));
  if (context.backend->dequantize_rows == nullptr) return no_leaf(context, "dequantize_rows");
  if (is_empty(*out)) return CQSA_OK;
  return run(context, context.backend->dequantize_rows, dequantize_leaf(w, first_row, row_ids, *out), "dequantize_rows", stream);
}

cqsa_status quantize_rows(const cqsa_context& context, const cqsa_tensor* x, const cqsa_quant_tensor* caller, void* stream) {
  operands all{context, {}};
  quant_matrix w;
  CQSA_TRY(all.check_float(x, "x"));
  CQSA_TRY(all.check_matrix(caller, w));
  const int64_t wanted[] = {w.rows(), w.row_elements()};
  CQSA_TRY(check_shape(*x, "x", wanted, 2, false, matrix_axes));
  CQSA_TRY(check_no_overlap(w.bytes(), "w", *x, "x"));
  if (!w.format().can_quantize)
    return fail(CQSA_ERROR_UNSUPPORTED, "w->format is %s, which can be read only: wanted F32, F16, BF16, Q2_0, Q4_0, Q8_0, IQ4_NL or MXFP4",
                w.format().name);
  if (context.backend->quantize_rows == nullptr) return no_leaf(context, "quantize_rows");
  if (is_empty(*x)) return CQSA_OK;
  return run(context, context.backend->quantize_rows, quantize_leaf(*x, w), "quantize_rows", stream);
}

}  // namespace cqsa
