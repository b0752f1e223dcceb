// SPDX-License-Identifier: Apache-2.0
#include "array.h"

#include <stdexcept>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace tool {

int64_t byte_count(const std::vector<int64_t>& shape, int64_t element_bytes, const std::string& what) {
  int64_t bytes = element_bytes;
  for (const int64_t size : shape)
    if (size == 0) return 0;
  for (const int64_t size : shape)
    if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes))
      throw std::runtime_error(fmt::format("{}: shape {} is larger than any memory", what, shape_text(shape)));
  return bytes;
}

std::string shape_text(const std::vector<int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

void tensor_view::set(const void* data, cqsa_dtype dtype, const std::vector<int64_t>& shape) {
  if (shape.size() > shape_.size())
    throw std::runtime_error(fmt::format("shape {} has {} axes; at most 4 are wanted", shape_text(shape), shape.size()));
  const int ndim = static_cast<int>(shape.size());
  int64_t stride = 1;
  for (int axis = ndim; axis-- > 0; stride *= shape[axis]) {
    shape_[axis] = shape[axis];
    strides_[axis] = stride;
  }
  tensor_ = {const_cast<void*>(data), CQSA_DEVICE_CPU, 0, ndim, dtype, shape_.data(), strides_.data(), 0};
}

void tensor_view::swap_middle_axes() {
  std::swap(shape_[1], shape_[2]);
  std::swap(strides_[1], strides_[2]);
}

}  // namespace tool
