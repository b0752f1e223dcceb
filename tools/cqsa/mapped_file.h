// SPDX-License-Identifier: Apache-2.0
// Files as memory: inputs mapped read-only, outputs mapped under a temporary name and renamed when complete, or in place when
// a later call is to go on with them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include <sys/stat.h>

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
  // Throws when the file was written or cut since it was opened: what was read of it may be neither old nor new.
  void require_unchanged() const;
  bool is_file(const struct stat& status) const { return status.st_dev == seen_.st_dev && status.st_ino == seen_.st_ino; }

 private:
  std::string path_;
  int fd_ = -1;
  struct stat seen_ = {};
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

// A file of known size that appears under its name only at commit(); without it nothing is left behind. kept: it appears there
// at reserve() and stays whatever happens, for a later call to go on with; continued: it is that file.
enum class output_mode { temporary, kept, continued };
class output_file {
 public:
  output_file(const std::string& path, std::size_t size, output_mode mode);
  ~output_file();
  output_file(output_file&& other) noexcept;
  output_file& operator=(output_file&&) = delete;

  std::span<std::byte> bytes() const { return {static_cast<std::byte*>(data_), size_}; }
  // Gets the disk space, so that a full disk is an error here and not a signal when a page is written; then takes its place if
  // it is to be kept.
  void reserve();
  void commit();
  void drop_pages() const noexcept;

 private:
  void create(const std::string& path);
  void reopen(const std::string& path);
  void take_place();

  std::string path_, temporary_;  // temporary_ empty: it is at path_
  output_mode mode_;
  int fd_ = -1;
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace tool
