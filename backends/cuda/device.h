// SPDX-License-Identifier: Apache-2.0
// Devices, and their primary contexts while somebody has them open.
#pragma once

#include <mutex>

#include "backends/gpu/port.h"
#include "driver.h"

namespace cqsa::cuda {

constexpr int most_kernels = static_cast<int>(gpu::kernel_id::count);

struct device {
  // Known since list_devices().
  int32_t index;
  CUdevice handle;
  char name[128];
  gpu::device_facts facts;
  uint64_t total_bytes;
  bool has_pools;  // memory in stream order
  bool has_code;

  // While users > 0. Those who opened the device read the context and the functions without the lock.
  std::mutex lock;
  int64_t users;
  CUcontext context;
  CUfunction function[most_kernels];
  uint64_t params_bytes[most_kernels];  // 0: the driver does not tell
  int32_t most_shared_bytes[most_kernels];
};

// Fills the table of devices, once, after cuInit. Returns CQSA_BACKEND_READY if this build has code for at least one.
int32_t list_devices(char* reason, uint64_t size);

int32_t device_count();
cqsa_status device_properties(int32_t index, cqsa_device_properties* out);
// Every cqsa context of a device gets the same handle: all that it holds may be shared by threads.
cqsa_status device_open(int32_t index, void** out);
void device_close(void* handle);

inline device& device_of(void* handle) { return *static_cast<device*>(handle); }

// The device's context is this thread's current one inside the scope, whatever was before, and that again afterwards. While
// another thread captures a graph in the global mode, some calls (allocations, waiting) are forbidden to all threads and would
// break that capture, though they have nothing to do with it; `relaxed` exempts this thread inside the scope.
class scope {
 public:
  enum class capture { as_is, relaxed };
  explicit scope(CUcontext context, capture mode = capture::relaxed);
  explicit scope(const device& of, capture mode = capture::relaxed) : scope(of.context, mode) {}
  ~scope();
  scope(const scope&) = delete;
  scope& operator=(const scope&) = delete;
  cqsa_status status() const { return status_; }

 private:
  cqsa_status status_ = CQSA_OK;
  bool exchanged_ = false;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

}  // namespace cqsa::cuda
