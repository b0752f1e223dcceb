// SPDX-License-Identifier: Apache-2.0
// Files as memory: inputs mapped read-only, outputs mapped under a temporary name and renamed when complete.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace tool {

// A whole file, read-only. Pages are read when they are touched, never all at once.
class mapped_file {
 public:
  explicit mapped_file(const std::string& path);
  ~mapped_file();
  mapped_file(mapped_file&& other) noexcept;
  mapped_file& operator=(mapped_file&&) = delete;

  std::span<const std::byte> bytes() const { return {static_cast<const std::byte*>(data_), size_}; }
  // Takes the pages out of this process's resident set; touching them brings them back from the page cache.
  void drop_pages() const noexcept;

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

// A file of known size that appears under its name only at commit(); without it nothing is left behind.
class output_file {
 public:
  output_file(const std::string& path, std::size_t size);
  ~output_file();
  output_file(output_file&& other) noexcept;
  output_file& operator=(output_file&&) = delete;

  std::span<std::byte> bytes() const { return {static_cast<std::byte*>(data_), size_}; }
  // Gets the disk space, so that a full disk is an error here and not a signal when a page is written.
  void reserve();
  void commit();
  void drop_pages() const noexcept;

 private:
  std::string path_, temporary_;
  int fd_ = -1;
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace tool
