// SPDX-License-Identifier: Apache-2.0
// Operands of the FP8 calls for `cqsa parity` and `cqsa bench`: a tensor in host memory, or in the device's with a copy in the host, between
// bytes that nothing may touch.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cqsa.h"
#include "device_memory.h"

namespace tool {

enum class fp8_layout { packed, gapped, transposed };  // gapped: an odd distance between rows, and no alignment
fp8_layout fp8_layout_by_name(const std::string& name);  // throws

class fp8_array {
 public:
  fp8_array() = default;
  // device nullptr: in host memory. Filled with bytes that are NaN in most types.
  fp8_array(device_memory* device, cqsa_dtype dtype, std::vector<int64_t> shape, fp8_layout layout = fp8_layout::packed);

  const cqsa_tensor* view();  // where the backend computes; nullptr when there is none
  bool present() const { return dtype_ != CQSA_DTYPE_NONE; }
  int64_t count() const;
  int64_t element_bytes() const { return bytes_; }
  void* address();  // of its first element there
  std::byte* at(int64_t n);  // the n-th element, row-major, in the host's copy
  void upload();
  void download();
  bool untouched_around() const;

  float get(int64_t n);  // F32, F16, BF16
  void set(int64_t n, double value);
  std::vector<float> floats();

 private:
  void place(fp8_layout layout);
  int64_t offset(int64_t n) const;

  cqsa_dtype dtype_ = CQSA_DTYPE_NONE;
  int64_t bytes_ = 0, first_ = 0;  // of an element; of element 0, in bytes
  std::vector<int64_t> shape_, strides_;
  std::vector<std::byte> memory_;
  device_buffer buffer_;
  device_memory* device_ = nullptr;
  cqsa_tensor tensor_{};
};

// A workspace of exactly so many bytes, made ready for a context.
class fp8_workspace {
 public:
  fp8_workspace() = default;
  fp8_workspace(cqsa_context* context, device_memory* device, uint64_t bytes);
  void* address() const { return address_; }
  uint64_t bytes() const { return bytes_; }

 private:
  std::vector<std::byte> host_;
  device_buffer buffer_;
  void* address_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace tool
