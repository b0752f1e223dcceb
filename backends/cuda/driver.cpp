// SPDX-License-Identifier: Apache-2.0
#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>

#include "device.h"
#include "error.h"
#include "src/process_lock.h"

namespace cqsa::cuda {

namespace {

constexpr int needed_version = CUDA_VERSION / 1000 * 1000;  // within a major version, older drivers run newer code

// Plain data: no destructor may run while another thread is still here.
constinit driver_api api = {};
constinit process_lock lock;
constinit driver_status status = {CQSA_BACKEND_NO_DRIVER, ""};
constinit std::atomic<bool> settled{false}, touched{false}, forked{false};
constexpr driver_status forked_status = {
    CQSA_BACKEND_NO_DRIVER,
    "this process was forked from one that had initialised CUDA, which works only in the process that did; start it with exec "
    "(Python: the start method \"spawn\")"};

__attribute__((format(printf, 2, 3))) bool settle_as(int32_t state, const char* format, ...) {
  status.state = state;
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(status.reason, sizeof status.reason, format, arguments);
  va_end(arguments);
  return false;
}

template <class Function> bool find(void* library, const char* name, Function& out) {
  out = reinterpret_cast<Function>(dlsym(library, name));
  return out != nullptr;
}

// The first function that the driver lacks, or NULL.
const char* find_all(void* library) {
#define CQSA_CUDA_FIND(name) \
  if (!find(library, #name, api.name)) return #name;
  CQSA_CUDA_FUNCTIONS(CQSA_CUDA_FIND)
#undef CQSA_CUDA_FIND
  if (!find(library, "cuEventElapsedTime", api.cuEventElapsedTime)) return "cuEventElapsedTime";
  find(library, "cuFuncLoad", api.cuFuncLoad);
  find(library, "cuFuncGetParamInfo", api.cuFuncGetParamInfo);
  return nullptr;
}

bool check_version(void* library) {
  int version = 0;
  if (!find(library, "cuDriverGetVersion", api.cuDriverGetVersion) || api.cuDriverGetVersion(&version) != CUDA_SUCCESS)
    return settle_as(CQSA_BACKEND_NO_DRIVER, "libcuda.so.1 does not tell its version: it is not a working NVIDIA driver");
  if (version / 1000 >= needed_version / 1000) return true;
  return settle_as(CQSA_BACKEND_NO_DRIVER, "the NVIDIA driver supports CUDA %d.%d, this build needs a driver for CUDA %d.%d or newer",
                   version / 1000, version % 1000 / 10, needed_version / 1000, needed_version % 1000 / 10);
}

bool open_driver() {
  // Never closed: it has threads and exit handlers of its own.
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const why = dlerror();
    return settle_as(CQSA_BACKEND_NO_DRIVER, "the NVIDIA driver does not load: %s", why != nullptr ? why : "no reason given");
  }
  if (!check_version(library)) return false;
  if (const char* const missing = find_all(library))
    return settle_as(CQSA_BACKEND_NO_DRIVER, "libcuda.so.1 lacks the function %s, which drivers for CUDA 12.0 and newer have", missing);
  return true;
}

void in_child() {
  const bool harmless = settled.load() && status.state != CQSA_BACKEND_READY;
  if (touched.load() && !harmless) forked.store(true);
}

bool start_driver() {
  pthread_atfork(nullptr, nullptr, in_child);
  touched.store(true);
  const CUresult result = api.cuInit(0);
  char text[160];
  if (result == CUDA_ERROR_NO_DEVICE)
    return settle_as(CQSA_BACKEND_NO_DEVICE, "the NVIDIA driver finds no device that this process may use");
  if (result != CUDA_SUCCESS)
    return settle_as(CQSA_BACKEND_NO_DRIVER, "the NVIDIA driver does not start: cuInit failed with %s", describe(result, text, sizeof text));
  return true;
}

void settle() {
  if (!open_driver() || !start_driver()) return;
  status.state = list_devices(status.reason, sizeof status.reason);
}

}  // namespace

const driver_status& ensure_driver() {
  if (forked.load(std::memory_order_relaxed)) return forked_status;
  if (!settled.load(std::memory_order_acquire)) {
    const process_lock_guard hold(lock);
    if (!settled.load(std::memory_order_relaxed)) {
      settle();
      settled.store(true, std::memory_order_release);
    }
  }
  return status;
}

cqsa_status require_driver() {
  const driver_status& now = ensure_driver();
  switch (now.state) {
    case CQSA_BACKEND_READY: return CQSA_OK;
    case CQSA_BACKEND_NO_DEVICE: return fail(CQSA_ERROR_NO_DEVICE, "%s", now.reason);
    case CQSA_BACKEND_NO_DEVICE_CODE: return fail(CQSA_ERROR_NO_DEVICE_CODE, "%s", now.reason);
    default: return fail(CQSA_ERROR_NO_DRIVER, "%s", now.reason);
  }
}

bool driver_was_forked() { return forked.load(std::memory_order_relaxed); }

const driver_api& driver() { return api; }

const char* describe(CUresult result, char* text, uint64_t size) {
  const char *name = nullptr, *sentence = nullptr;
  if (api.cuGetErrorName != nullptr) api.cuGetErrorName(result, &name);
  if (api.cuGetErrorString != nullptr) api.cuGetErrorString(result, &sentence);
  if (name != nullptr && sentence != nullptr) {
    std::snprintf(text, size, "%s (%s)", name, sentence);
  } else {
    std::snprintf(text, size, "error %d", static_cast<int>(result));
  }
  return text;
}

}  // namespace cqsa::cuda
