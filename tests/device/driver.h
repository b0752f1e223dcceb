// SPDX-License-Identifier: Apache-2.0
// What the tests of the CUDA plugin do behind its back: the driver, with functions of their own beside those of the plugin, and
// checks that go on after a failure.
#pragma once

#include <cuda.h>
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "backends/cqsa_backend.h"
#include "tests/cuda/fake_driver.h"

inline std::atomic<int> failures{0};

#define CHECK(condition, ...)                                             \
  do {                                                                    \
    if (!(condition)) {                                                   \
      ++failures;                                                         \
      std::printf("%s:%d: failed: %s: ", __FILE__, __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                           \
      std::printf("\n");                                                  \
      std::fflush(stdout);                                                \
    }                                                                     \
  } while (0)

#define TEST_DRIVER_FUNCTIONS(X)                                                                                               \
  X(cuInit) X(cuDeviceGetCount) X(cuDeviceGet) X(cuCtxGetCurrent) X(cuCtxSetCurrent) X(cuCtxPushCurrent_v2) X(cuCtxPopCurrent_v2) \
  X(cuCtxDestroy_v2) X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease_v2) X(cuDevicePrimaryCtxGetState)                 \
  X(cuMemGetInfo_v2) X(cuMemAlloc_v2) X(cuMemFree_v2) X(cuMemAllocManaged) X(cuMemsetD32Async) X(cuMemcpyDtoHAsync_v2)         \
  X(cuStreamCreate) X(cuStreamGetFlags) X(cuStreamDestroy_v2) X(cuStreamSynchronize) X(cuStreamIsCapturing) X(cuStreamBeginCapture_v2)             \
  X(cuStreamEndCapture) X(cuThreadExchangeStreamCaptureMode) X(cuGraphInstantiateWithFlags) X(cuGraphLaunch)                   \
  X(cuGraphExecDestroy) X(cuGraphDestroy) X(cuLaunchHostFunc) X(cuEventCreate) X(cuEventDestroy_v2) X(cuEventRecord)

struct test_driver {
#define TEST_DRIVER_MEMBER(name) decltype(&::name) name;
  TEST_DRIVER_FUNCTIONS(TEST_DRIVER_MEMBER)
#undef TEST_DRIVER_MEMBER
  CUresult (*cuCtxCreate_v2)(CUcontext*, unsigned, CUdevice);  // the header's own one takes more
  // NULL with the real driver.
  decltype(&::fake_cuda_counts) fake_cuda_counts;
  decltype(&::fake_cuda_last_launch) fake_cuda_last_launch;
  decltype(&::fake_cuda_fail_allocation) fake_cuda_fail_allocation;
  decltype(&::fake_cuda_note_calls) fake_cuda_note_calls;
};

template <class Function> void find_symbol(void* library, const char* name, Function& out, bool needed = true) {
  out = reinterpret_cast<Function>(dlsym(library, name));
  if (out != nullptr || !needed) return;
  std::printf("no symbol %s\n", name);
  std::exit(2);
}

inline const test_driver& cu() {
  static const test_driver instance = [] {
    test_driver d = {};
    void* const library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) {
      std::printf("%s\n", dlerror());
      std::exit(2);
    }
#define TEST_DRIVER_FIND(name) find_symbol(library, #name, d.name);
    TEST_DRIVER_FUNCTIONS(TEST_DRIVER_FIND)
#undef TEST_DRIVER_FIND
    find_symbol(library, "cuCtxCreate_v2", d.cuCtxCreate_v2);
    find_symbol(library, "fake_cuda_counts", d.fake_cuda_counts, false);
    find_symbol(library, "fake_cuda_last_launch", d.fake_cuda_last_launch, false);
    find_symbol(library, "fake_cuda_fail_allocation", d.fake_cuda_fail_allocation, false);
    find_symbol(library, "fake_cuda_note_calls", d.fake_cuda_note_calls, false);
    return d;
  }();
  return instance;
}

inline bool is_fake() { return cu().fake_cuda_counts != nullptr; }

// The plugin, opened as the core opens it.
inline const cqsa_backend_v1& open_plugin(const char* path) {
  void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::printf("%s\n", dlerror());
    std::exit(2);
  }
  cqsa_backend_entry_fn entry = nullptr;
  find_symbol(library, CQSA_BACKEND_ENTRY, entry);
  cqsa_host_v1 host = {sizeof host, CQSA_ABI_VERSION, "no build at all"};
  const cqsa_backend_v1* backend = nullptr;
  CHECK(entry(&host, &backend) == CQSA_ERROR_ABI_MISMATCH && backend != nullptr, "the entry point took another build's id");
  host.build_id = backend->build_id;
  CHECK(entry(&host, &backend) == CQSA_OK && backend->struct_size == sizeof *backend, "the entry point");
  return *backend;
}

inline CUcontext current_context() {
  CUcontext context = nullptr;
  cu().cuCtxGetCurrent(&context);
  return context;
}

inline CUstreamCaptureMode thread_capture_mode() {
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL, again;
  cu().cuThreadExchangeStreamCaptureMode(&mode);
  again = mode;
  cu().cuThreadExchangeStreamCaptureMode(&again);
  return mode;
}

// Calls a function of the plugin and checks that it left this thread's context and capture mode as they were.
template <class Function, class... Arguments> auto watched(const char* name, Function function, Arguments... arguments) {
  struct watch {
    const char* name;
    CUcontext context = current_context();
    CUstreamCaptureMode mode = thread_capture_mode();
    ~watch() {
      CHECK(current_context() == context, "%s changed the current context", name);
      CHECK(thread_capture_mode() == mode, "%s changed the capture mode", name);
    }
  } const here{name};
  return function(arguments...);
}

#define CALL(backend, function, ...) watched(#function, (backend).function __VA_OPT__(, ) __VA_ARGS__)
#define CALL_OK(backend, function, ...) \
  CHECK(CALL(backend, function __VA_OPT__(, ) __VA_ARGS__) == CQSA_OK, "%s", (backend).last_error())
