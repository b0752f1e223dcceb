// SPDX-License-Identifier: Apache-2.0
#include "fp8_array.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include <fmt/format.h>

#include "elements.h"
#include "library.h"

namespace tool {
namespace {

constexpr int64_t kGuard = 256;  // bytes before and after
constexpr std::byte kFill{0xFF};

int64_t bytes_of(cqsa_dtype dtype) { return (dtype >> 8 & 255) / 8; }

}  // namespace

fp8_layout fp8_layout_by_name(const std::string& name) {
  if (name == "packed") return fp8_layout::packed;
  if (name == "gapped") return fp8_layout::gapped;
  if (name == "transposed") return fp8_layout::transposed;
  throw std::runtime_error(fmt::format("layout={}: packed, gapped or transposed is wanted", name));
}

fp8_array::fp8_array(device_memory* device, cqsa_dtype dtype, std::vector<int64_t> shape, fp8_layout layout)
    : dtype_(dtype), bytes_(bytes_of(dtype)), shape_(std::move(shape)), device_(device) {
  place(layout);
  if (device_) buffer_ = device_buffer(*device_, memory_.size(), false);
}

void fp8_array::place(fp8_layout layout) {
  strides_.assign(shape_.size(), 1);
  int64_t step = 1;
  for (std::size_t i = shape_.size(); i-- > 0;) {
    strides_[i] = step;
    step *= std::max<int64_t>(shape_[i], 1);
    if (layout == fp8_layout::gapped && i + 1 == shape_.size()) step += 3;
  }
  if (layout == fp8_layout::transposed && shape_.size() >= 2) {
    const std::size_t row = shape_.size() - 2;
    strides_[row] = 1, strides_[row + 1] = std::max<int64_t>(shape_[row], 1);
  }
  first_ = kGuard + (layout == fp8_layout::gapped ? bytes_ : 0);
  memory_.assign(static_cast<std::size_t>(step * bytes_ + 2 * kGuard + bytes_), kFill);
}

int64_t fp8_array::count() const {
  int64_t n = present() ? 1 : 0;
  for (const int64_t size : shape_) n *= size;
  return n;
}

int64_t fp8_array::offset(int64_t n) const {
  int64_t at = 0;
  for (std::size_t i = shape_.size(); i-- > 0; n /= shape_[i]) at += n % shape_[i] * strides_[i];
  return first_ + at * bytes_;
}

std::byte* fp8_array::at(int64_t n) { return memory_.data() + offset(n); }
void* fp8_array::address() { return (device_ ? static_cast<std::byte*>(buffer_.address()) : memory_.data()) + first_; }

const cqsa_tensor* fp8_array::view() {
  if (!present()) return nullptr;
  tensor_ = {address(), device_ ? device_->device_type() : CQSA_DEVICE_CPU, 0, static_cast<int32_t>(shape_.size()), dtype_, shape_.data(), strides_.data(), 0};
  return &tensor_;
}

void fp8_array::upload() {
  if (device_) buffer_.write(memory_.data());
}
void fp8_array::download() {
  if (device_ && present()) buffer_.read(memory_.data());
}

bool fp8_array::untouched_around() const {
  std::vector<std::byte> rest = memory_;
  for (int64_t n = 0, all = count(); n < all; ++n) std::fill_n(rest.begin() + offset(n), bytes_, kFill);
  return std::all_of(rest.begin(), rest.end(), [](std::byte b) { return b == kFill; });
}

float fp8_array::get(int64_t n) { return static_cast<float>(decode(dtype_, at(n))); }
void fp8_array::set(int64_t n, double value) { encode(dtype_, value, at(n)); }
std::vector<float> fp8_array::floats() {
  std::vector<float> out(static_cast<std::size_t>(count()));
  for (std::size_t n = 0; n < out.size(); ++n) out[n] = get(static_cast<int64_t>(n));
  return out;
}

fp8_workspace::fp8_workspace(cqsa_context* context, device_memory* device, uint64_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  if (device) {
    buffer_ = device_buffer(*device, bytes, false);
    address_ = buffer_.address();
  } else {
    host_.resize(static_cast<std::size_t>(bytes) + CQSA_WORKSPACE_ALIGNMENT);
    const auto start = reinterpret_cast<uintptr_t>(host_.data());
    address_ = host_.data() + (CQSA_WORKSPACE_ALIGNMENT - start % CQSA_WORKSPACE_ALIGNMENT) % CQSA_WORKSPACE_ALIGNMENT;
  }
  require(cqsa_fp8_workspace_init(context, address_, bytes, device ? device->stream() : nullptr));
}

}  // namespace tool
