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

// While another thread captures a graph in the global mode, some calls (allocating, waiting, making a context) are forbidden to
// all threads and would break that capture, though they have nothing to do with it. This exempts the thread for a scope.
class capture_exemption {
 public:
  explicit capture_exemption(bool wanted = true) : exchanged_(wanted && exchange()) {}
  ~capture_exemption() {
    if (exchanged_) exchange();
  }
  capture_exemption(const capture_exemption&) = delete;
  capture_exemption& operator=(const capture_exemption&) = delete;

 private:
  bool exchange() { return driver().cuThreadExchangeStreamCaptureMode(&mode_) == CUDA_SUCCESS; }
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
  const bool exchanged_;
};

// The device's context is this thread's current one inside the scope, whatever was before, and that again afterwards. In most
// programs it is there already: asking for that costs the driver far less than a push and a pop.
class scope {
 public:
  enum class capture { as_is, exempt };
  explicit scope(CUcontext context, capture mode = capture::exempt);
  explicit scope(const device& of, capture mode = capture::exempt) : scope(of.context, mode) {}
  ~scope();
  scope(const scope&) = delete;
  scope& operator=(const scope&) = delete;
  cqsa_status status() const { return status_; }

 private:
  bool pushed_ = false;
  const cqsa_status status_;
  const capture_exemption exemption_;
};

}  // namespace cqsa::cuda
