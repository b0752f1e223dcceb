// SPDX-License-Identifier: Apache-2.0
#include "device.h"

#include <cinttypes>
#include <cstdio>

#include "code.h"
#include "code_list.h"
#include "error.h"
#include "images.h"

namespace cqsa::cuda {

namespace {

constexpr int most_devices = 64;
constinit device devices[most_devices] = {};
constinit int32_t num_devices = 0;

CUresult attribute(const device& d, CUdevice_attribute which, int& out) { return driver().cuDeviceGetAttribute(&out, which, d.handle); }

CUresult list_device(int32_t index, device& d) {
  d.index = index;
  size_t total = 0;
  int major = 0, minor = 0, units = 0, shared = 0, pools = 0;
  CUresult result = driver().cuDeviceGet(&d.handle, index);
  if (result == CUDA_SUCCESS) result = driver().cuDeviceGetName(d.name, sizeof d.name, d.handle);
  if (result == CUDA_SUCCESS) result = driver().cuDeviceTotalMem_v2(&total, d.handle);
  if (result == CUDA_SUCCESS) result = attribute(d, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, major);
  if (result == CUDA_SUCCESS) result = attribute(d, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, minor);
  if (result == CUDA_SUCCESS) result = attribute(d, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, units);
  if (result == CUDA_SUCCESS) result = attribute(d, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, shared);
  if (result == CUDA_SUCCESS) result = attribute(d, CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, pools);
  d.name[sizeof d.name - 1] = '\0';
  d.facts = {32, units, shared, 10 * major + minor, best_tier(10 * major + minor)};
  d.total_bytes = total;
  d.has_pools = pools != 0;
  d.has_code = list_has_code(cqsa_cuda_code_list, d.facts.arch);
  return result;
}

// "device 0 (Tesla P4) is sm_61, this build has code for sm_75 compute_90"
void say_no_code(const device& d, char* text, uint64_t size) {
  std::snprintf(text, size, "device %" PRId32 " (%.100s) is sm_%" PRId32 ", this build has code for %s", d.index, d.name, d.facts.arch,
                cqsa_cuda_code_list);
}

cqsa_status find_device(int32_t index, device*& out) {
  CQSA_CUDA_TRY(require_driver());
  if (index < 0 || index >= num_devices)
    return fail(CQSA_ERROR_NO_DEVICE, "there is no device %" PRId32 ", the NVIDIA driver counts %" PRId32, index, num_devices);
  out = &devices[index];
  return CQSA_OK;
}

cqsa_status retain(device& d) {
  const capture_exemption exempt;
  CQSA_CUDA_TRY(check(driver().cuDevicePrimaryCtxRetain(&d.context, d.handle), "taking the device's primary context"));
  cqsa_status status;
  {
    const scope here(d);
    status = here.status() == CQSA_OK ? load_code(d) : here.status();
  }
  if (status != CQSA_OK) driver().cuDevicePrimaryCtxRelease_v2(d.handle);
  return status;
}

// A context costs hundreds of milliseconds and of megabytes, too much for a question: without one the number is 0.
cqsa_status free_bytes(const device& d, uint64_t& out) {
  const capture_exemption exempt;
  CUcontext context = nullptr;
  unsigned flags = 0;
  int active = 0;
  if (driver().cuDevicePrimaryCtxGetState(d.handle, &flags, &active) != CUDA_SUCCESS || !active) return CQSA_OK;
  CQSA_CUDA_TRY(check(driver().cuDevicePrimaryCtxRetain(&context, d.handle), "taking the device's primary context"));
  cqsa_status status;
  {
    const scope here(context);
    size_t free = 0, total = 0;
    status = here.status();
    if (status == CQSA_OK) status = check(driver().cuMemGetInfo_v2(&free, &total), "asking for the free memory");
    out = free;
  }
  driver().cuDevicePrimaryCtxRelease_v2(d.handle);
  return status;
}

}  // namespace

int32_t list_devices(char* reason, uint64_t size) {
  int count = 0;
  CUresult result = driver().cuDeviceGetCount(&count);
  num_devices = result == CUDA_SUCCESS && count > 0 ? (count < most_devices ? count : most_devices) : 0;
  bool some_code = false;
  for (int32_t i = 0; i < num_devices && result == CUDA_SUCCESS; ++i) {
    result = list_device(i, devices[i]);
    some_code = some_code || devices[i].has_code;
  }
  if (result != CUDA_SUCCESS) {
    char text[160];
    num_devices = 0;
    std::snprintf(reason, size, "the NVIDIA driver does not list its devices: %s", describe(result, text, sizeof text));
    return CQSA_BACKEND_NO_DRIVER;
  }
  if (num_devices == 0) std::snprintf(reason, size, "the NVIDIA driver counts 0 devices");
  if (num_devices == 0) return CQSA_BACKEND_NO_DEVICE;
  if (!some_code) say_no_code(devices[0], reason, size);
  return some_code ? CQSA_BACKEND_READY : CQSA_BACKEND_NO_DEVICE_CODE;
}

int32_t device_count() { return ensure_driver().state == CQSA_BACKEND_READY ? num_devices : 0; }

cqsa_status device_properties(int32_t index, cqsa_device_properties* out) {
  device* d = nullptr;
  CQSA_CUDA_TRY(find_device(index, d));
  cqsa_device_properties answer = {};
  CQSA_CUDA_TRY(free_bytes(*d, answer.free_bytes));
  std::snprintf(answer.name, sizeof answer.name, "%s", d->name);
  std::snprintf(answer.arch, sizeof answer.arch, "sm_%" PRId32, d->facts.arch);
  answer.total_bytes = d->total_bytes;
  answer.chip = {d->facts.tier, d->facts.compute_units, d->facts.shared_bytes, 0};
  *out = answer;
  return CQSA_OK;
}

cqsa_status device_open(int32_t index, void** out) {
  device* d = nullptr;
  CQSA_CUDA_TRY(find_device(index, d));
  if (!d->has_code) {
    char text[512];
    say_no_code(*d, text, sizeof text);
    return fail(CQSA_ERROR_NO_DEVICE_CODE, "%s", text);
  }
  const std::lock_guard hold(d->lock);
  if (d->users == 0) CQSA_CUDA_TRY(retain(*d));
  ++d->users;
  *out = d;
  return CQSA_OK;
}

// Only the context is given back, not the code in it: graphs that the caller captured launch our functions, and may outlive
// the cqsa context for as long as somebody keeps the device's primary context.
void device_close(void* handle) {
  if (driver_was_forked()) return;
  device& d = device_of(handle);
  const std::lock_guard hold(d.lock);
  const capture_exemption exempt;
  if (--d.users == 0) driver().cuDevicePrimaryCtxRelease_v2(d.handle);
}

namespace {

cqsa_status enter(CUcontext context, bool& pushed_out) {
  if (driver_was_forked()) return require_driver();
  CUcontext current = nullptr;
  if (driver().cuCtxGetCurrent(&current) == CUDA_SUCCESS && current == context) return CQSA_OK;
  const CUresult result = driver().cuCtxPushCurrent_v2(context);
  pushed_out = result == CUDA_SUCCESS;
  return check(result, "entering the device's context");
}

}  // namespace

scope::scope(CUcontext context, capture mode) : status_(enter(context, pushed_)), exemption_(status_ == CQSA_OK && mode == capture::exempt) {}

scope::~scope() {
  CUcontext ours = nullptr;
  if (pushed_) driver().cuCtxPopCurrent_v2(&ours);
}

}  // namespace cqsa::cuda
