// SPDX-License-Identifier: Apache-2.0
#include "quant_format.h"

#include <cinttypes>
#include <cstdio>

#include "abi_struct.h"
#include "tensor.h"

namespace cqsa {

namespace {

constexpr uint32_t first_info = sizeof(cqsa_quant_format_info), first_tensor = sizeof(cqsa_quant_tensor);

}  // namespace

cqsa_status describe_quant_format(cqsa_quant_format format, cqsa_quant_format_info* info_out) {
  CQSA_TRY(check_out_struct(info_out, "info_out", first_info));
  const quant_format* const known = find_quant_format(format);
  if (known == nullptr)
    return fail(CQSA_ERROR_UNKNOWN_FLAG, "format is %" PRId32 ", wanted one of CQSA_QUANT_*, 1 to %" PRId32, format, quant_format_count - 1);
  cqsa_quant_format_info info{};
  std::snprintf(info.name, sizeof info.name, "%s", known->name);
  info.ggml_type = known->ggml_type;
  info.block_elements = known->block_elements, info.block_bytes = known->block_bytes;
  info.can_quantize = known->can_quantize;
  write_struct(info, info_out);
  return CQSA_OK;
}

cqsa_status quant_matrix::read(const cqsa_quant_tensor* caller, const char* name) {
  CQSA_TRY(copy_struct(caller, name, first_tensor, 0, tensor_));
  format_ = find_quant_format(tensor_.format);
  if (format_ == nullptr)
    return fail(CQSA_ERROR_UNKNOWN_FLAG, "%s->format is %" PRId32 ", wanted one of CQSA_QUANT_*, 1 to %" PRId32, name, tensor_.format,
                quant_format_count - 1);
  if (tensor_.reserved != 0) return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s->reserved is %" PRId32 ", wanted 0", name, tensor_.reserved);
  CQSA_TRY(check_sizes(name));
  CQSA_TRY(check_addresses(name));
  bytes_ = {tensor_.data, tensor_.device_type, tensor_.device_id, 2, CQSA_DTYPE_U8, shape_, strides_, 0};
  byte_extent extent;
  CQSA_TRY(check_tensor(&bytes_, name, 2, 2, &extent));
  return check_length(name);
}

cqsa_status quant_matrix::check_sizes(const char* name) {
  const int64_t elements = tensor_.row_elements, block = format_->block_elements;
  if (tensor_.rows < 0) return fail(CQSA_ERROR_SHAPE, "%s->rows is %" PRId64 ", wanted at least 0", name, tensor_.rows);
  if (elements < 0 || elements % block != 0)
    return fail(CQSA_ERROR_SHAPE, "%s->row_elements is %" PRId64 ", wanted a multiple of %" PRId64 ", the block of %s", name, elements, block,
                format_->name);
  int64_t own = 0;
  if (multiply_overflows(elements / block, format_->block_bytes, &own))
    return fail(CQSA_ERROR_SHAPE, "%s->row_elements is %" PRId64 ", whose bytes do not fit 64 bits", name, elements);
  const uint64_t stated = tensor_.row_bytes;
  if (stated != 0 && stated < static_cast<uint64_t>(own))
    return fail(CQSA_ERROR_SHAPE, "%s->row_bytes is %" PRIu64 ", wanted at least %" PRId64 " for %" PRId64 " elements of %s", name, stated, own,
                elements, format_->name);
  if (stated > INT64_MAX) return fail(CQSA_ERROR_STRIDES, "%s->row_bytes is %" PRIu64 ", wanted less than 2^63", name, stated);
  shape_[0] = tensor_.rows, shape_[1] = own;
  strides_[0] = stated != 0 ? static_cast<int64_t>(stated) : own, strides_[1] = 1;
  return CQSA_OK;
}

// Blocks hold numbers of two bytes, which a GPU cannot read at an odd address.
cqsa_status quant_matrix::check_addresses(const char* name) const {
  if (format_->block_bytes % 2 != 0 || tensor_.rows == 0 || tensor_.row_elements == 0) return CQSA_OK;
  if (reinterpret_cast<uintptr_t>(tensor_.data) % 2 != 0)
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s->data is %p, wanted an even address for %s", name, tensor_.data, format_->name);
  if (strides_[0] % 2 != 0)
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s->row_bytes is %" PRId64 ", wanted an even number for %s", name, strides_[0], format_->name);
  return CQSA_OK;
}

// The extent of all rows has been found to fit 64 bits; the bytes after the last one's own may not.
cqsa_status quant_matrix::check_length(const char* name) const {
  const uint64_t stated = tensor_.data_bytes;
  if (stated == 0) return CQSA_OK;
  const bool empty = is_empty(bytes_);
  const uint64_t stride = static_cast<uint64_t>(strides_[0]), own = static_cast<uint64_t>(shape_[1]);
  const uint64_t least = empty ? 0 : static_cast<uint64_t>(shape_[0] - 1) * stride + own, most = empty ? 0 : least + (stride - own);
  if (stated >= least && stated <= most) return CQSA_OK;
  return fail(CQSA_ERROR_SHAPE, "%s->data_bytes is %" PRIu64 ", wanted %" PRIu64 " for %" PRId64 " rows of %" PRId64 " elements of %s", name, stated,
              least, tensor_.rows, tensor_.row_elements, format_->name);
}

}  // namespace cqsa
