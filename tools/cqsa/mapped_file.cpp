// SPDX-License-Identifier: Apache-2.0
#include "mapped_file.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fmt/format.h>

#include "interrupt.h"

namespace tool {
namespace {

[[noreturn]] void fail(const std::string& path, const char* what, int error) {
  throw std::runtime_error(fmt::format("{}: {}: {}", path, what, std::strerror(error)));
}

// Closes a descriptor on every way out.
struct descriptor {
  int fd;
  ~descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

// The path behind symbolic links, so that renaming replaces the file and not the link to it. Something other than a regular
// file (a folder, /dev/null) is refused: renaming would replace the device itself.
std::string output_target(const std::string& path) {
  std::error_code error;
  const std::filesystem::path target = std::filesystem::weakly_canonical(path, error);
  if (error) fail(path, "cannot be resolved", error.value());
  const auto status = std::filesystem::status(target, error);
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status))
    throw std::runtime_error(fmt::format("{}: is not a regular file, so it cannot be replaced by the output", path));
  return target.string();
}

mode_t creation_mode() {
  const mode_t mask = ::umask(0);
  ::umask(mask);
  return 0666 & ~mask;
}

}  // namespace

mapped_file::mapped_file(const std::string& path) {
  // O_NONBLOCK: opening a pipe must not wait for a writer; it is refused below.
  const descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.fd < 0) fail(path, "cannot be opened", errno);
  struct stat status;
  if (::fstat(file.fd, &status) != 0) fail(path, "cannot be examined", errno);
  if (!S_ISREG(status.st_mode))
    throw std::runtime_error(fmt::format("{}: is not a regular file, so it cannot be mapped", path));
  size_ = static_cast<std::size_t>(status.st_size);
  if (size_ == 0) return;  // an empty range cannot be mapped
  data_ = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.fd, 0);
  if (data_ == MAP_FAILED) fail(path, "cannot be mapped", errno);
}

mapped_file::~mapped_file() {
  if (data_) ::munmap(data_, size_);
}

mapped_file::mapped_file(mapped_file&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

void mapped_file::drop_pages() const noexcept {
  if (data_) ::madvise(data_, size_, MADV_DONTNEED);
}

output_file::output_file(const std::string& path, std::size_t size) : path_(output_target(path)), size_(size) {
  temporary_ = path_ + ".XXXXXX";
  fd_ = ::mkostemp(temporary_.data(), O_CLOEXEC);
  if (fd_ < 0) {
    const int error = errno;
    temporary_.clear();
    fail(path, "cannot be created", error);
  }
  remove_on_crash(temporary_);
  void* data = MAP_FAILED;
  if (::fchmod(fd_, creation_mode()) == 0 && ::ftruncate(fd_, static_cast<off_t>(size)) == 0)
    data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    ::unlink(temporary_.c_str());
    ::close(fd_);
    fail(path, "cannot be mapped for writing", error);
  }
  data_ = data;
}

output_file::~output_file() {
  if (data_) ::munmap(data_, size_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
  if (fd_ >= 0) ::close(fd_);
}

output_file::output_file(output_file&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, {})),
      fd_(std::exchange(other.fd_, -1)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

void output_file::reserve() {
  const int error = ::posix_fallocate(fd_, 0, static_cast<off_t>(size_));
  if (error != 0) fail(path_, fmt::format("no room for {} bytes", size_).c_str(), error);
}

void output_file::commit() {
  if (::msync(data_, size_, MS_SYNC) != 0 || ::fsync(fd_) != 0) fail(path_, "cannot be written", errno);
  if (std::rename(temporary_.c_str(), path_.c_str()) != 0) fail(path_, "cannot be renamed into place", errno);
  temporary_.clear();
  forget_crash_files();
}

void output_file::drop_pages() const noexcept { ::madvise(data_, size_, MADV_DONTNEED); }

}  // namespace tool
