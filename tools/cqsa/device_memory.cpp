// SPDX-License-Identifier: Apache-2.0
#include "device_memory.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <vector>

#include <dlfcn.h>
#include <fmt/format.h>

#include "cqsa.h"

namespace tool {
namespace {

// A library that stays open until the process ends.
class opened_library {
 public:
  explicit opened_library(const std::string& name) : name_(name), handle_(::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (!handle_) throw std::runtime_error(fmt::format("operands cannot be put on the device: {}", ::dlerror()));
  }
  template <class Function> void find(Function*& function, const char* symbol) const {
    if (!find_optional(function, symbol))
      throw std::runtime_error(fmt::format("operands cannot be put on the device: {} has no {}", name_, symbol));
  }
  template <class Function> bool find_optional(Function*& function, const char* symbol) const {
    function = reinterpret_cast<Function*>(::dlsym(handle_, symbol));
    return function != nullptr;
  }

 private:
  std::string name_;
  void* handle_;
};

// ---- CUDA -------------------------------------------------------------------------------------------------------------------

// The driver's API, in the primary context of device 0, which is the one that the library works in. Addresses of device memory
// are 64-bit numbers in it.
class cuda_memory final : public device_memory {
 public:
  cuda_memory() {
    resolve();
    call(init_(0), "cuInit");
    call(retain_(&context_, 0), "cuDevicePrimaryCtxRetain");
    call(set_current_(context_), "cuCtxSetCurrent");  // this thread makes and waits; the library needs no current context
    constexpr unsigned non_blocking = 1;
    call(stream_create_(&stream_, non_blocking), "cuStreamCreate");
  }
  ~cuda_memory() override {
    stream_destroy_(stream_);
    release_context_(0);
  }

  int32_t device_type() const override { return CQSA_DEVICE_CUDA; }
  int32_t pinned_type() const override { return CQSA_DEVICE_CUDA_HOST; }
  void* allocate(uint64_t bytes, bool pinned) override {
    void* host = nullptr;
    uint64_t device = 0;
    if (pinned)
      call(host_alloc_(&host, bytes, 0), "cuMemHostAlloc");
    else
      call(alloc_(&device, bytes), "cuMemAlloc");
    return pinned ? host : reinterpret_cast<void*>(device);
  }
  void release(void* memory, bool pinned) noexcept override {
    if (pinned)
      host_free_(memory);
    else
      free_(reinterpret_cast<uint64_t>(memory));
  }
  void upload(void* to, const void* from, uint64_t bytes) override {
    call(to_device_(reinterpret_cast<uint64_t>(to), from, bytes), "cuMemcpyHtoD");
    call(synchronize_(nullptr), "cuStreamSynchronize");  // a copy from pageable memory may end after its function returned
  }
  void download(void* to, const void* from, uint64_t bytes) override {
    call(to_host_(to, reinterpret_cast<uint64_t>(from), bytes), "cuMemcpyDtoH");
  }
  void copy(void* to, const void* from, uint64_t bytes) override {
    call(on_device_(reinterpret_cast<uint64_t>(to), reinterpret_cast<uint64_t>(from), bytes, stream_), "cuMemcpyDtoDAsync");
  }
  void* stream() override { return stream_; }
  void wait() override { call(synchronize_(stream_), "cuStreamSynchronize"); }

 private:
  void resolve() {
    const opened_library driver("libcuda.so.1");
    driver.find(error_text_, "cuGetErrorString");
    driver.find(init_, "cuInit");
    driver.find(retain_, "cuDevicePrimaryCtxRetain");
    driver.find(release_context_, "cuDevicePrimaryCtxRelease_v2");
    driver.find(set_current_, "cuCtxSetCurrent");
    driver.find(stream_create_, "cuStreamCreate");
    driver.find(stream_destroy_, "cuStreamDestroy_v2");
    driver.find(synchronize_, "cuStreamSynchronize");
    driver.find(alloc_, "cuMemAlloc_v2");
    driver.find(free_, "cuMemFree_v2");
    driver.find(host_alloc_, "cuMemHostAlloc");
    driver.find(host_free_, "cuMemFreeHost");
    driver.find(to_device_, "cuMemcpyHtoD_v2");
    driver.find(to_host_, "cuMemcpyDtoH_v2");
    driver.find(on_device_, "cuMemcpyDtoDAsync_v2");
  }
  void call(int status, const char* function) const {
    if (status == 0) return;
    const char* text = nullptr;
    error_text_(status, &text);
    throw std::runtime_error(fmt::format("the driver's {} failed with {} ({})", function, status, text ? text : "unknown"));
  }

