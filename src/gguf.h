// SPDX-License-Identifier: Apache-2.0
// A GGUF file: mapped, and its table of contents checked against the bytes that are there. docs/quant.md says what is in one.
#pragma once
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "error.h"

namespace cqsa {

// A file in memory, or none.
class mapped_bytes {
 public:
  mapped_bytes() = default;
  ~mapped_bytes();
  mapped_bytes(const mapped_bytes&) = delete;
  mapped_bytes& operator=(const mapped_bytes&) = delete;
  cqsa_status map(const char* path);
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::span<const std::byte> bytes_;
};

struct gguf_tensor {
  std::string name;
  uint32_t ggml_type = 0;
  cqsa_quant_format format = CQSA_QUANT_NONE;
  int32_t ndim = 0;
  int64_t shape[4] = {1, 1, 1, 1};  // slowest axis first
  uint64_t offset = 0;              // in the file
  uint64_t bytes = 0;
};

struct gguf_value {
  std::string key;
  uint32_t type = 0;
  std::span<const std::byte> bytes;  // of a text: without its length
};

}  // namespace cqsa

// What stands behind the handle.
struct cqsa_gguf {
 public:
  static cqsa_status open(const char* path, cqsa_gguf** out);
  // A file that is in memory already, and stays there. `name` is for messages.
  static cqsa_status parse(std::span<const std::byte> file, const char* name, std::unique_ptr<cqsa_gguf>& out);

  int64_t tensor_count() const { return static_cast<int64_t>(tensors_.size()); }
  int64_t key_count() const { return static_cast<int64_t>(values_.size()); }
  const char* key(int64_t index) const;
  cqsa_status find(std::string_view name, int64_t& index_out) const;
  cqsa_status describe(int64_t index, cqsa_gguf_tensor_info* info_out) const;
  cqsa_status matrix(int64_t index, int64_t expert, cqsa_quant_tensor* matrix_out) const;
  cqsa_status integer(std::string_view key, int64_t& out) const;
  cqsa_status number(std::string_view key, double& out) const;
  cqsa_status text(std::string_view key, char* buffer, uint64_t size, uint64_t* length_out) const;

 private:
  friend class gguf_reader;
  using index = std::unordered_map<std::string_view, size_t>;

  cqsa_status find_value(std::string_view key, const cqsa::gguf_value*& out) const;
  cqsa_status check_index(int64_t index) const;

  cqsa::mapped_bytes mapping_;
  std::span<const std::byte> file_;
  std::vector<cqsa::gguf_tensor> tensors_;  // neither grows once the names below point into it
  std::vector<cqsa::gguf_value> values_;
  index tensor_index_, value_index_;
};
