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

mapped_file::mapped_file(const std::string& path) : path_(path) {
  // O_NONBLOCK: opening a pipe must not wait for a writer; it is refused below.
  descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.fd < 0) fail(path, "cannot be opened", errno);
  if (::fstat(file.fd, &seen_) != 0) fail(path, "cannot be examined", errno);
  if (!S_ISREG(seen_.st_mode))
    throw std::runtime_error(fmt::format("{}: is not a regular file, so it cannot be mapped", path));
  size_ = static_cast<std::size_t>(seen_.st_size);
  void* data = nullptr;  // an empty range cannot be mapped
  if (size_ > 0) data = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.fd, 0);
  if (data == MAP_FAILED) fail(path, "cannot be mapped", errno);
  data_ = data;
  fd_ = std::exchange(file.fd, -1);
}

mapped_file::~mapped_file() {
  if (data_) ::munmap(data_, size_);
  if (fd_ >= 0) ::close(fd_);
}

mapped_file::mapped_file(mapped_file&& other) noexcept
    : path_(std::move(other.path_)),
      fd_(std::exchange(other.fd_, -1)),
      seen_(other.seen_),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

void mapped_file::drop_pages() const noexcept {
  if (data_) ::madvise(data_, size_, MADV_DONTNEED);
}

void mapped_file::require_unchanged() const {
  struct stat now;
  if (::fstat(fd_, &now) != 0) fail(path_, "cannot be examined", errno);
  if (now.st_size == seen_.st_size && now.st_mtim.tv_sec == seen_.st_mtim.tv_sec &&
      now.st_mtim.tv_nsec == seen_.st_mtim.tv_nsec)
    return;
  throw std::runtime_error(fmt::format("{}: was changed during the run, so the result is of no use", path_));
}

output_file::output_file(const std::string& path, std::size_t size, output_mode mode)
    : path_(output_target(path)), mode_(mode), size_(size) {
  mode == output_mode::continued ? reopen(path) : create(path);
  void* data = MAP_FAILED;
  if (::ftruncate(fd_, static_cast<off_t>(size)) == 0) data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    if (!temporary_.empty()) ::unlink(temporary_.c_str());
    ::close(fd_);
    fail(path, "cannot be mapped for writing", error);
  }
  data_ = data;
}

void output_file::create(const std::string& path) {
  // One that is to be kept has the same name every time, so that a kill before it takes its place leaves at most one behind.
  const bool kept = mode_ == output_mode::kept;
  temporary_ = path_ + (kept ? ".begun" : ".XXXXXX");
  fd_ = kept ? ::open(temporary_.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600) : ::mkostemp(temporary_.data(), O_CLOEXEC);
  if (fd_ < 0) {
    const int error = errno;
    temporary_.clear();
    fail(path, "cannot be created", error);
  }
  remove_on_crash(temporary_);
  ::fchmod(fd_, creation_mode());
}

void output_file::reopen(const std::string& path) {
  fd_ = ::open(path_.c_str(), O_RDWR | O_CLOEXEC);
  if (fd_ < 0) fail(path, "cannot be opened to go on with it", errno);
  struct stat found = {};
  if (::fstat(fd_, &found) == 0 && found.st_size == static_cast<off_t>(size_)) return;
  ::close(fd_);
  throw std::runtime_error(fmt::format("{}: has {} bytes, but the output that was begun has {}", path, found.st_size, size_));
}

void output_file::take_place() {
  if (std::rename(temporary_.c_str(), path_.c_str()) != 0) fail(path_, "cannot be renamed into place", errno);
  temporary_.clear();
  forget_crash_files();
}

output_file::~output_file() {
  if (data_) ::munmap(data_, size_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
  if (fd_ >= 0) ::close(fd_);
}

output_file::output_file(output_file&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, {})),
      mode_(other.mode_),
      fd_(std::exchange(other.fd_, -1)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

void output_file::reserve() {
  const int error = ::posix_fallocate(fd_, 0, static_cast<off_t>(size_));
  if (error != 0) fail(path_, fmt::format("no room for {} bytes", size_).c_str(), error);
  if (mode_ == output_mode::kept) take_place();
}

void output_file::commit() {
  if (::msync(data_, size_, MS_SYNC) != 0 || ::fsync(fd_) != 0) fail(path_, "cannot be written", errno);
  if (!temporary_.empty()) take_place();
}

void output_file::drop_pages() const noexcept { ::madvise(data_, size_, MADV_DONTNEED); }

}  // namespace tool
