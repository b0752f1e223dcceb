// SPDX-License-Identifier: Apache-2.0
// Memory and a stream of the device that a backend computes on. The C API has none to give: an application brings its own
// operands, and so must this command when it tests with operands on the device. The vendor's driver is opened at run time.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace tool {

class device_memory {
 public:
  device_memory() = default;
  device_memory(const device_memory&) = delete;
  device_memory& operator=(const device_memory&) = delete;
  virtual ~device_memory() = default;

  virtual int32_t device_type() const = 0;  // CQSA_DEVICE_* of its memory ..
  virtual int32_t pinned_type() const = 0;  // .. and of the host memory that it pins
  // Failures are exceptions. At least 256 bytes aligned.
  virtual void* allocate(uint64_t bytes, bool pinned) = 0;
  virtual void release(void* memory, bool pinned) noexcept = 0;
  virtual void upload(void* to, const void* from, uint64_t bytes) = 0;
  virtual void download(void* to, const void* from, uint64_t bytes) = 0;
  virtual void copy(void* to, const void* from, uint64_t bytes) = 0;  // within the device, queued on stream()
  virtual void* stream() = 0;  // for the library; work on it is done after wait()
  virtual void wait() = 0;
};

// Of device 0 of a backend: "cuda", or a plugin that has the functions of tests/fake/fake_backend.h. Throws, with the reason,
// when there is no way to its memory.
std::unique_ptr<device_memory> open_device_memory(const std::string& backend);

// A piece of it, or of pinned host memory.
class device_buffer {
 public:
  device_buffer() = default;
  device_buffer(device_memory& from, uint64_t bytes, bool pinned)
      : from_(&from), memory_(from.allocate(bytes, pinned)), bytes_(bytes), pinned_(pinned) {}
  device_buffer(device_buffer&& other) noexcept
      : from_(other.from_), memory_(std::exchange(other.memory_, nullptr)), bytes_(other.bytes_), pinned_(other.pinned_) {}
  device_buffer& operator=(device_buffer&& other) noexcept {
    std::swap(from_, other.from_);
    std::swap(memory_, other.memory_);
    std::swap(bytes_, other.bytes_);
    std::swap(pinned_, other.pinned_);
    return *this;
  }
  ~device_buffer() {
    if (memory_) from_->release(memory_, pinned_);
  }

  void* address() const { return memory_; }
  uint64_t bytes() const { return bytes_; }
  void write(const void* from) { write_part(0, from, bytes_); }
  void read(void* to) const { read_part(0, to, bytes_); }
  void write_part(uint64_t offset, const void* from, uint64_t bytes);
  void read_part(uint64_t offset, void* to, uint64_t bytes) const;
  const void* host_address() const { return pinned_ ? memory_ : nullptr; }  // where the host may read it in place

 private:
  device_memory* from_ = nullptr;
  void* memory_ = nullptr;
  uint64_t bytes_ = 0;
  bool pinned_ = false;
};

}  // namespace tool
