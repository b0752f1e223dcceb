// SPDX-License-Identifier: Apache-2.0
// Arrays in files, and views of them that the library takes.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cqsa.h"
#include "elements.h"

namespace tool {

// A compact row-major array inside a mapped file. The file outlives it.
struct file_array {
  std::string name;
  const element_type* type;
  std::vector<int64_t> shape;
  const std::byte* data;
};

// Elements of a shape times bytes per element. Throws when it does not fit in 63 bits; `what` begins the message.
int64_t byte_count(const std::vector<int64_t>& shape, int64_t element_bytes, const std::string& what);
std::string shape_text(const std::vector<int64_t>& shape);  // "[2, 8, 512, 64]"

// A cqsa_tensor together with the sizes and strides it points to; it must not move while the tensor is in use.
class tensor_view {
 public:
  tensor_view() = default;
  tensor_view(const tensor_view&) = delete;
  tensor_view& operator=(const tensor_view&) = delete;

  // Compact row-major memory of the host. 1 to 4 axes, or none for a scalar.
  void set(const void* data, cqsa_dtype dtype, const std::vector<int64_t>& shape);
  // [batch, seq, heads, ..] seen as [batch, heads, seq, ..].
  void swap_middle_axes();

  const cqsa_tensor* get() const { return &tensor_; }
  bool present() const { return tensor_.dtype != CQSA_DTYPE_NONE; }
  int64_t size(int axis) const { return shape_[axis]; }

 private:
  std::array<int64_t, 4> shape_{}, strides_{};
  cqsa_tensor tensor_{};
};

}  // namespace tool
