// SPDX-License-Identifier: Apache-2.0
// Bytes of a fuzzer as numbers, and tensors whose memory ends where the heap's guards begin.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "cqsa.h"

namespace fuzz {

class bytes {
 public:
  bytes(const uint8_t* data, size_t size) : at_(data), left_(size) {}
  bool empty() const { return left_ == 0; }
  uint8_t byte() { return left_ ? (--left_, *at_++) : 0; }
  void fill(void* to, size_t size) {
    const size_t have = std::min(size, left_);
    std::memset(to, 0, size);
    if (have) std::memcpy(to, at_, have);
    at_ += have, left_ -= have;
  }
  int64_t upto(int64_t most) { return byte() % (most + 1); }
  template <class T>
  T one_of(std::initializer_list<T> list) { return list.begin()[byte() % list.size()]; }
  // Small mostly, now and then of any size.
  int64_t number() {
    const uint8_t kind = byte();
    if (kind < 128) return kind % 16;
    if (kind < 192) return -(kind % 8);
    if (kind < 224) return int64_t{1} << byte() % 64;
    int64_t any;
    fill(&any, sizeof any);
    return any;
  }

 private:
  const uint8_t* at_;
  size_t left_;
};

inline constexpr int64_t most_elements = 600;  // bounds the time of a run, together with the sizes below
inline constexpr int64_t most_bytes = 8192;

struct tensor {
  std::unique_ptr<char[]> memory;
  int64_t memory_bytes = 0;
  std::vector<int64_t> shape, strides;
  cqsa_tensor view{};

  // Compact, filled with the fuzzer's next byte, the one after, .. so that a few bytes make many different elements.
  void make(bytes& in, cqsa_dtype dtype, std::vector<int64_t> sizes) {
    int64_t count = 1;
    strides.assign(8, 1);
    for (size_t i = sizes.size(); i-- > 0; count *= std::max<int64_t>(sizes[i], 0)) strides[i] = count;
    memory_bytes = std::min(most_bytes, count * element_bytes(dtype));
    memory.reset(new char[static_cast<size_t>(memory_bytes)]);
    uint8_t value = in.byte();
    const uint8_t step = in.byte();
    for (int64_t i = 0; i < memory_bytes; ++i, value = static_cast<uint8_t>(value + step)) memory[static_cast<size_t>(i)] = static_cast<char>(value);
    view = {memory.get(), CQSA_DEVICE_CPU, 0, static_cast<int32_t>(sizes.size()), dtype, nullptr, nullptr, 0};
    shape = std::move(sizes);
    shape.resize(8, 1);
    view.shape = shape.data();
    view.strides = in.byte() % 4 ? strides.data() : nullptr;
  }
  // First rows or lengths: numbers that are right more often than not.
  void make_index(bytes& in, cqsa_dtype dtype, std::vector<int64_t> sizes, int64_t step) {
    make(in, dtype, std::move(sizes));
    const int64_t size = element_bytes(dtype);
    for (int64_t i = 0; size && i < memory_bytes / size; ++i) {
      const int64_t value = in.byte() % 8 ? i * step : in.number();
      std::memcpy(memory.get() + i * size, &value, static_cast<size_t>(size));  // little-endian
    }
  }
  void spoil(bytes& in) {
    switch (in.byte() % 10) {
      case 0: view.ndim = in.one_of<int32_t>({-1, 0, 1, 2, 3, 5, 6, 1000}); break;
      case 1: shape[in.byte() % 5u] = in.number(); break;
      case 2: strides[in.byte() % 5u] = in.number(), view.strides = strides.data(); break;
      case 3: view.byte_offset = static_cast<uint64_t>(in.number()); break;
      case 4: view.data = nullptr; break;
      case 5: view.shape = nullptr; break;
      case 6: view.device_type = in.byte() % 16; break;
      case 7: view.dtype = in.one_of<cqsa_dtype>({0, CQSA_DTYPE_I8, CQSA_DTYPE_I32, CQSA_DTYPE_F16, CQSA_DTYPE_F64, CQSA_DTYPE_E5M2, 77}); break;
      case 8: strides[in.byte() % 5u] *= -1; break;
      default: break;
    }
  }

  static int64_t element_bytes(cqsa_dtype dtype) { return (dtype >> 8 & 0xFF) / 8; }

  // Whether a caller may hand this over: it is memory that is there, or wrong in a way that the library must see before it looks
  // at memory.
  bool honest() const {
    if (view.ndim < 0 || view.ndim > 6 || view.shape == nullptr || view.data == nullptr || view.device_type != CQSA_DEVICE_CPU) return true;
    __int128 low = 0, high = 0, count = 1, compact = 1;
    for (int i = view.ndim; i-- > 0;) {
      const __int128 size = shape[static_cast<size_t>(i)], stride = view.strides ? __int128{strides[static_cast<size_t>(i)]} : compact;
      if (size <= 0) return true;
      (stride < 0 ? low : high) += (size - 1) * stride;
      compact *= size, count *= size;
      if (count > most_elements) return false;
    }
    const __int128 bytes_each = std::max<int64_t>(1, element_bytes(view.dtype));
    low = low * bytes_each + view.byte_offset, high = (high + 1) * bytes_each + view.byte_offset;
    return low >= 0 && high <= memory_bytes;
  }
};

}  // namespace fuzz