  int (*error_text_)(int, const char**);
  int (*init_)(unsigned);
  int (*retain_)(void**, int);
  int (*release_context_)(int);
  int (*set_current_)(void*);
  int (*stream_create_)(void**, unsigned);
  int (*stream_destroy_)(void*);
  int (*synchronize_)(void*);
  int (*alloc_)(uint64_t*, std::size_t);
  int (*free_)(uint64_t);
  int (*host_alloc_)(void**, std::size_t, unsigned);
  int (*host_free_)(void*);
  int (*to_device_)(uint64_t, const void*, std::size_t);
  int (*to_host_)(void*, uint64_t, std::size_t);
  int (*on_device_)(uint64_t, uint64_t, std::size_t, void*);
  void *context_ = nullptr, *stream_ = nullptr;
};

// ---- the fake device of the tests -------------------------------------------------------------------------------------------

class fake_memory final : public device_memory {
 public:
  explicit fake_memory(const std::string& plugin) {
    const opened_library library(plugin);
    library.find(alloc_, "fake_alloc");
    library.find(free_, "fake_free");
    library.find(pinned_alloc_, "fake_pinned_alloc");
    library.find(pinned_free_, "fake_pinned_free");
    library.find(write_, "fake_write");
    library.find(read_, "fake_read");
    void* (*make_stream)(int32_t);
    if (library.find_optional(make_stream, "fake_stream_create") && library.find_optional(wait_, "fake_stream_sync") &&
        library.find_optional(destroy_, "fake_stream_destroy"))
      stream_ = make_stream(0);
  }
  ~fake_memory() override {
    if (stream_) destroy_(stream_);
  }

  int32_t device_type() const override { return CQSA_DEVICE_EXT; }
  int32_t pinned_type() const override { return CQSA_DEVICE_CUDA_HOST; }
  void* allocate(uint64_t bytes, bool pinned) override {
    void* memory = (pinned ? pinned_alloc_ : alloc_)(bytes);
    if (!memory) throw std::runtime_error(fmt::format("the fake device has no {} bytes", bytes));
    return memory;
  }
  void release(void* memory, bool pinned) noexcept override { (pinned ? pinned_free_ : free_)(memory); }
  void upload(void* to, const void* from, uint64_t bytes) override { write_(to, from, bytes); }
  void download(void* to, const void* from, uint64_t bytes) override { read_(to, from, bytes); }
  void copy(void* to, const void* from, uint64_t bytes) override {
    std::vector<std::byte> between(bytes);
    read_(between.data(), from, bytes);
    write_(to, between.data(), bytes);
  }
  void* stream() override { return stream_; }
  void wait() override {
    if (stream_) wait_(stream_);
  }

 private:
  void* (*alloc_)(uint64_t);
  void (*free_)(void*);
  void* (*pinned_alloc_)(uint64_t);
  void (*pinned_free_)(void*);
  void (*write_)(void*, const void*, uint64_t);
  void (*read_)(void*, const void*, uint64_t);
  void (*wait_)(void*) = nullptr;
  void (*destroy_)(void*) = nullptr;
  void* stream_ = nullptr;
};

}  // namespace

std::unique_ptr<device_memory> open_device_memory(const std::string& backend) {
  if (backend == "cuda") return std::make_unique<cuda_memory>();
  const char* folder = std::getenv("CQSA_BACKEND_PATH");
  if (backend == "cpu" || !folder || *folder != '/')
    throw std::runtime_error(fmt::format("operands cannot be put on a device: the backend is {}", backend));
  return std::make_unique<fake_memory>(fmt::format("{}/libcqsa_{}.so", folder, backend));
}

void device_buffer::write_part(uint64_t offset, const void* from, uint64_t bytes) {
  if (bytes == 0) return;
  void* const to = static_cast<std::byte*>(memory_) + offset;
  if (pinned_)
    std::memcpy(to, from, bytes);
  else
    from_->upload(to, from, bytes);
}

void device_buffer::read_part(uint64_t offset, void* to, uint64_t bytes) const {
  if (bytes == 0) return;
  const void* const from = static_cast<const std::byte*>(memory_) + offset;
  if (pinned_)
    std::memcpy(to, from, bytes);
  else
    from_->download(to, from, bytes);
}

}  // namespace tool
