// SPDX-License-Identifier: Apache-2.0
// GGUF files made byte by byte, valid and not.
#pragma once
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace cqsa::test {

struct gguf_bytes {
  std::vector<uint8_t> bytes;

  template <class T> gguf_bytes& put(T value) {
    const auto* const from = reinterpret_cast<const uint8_t*>(&value);
    bytes.insert(bytes.end(), from, from + sizeof value);
    return *this;
  }
  gguf_bytes& name(const std::string& text) {
    put<uint64_t>(text.size());
    bytes.insert(bytes.end(), text.begin(), text.end());
    return *this;
  }
  gguf_bytes& header(uint64_t tensors, uint64_t keys, uint32_t version = 3) { return put<uint32_t>(0x46554747).put(version).put(tensors).put(keys); }
  gguf_bytes& key(const std::string& text, uint32_t type) { return name(text).put(type); }
  // shape: fastest axis first, as in the file.
  gguf_bytes& tensor(const std::string& text, const std::vector<uint64_t>& shape, uint32_t type, uint64_t offset) {
    name(text).put(static_cast<uint32_t>(shape.size()));
    for (uint64_t size : shape) put(size);
    return put(type).put(offset);
  }
  gguf_bytes& pad(size_t multiple) {
    while (bytes.size() % multiple) bytes.push_back(0);
    return *this;
  }
  gguf_bytes& data(size_t count) {
    for (size_t i = 0; i < count; ++i) bytes.push_back(static_cast<uint8_t>(i * 7 + 1));
    return *this;
  }
};

}  // namespace cqsa::test
