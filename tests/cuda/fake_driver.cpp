// SPDX-License-Identifier: Apache-2.0
#include "fake_driver.h"

#include <cuda.h>
#undef cuEventElapsedTime  // the name that all drivers have; the header makes it _v2
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

// ---- objects --------------------------------------------------------------------------------------------------------------------

struct CUctx_st {
  int device;
  bool primary;
  CUstream_st* defaults[2];  // the legacy one and, for all threads together, the per-thread one
};

struct CUgraph_st {
  std::vector<std::function<void()>> nodes;
};

struct CUstream_st {
  CUctx_st* context;
  bool blocking;
  std::deque<std::function<void()>> queue = {};
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  CUgraph_st* graph = nullptr;
};

struct event_marks {
  int64_t recorded = 0, done = 0;
};

struct CUevent_st {
  CUctx_st* context;
  bool timed;
  CUstream_st* where = nullptr;
  std::shared_ptr<event_marks> marks = std::make_shared<event_marks>();
};

struct CUkern_st {
  std::string name;
};

struct CUfunc_st {
  std::string name;
  CUctx_st* context;
  int most_shared = 48 << 10;
  bool loaded = false;
};

namespace {

enum class kind { device, pinned, managed };
struct block {
  size_t bytes;
  kind what;
  int device;
  char* real;  // where the bytes are: elsewhere for device memory, whose addresses fault
};

struct machine {
  std::recursive_mutex lock;
  bool initialised = false;
  std::vector<CUctx_st> primary;
  std::vector<int> archs, retained;
  std::map<uintptr_t, block> memory;
  std::vector<CUstream_st*> streams;
  std::map<std::pair<CUctx_st*, std::string>, CUfunc_st> functions;
  std::map<std::string, CUkern_st> kernels;
  uintptr_t next_address = 0, end_address = 0;
  std::vector<uint64_t> used;
  uint64_t pinned_used = 0, limit = 1 << 30;
  int64_t fail_allocation = 0;
  fake_counts counts = {};
  fake_launch last = {};
  bool noting = false;
  std::string noted;
};

const char* text_of(const char* name, const char* otherwise) {
  const char* const value = std::getenv(name);
  return value != nullptr ? value : otherwise;
}
int number_of(const char* name, int otherwise) { return std::atoi(text_of(name, std::to_string(otherwise).c_str())); }

machine& m() {
  static machine& instance = *new machine;  // for ever: exit runs while threads may be here
  return instance;
}

// Names of the calls, each with a space behind it.
void note(const char* name) {
  const std::lock_guard<std::recursive_mutex> hold(m().lock);
  if (m().noting) m().noted += std::string(name) + " ";
}

thread_local std::vector<CUctx_st*> stack;
thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

using guard = std::lock_guard<std::recursive_mutex>;

// Nearly every function: one at a time.
struct called {
  explicit called(const char* name) : hold(m().lock) { note(name); }
  const guard hold;
};

CUctx_st* current() { return stack.empty() ? nullptr : stack.back(); }

CUresult lost(CUresult result) { return ++m().counts.calls_without_context, result; }

CUresult need_context() {
  if (!m().initialised) return CUDA_ERROR_NOT_INITIALIZED;
  return current() != nullptr ? CUDA_SUCCESS : lost(CUDA_ERROR_INVALID_CONTEXT);
}

// Handles of the default streams stand for those of the current context.
CUresult find_stream(CUstream handle, CUstream_st*& out) {
  if (const CUresult result = need_context(); result != CUDA_SUCCESS) return result;
  if (handle == nullptr || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
    CUstream_st*& of_context = current()->defaults[handle == CU_STREAM_PER_THREAD];
    if (of_context == nullptr) {
      of_context = new CUstream_st{current(), true};
      m().streams.push_back(of_context);
    }
    out = of_context;
    return CUDA_SUCCESS;
  }
  out = handle;
  return out->context == current() ? CUDA_SUCCESS : lost(CUDA_ERROR_INVALID_HANDLE);
}

// Work that another thread's capture in the global mode forbids to everybody who has not asked to be exempt.
CUresult forbidden_by_captures() {
  CUresult result = CUDA_SUCCESS;
  for (CUstream_st* s : m().streams) {
    if (s->capture != CU_STREAM_CAPTURE_STATUS_ACTIVE || thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) continue;
    if (s->capture_mode != CU_STREAM_CAPTURE_MODE_GLOBAL) continue;
    s->capture = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    ++m().counts.broken_captures;
    result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return result;
}

CUresult unsafe_call() {
  const CUresult result = need_context();
  return result != CUDA_SUCCESS ? result : forbidden_by_captures();
}

void run_one(CUstream_st* s) {
  const auto work = s->queue.front();
  s->queue.pop_front();
  work();
}

void run_all(CUstream_st* s) {
  while (!s->queue.empty()) run_one(s);
}

// As much of the stream as lies before the event.
void run_until(CUstream_st* s, const event_marks& marks, int64_t mark) {
  while (marks.done < mark && !s->queue.empty()) run_one(s);
}

bool is_captured(CUstream_st* s) { return s->capture != CU_STREAM_CAPTURE_STATUS_NONE; }

// The legacy default stream may not be used while a stream that waits for it is being captured: that breaks the capture.
CUresult enqueue(CUstream_st* s, std::function<void()> work) {
  if (s == s->context->defaults[0]) {
    for (CUstream_st* other : m().streams) {
      if (other->context != s->context || !other->blocking || other->capture != CU_STREAM_CAPTURE_STATUS_ACTIVE) continue;
      other->capture = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
      ++m().counts.broken_captures;
      return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
  }
  if (s->capture == CU_STREAM_CAPTURE_STATUS_INVALIDATED) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  (is_captured(s) ? s->graph->nodes.emplace_back() : s->queue.emplace_back()) = std::move(work);
  return CUDA_SUCCESS;
}

const block* find_block(uintptr_t address, size_t bytes, uintptr_t* begin = nullptr) {
  auto at = m().memory.upper_bound(address);
  if (at == m().memory.begin()) return nullptr;
  --at;
  if (begin != nullptr) *begin = at->first;
  return address + bytes <= at->first + at->second.bytes ? &at->second : nullptr;
}

char* real_of(uintptr_t address) {
  uintptr_t begin = 0;
  const block* const b = find_block(address, 1, &begin);
  return b != nullptr ? b->real + (address - begin) : reinterpret_cast<char*>(address);
}

bool on_device(CUdeviceptr address, size_t bytes) {
  const block* const b = find_block(address, bytes);
  return b != nullptr && b->what != kind::pinned;
}

CUresult take(size_t bytes, kind what, uintptr_t& out) {
  const int device = current()->device;
  uint64_t& used = what == kind::pinned ? m().pinned_used : m().used[static_cast<size_t>(device)];
  const bool told = m().fail_allocation > 0 && --m().fail_allocation == 0;
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  if (told || bytes > m().limit - used) return CUDA_ERROR_OUT_OF_MEMORY;
  char* const real = static_cast<char*>(std::malloc(bytes));
  out = reinterpret_cast<uintptr_t>(real);
  if (what == kind::device) {
    out = m().next_address;
    m().next_address += (bytes + 4095) / 4096 * 4096;
    if (m().next_address > m().end_address) std::abort();
  }
  m().memory[out] = {bytes, what, device, real};
  used += bytes;
  (what == kind::pinned ? m().counts.pinned_bytes : m().counts.device_bytes) += static_cast<int64_t>(bytes);
  m().counts.most_device_bytes = std::max(m().counts.most_device_bytes, m().counts.device_bytes);
  return CUDA_SUCCESS;
}

CUresult give(uintptr_t address, bool pinned) {
  const auto at = m().memory.find(address);
  if (at == m().memory.end() || (at->second.what == kind::pinned) != pinned) return CUDA_ERROR_INVALID_VALUE;
  const block b = at->second;
  (pinned ? m().pinned_used : m().used[static_cast<size_t>(b.device)]) -= b.bytes;
  (pinned ? m().counts.pinned_bytes : m().counts.device_bytes) -= static_cast<int64_t>(b.bytes);
  std::free(b.real);
  m().memory.erase(at);
  return CUDA_SUCCESS;
}

// A context takes with it what is in it, as the real one does.
void destroy_contents(CUctx_st* context) {
  for (auto at = m().functions.begin(); at != m().functions.end();)
    at = at->first.first == context ? m().functions.erase(at) : std::next(at);
  for (CUstream_st*& s : context->defaults) {
    if (s != nullptr) std::erase(m().streams, s);
    delete s;
    s = nullptr;
  }
  --m().counts.contexts;
}

void start() {
  machine& a = m();
  a.limit = std::strtoull(text_of("FAKE_CUDA_MEMORY", "1073741824"), nullptr, 10);
  for (const char* at = text_of("FAKE_CUDA_DEVICES", "90,75"); *at != '\0'; at += *at == ',') {
    char* end = nullptr;
    a.archs.push_back(static_cast<int>(std::strtol(at, &end, 10)));
    at = end;
  }
  for (size_t i = 0; i < a.archs.size(); ++i) a.primary.push_back({static_cast<int>(i), true, {}});
  a.retained.assign(a.archs.size(), 0);
  a.used.assign(a.archs.size(), 0);
  const size_t reserve = size_t{64} << 30;
  void* const space = mmap(nullptr, reserve, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  a.next_address = reinterpret_cast<uintptr_t>(space);
  a.end_address = a.next_address + reserve;
  a.initialised = true;
}

}  // namespace

#define FAKE_CUDA extern "C" __attribute__((visibility("default")))
#define FAKE_TRY(expression)                                                                \
  do {                                                                                      \
    if (const CUresult fake_result = (expression); fake_result != CUDA_SUCCESS) return fake_result; \
  } while (0)

// ---- the driver and its devices --------------------------------------------------------------------------------------------------

FAKE_CUDA CUresult cuInit(unsigned) {
  const called hold(__func__);
  const int result = number_of("FAKE_CUDA_INIT", 0);
  if (result != 0) return static_cast<CUresult>(result);
  if (!m().initialised) start();
  return m().archs.empty() ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuDriverGetVersion(int* out) { return note(__func__), *out = number_of("FAKE_CUDA_VERSION", 13000), CUDA_SUCCESS; }

FAKE_CUDA CUresult cuGetErrorName(CUresult result, const char** out) {
  note(__func__);
  *out = result == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OF_THE_FAKE";
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuGetErrorString(CUresult result, const char** out) {
  note(__func__);
  thread_local char text[64];
  std::snprintf(text, sizeof text, "number %d", static_cast<int>(result));
  *out = text;
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuDeviceGetCount(int* out) {
  const called hold(__func__);
  if (!m().initialised) return CUDA_ERROR_NOT_INITIALIZED;
  return *out = static_cast<int>(m().archs.size()), CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuDeviceGet(CUdevice* out, int index) { return note(__func__), *out = index, CUDA_SUCCESS; }

FAKE_CUDA CUresult cuDeviceGetName(char* out, int size, CUdevice device) {
  note(__func__);
  std::snprintf(out, static_cast<size_t>(size), "Fake GPU %d", device);
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuDeviceTotalMem_v2(size_t* out, CUdevice) { return note(__func__), *out = m().limit, CUDA_SUCCESS; }

FAKE_CUDA CUresult cuDeviceGetAttribute(int* out, CUdevice_attribute which, CUdevice device) {
  note(__func__);
  const int arch = m().archs.at(static_cast<size_t>(device));
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *out = arch / 10; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *out = arch % 10; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *out = number_of("FAKE_CUDA_UNITS", 20); break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *out = arch >= 90 ? 227 << 10 : 64 << 10; break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: *out = !number_of("FAKE_CUDA_NO_POOLS", 0); break;
    default: return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

// ---- contexts -----------------------------------------------------------------------------------------------------------------------

FAKE_CUDA CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice device) {
  const called hold(__func__);
  FAKE_TRY(forbidden_by_captures());
  if (m().retained.at(static_cast<size_t>(device))++ == 0) ++m().counts.contexts;
  return *out = &m().primary[static_cast<size_t>(device)], CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  const called hold(__func__);
  FAKE_TRY(forbidden_by_captures());
  int& count = m().retained.at(static_cast<size_t>(device));
  if (count == 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (--count == 0) destroy_contents(&m().primary[static_cast<size_t>(device)]);
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  const called hold(__func__);
  *flags = 0;
  *active = m().retained.at(static_cast<size_t>(device)) > 0;
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuCtxCreate_v2(CUcontext* out, unsigned, CUdevice device) {
  const called hold(__func__);
  *out = new CUctx_st{device, false, {}};
  ++m().counts.contexts;
  stack.push_back(*out);
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuCtxDestroy_v2(CUcontext context) {
  const called hold(__func__);
  destroy_contents(context);
  if (current() == context) stack.pop_back();
  delete context;
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuCtxPushCurrent_v2(CUcontext context) {
  const called hold(__func__);
  if (context == nullptr || (context->primary && m().retained[static_cast<size_t>(context->device)] == 0))
    return lost(CUDA_ERROR_CONTEXT_IS_DESTROYED);
  stack.push_back(context);
  ++m().counts.pushes;
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuCtxPopCurrent_v2(CUcontext* out) {
  const called hold(__func__);
  FAKE_TRY(need_context());
  *out = current();
  stack.pop_back();
  ++m().counts.pops;
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuCtxGetCurrent(CUcontext* out) { return note(__func__), *out = current(), CUDA_SUCCESS; }

FAKE_CUDA CUresult cuCtxSetCurrent(CUcontext context) {
  note(__func__);
  if (!stack.empty()) stack.pop_back();
  if (context != nullptr) stack.push_back(context);
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuCtxGetDevice(CUdevice* out) {
  const called hold(__func__);
  FAKE_TRY(need_context());
  return *out = current()->device, CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) { return note(__func__), std::swap(*mode, thread_mode), CUDA_SUCCESS; }

// ---- code ---------------------------------------------------------------------------------------------------------------------------

#ifndef FAKE_CUDA_INCOMPLETE
FAKE_CUDA CUresult cuLibraryLoadData(CUlibrary* out, const void* data, CUjit_option*, void**, unsigned, CUlibraryOption*, void**, unsigned) {
  const called hold(__func__);
  const int result = number_of("FAKE_CUDA_LOAD", 0);
  if (result != 0) return static_cast<CUresult>(result);
  *out = reinterpret_cast<CUlibrary>(const_cast<void*>(data));
  ++m().counts.libraries;
  return CUDA_SUCCESS;
}
#endif

FAKE_CUDA CUresult cuLibraryGetKernel(CUkernel* out, CUlibrary, const char* name) {
  const called hold(__func__);
  if (std::strcmp(name, text_of("FAKE_CUDA_NO_KERNEL", "")) == 0) return CUDA_ERROR_NOT_FOUND;
  CUkern_st& kernel = m().kernels[name];
  kernel.name = name;
  return *out = &kernel, CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuKernelGetFunction(CUfunction* out, CUkernel kernel) {
  const called hold(__func__);
  FAKE_TRY(need_context());
  CUfunc_st& function = m().functions[{current(), kernel->name}];
  function.name = kernel->name;
  function.context = current();
  return *out = &function, CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuFuncLoad(CUfunction function) {
  const called hold(__func__);
  FAKE_TRY(unsafe_call());
  return function->loaded = true, CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuFuncGetAttribute(int* out, CUfunction_attribute, CUfunction) { return note(__func__), *out = 1024, CUDA_SUCCESS; }

FAKE_CUDA CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) {
  const called hold(__func__);
  if (function->context != current() || which != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_ERROR_INVALID_VALUE;
  return function->most_shared = value, CUDA_SUCCESS;
}

// The stub of the tests gives every kernel 64 bytes.
FAKE_CUDA CUresult cuFuncGetParamInfo(CUfunction, size_t index, size_t* offset, size_t* bytes) {
  note(__func__);
  if (index != 0 || number_of("FAKE_CUDA_PARAM_BYTES", 0) == 0) return CUDA_ERROR_INVALID_VALUE;
  *offset = 0;
  return *bytes = static_cast<size_t>(number_of("FAKE_CUDA_PARAM_BYTES", 0)), CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
                                  unsigned shared, CUstream handle, void** arguments, void**) {
  const called hold(__func__);
  CUstream_st* s = nullptr;
  FAKE_TRY(find_stream(handle, s));
  if (function->context != current()) return lost(CUDA_ERROR_INVALID_CONTEXT);
  if (!function->loaded || x == 0 || y == 0 || z == 0 || static_cast<int>(shared) > function->most_shared) return CUDA_ERROR_INVALID_VALUE;
  fake_launch launch = {"", {x, y, z}, threads, shared, handle, is_captured(s), {}};
  std::snprintf(launch.kernel, sizeof launch.kernel, "%s", function->name.c_str());
  std::memcpy(launch.params, arguments[0], static_cast<size_t>(number_of("FAKE_CUDA_PARAM_BYTES", 0)));
  FAKE_TRY(enqueue(s, [] {}));
  m().last = launch;
  ++m().counts.launches;
  return CUDA_SUCCESS;
}

// Where a kernel of the real driver would find the address: the first word of the map.
FAKE_CUDA CUresult cuTensorMapEncodeTiled(CUtensorMap* out, CUtensorMapDataType, cuuint32_t rank, void* address, const cuuint64_t* sizes,
                                          const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps, CUtensorMapInterleave,
                                          CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  const called hold(__func__);
  bool right = out != nullptr && rank == 4 && address != nullptr && reinterpret_cast<uintptr_t>(address) % 16 == 0;
  for (cuuint32_t i = 0; right && i < rank; ++i) right = sizes[i] > 0 && sizes[i] <= uint64_t(1) << 32 && box[i] > 0 && box[i] <= 256 && steps[i] == 1;
  for (cuuint32_t i = 0; right && i + 1 < rank; ++i) right = strides[i] % 16 == 0 && strides[i] < uint64_t(1) << 40;
  if (!right) return CUDA_ERROR_INVALID_VALUE;
  *out = {};
  out->opaque[0] = reinterpret_cast<uintptr_t>(address);
  return CUDA_SUCCESS;
}

// ---- memory -------------------------------------------------------------------------------------------------------------------------

FAKE_CUDA CUresult cuMemAlloc_v2(CUdeviceptr* out, size_t bytes) {
  const called hold(__func__);
  FAKE_TRY(unsafe_call());
  uintptr_t address = 0;
  FAKE_TRY(take(bytes, kind::device, address));
  return *out = address, CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuMemAllocManaged(CUdeviceptr* out, size_t bytes, unsigned) {
  const called hold(__func__);
  FAKE_TRY(unsafe_call());
  uintptr_t address = 0;
  FAKE_TRY(take(bytes, kind::managed, address));
  return *out = address, CUDA_SUCCESS;
}

// Waits for the device, as the real one does.
FAKE_CUDA CUresult cuMemFree_v2(CUdeviceptr address) {
  const called hold(__func__);
  FAKE_TRY(unsafe_call());
  for (CUstream_st* s : m().streams) run_all(s);
  return give(address, false);
}

FAKE_CUDA CUresult cuMemHostAlloc(void** out, size_t bytes, unsigned) {
  const called hold(__func__);
  FAKE_TRY(unsafe_call());
  uintptr_t address = 0;
  FAKE_TRY(take(bytes, kind::pinned, address));
  return *out = reinterpret_cast<void*>(address), CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuMemFreeHost(void* memory) {
  const called hold(__func__);
  FAKE_TRY(unsafe_call());
  for (CUstream_st* s : m().streams) run_all(s);
  return give(reinterpret_cast<uintptr_t>(memory), true);
}

FAKE_CUDA CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  const called hold(__func__);
  FAKE_TRY(need_context());
  *total = m().limit;
  return *free = m().limit - m().used[static_cast<size_t>(current()->device)], CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuMemAllocAsync(CUdeviceptr* out, size_t bytes, CUstream handle) {
  const called hold(__func__);
  CUstream_st* s = nullptr;
  FAKE_TRY(find_stream(handle, s));
  uintptr_t address = 0;
  FAKE_TRY(take(bytes, kind::device, address));
  FAKE_TRY(enqueue(s, [] {}));
  return *out = address, CUDA_SUCCESS;
}

// In a captured stream the memory belongs to the graph; this one keeps it.
FAKE_CUDA CUresult cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
  const called hold(__func__);
  CUstream_st* s = nullptr;
  FAKE_TRY(find_stream(handle, s));
  if (find_block(address, 1) == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return enqueue(s, [address] { give(address, false); });
}

FAKE_CUDA CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* which, void** out, CUdeviceptr address) {
  const called hold(__func__);
  FAKE_TRY(need_context());
  uintptr_t begin = 0;
  const block* const b = find_block(address, 1, &begin);
  for (unsigned i = 0; i < count; ++i) {
    switch (which[i]) {
      case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *static_cast<unsigned*>(out[i]) = b == nullptr ? 0 : b->what == kind::pinned ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        break;
      case CU_POINTER_ATTRIBUTE_IS_MANAGED: *static_cast<unsigned*>(out[i]) = b != nullptr && b->what == kind::managed; break;
      case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *static_cast<int*>(out[i]) = b == nullptr ? -2 : b->device; break;
      case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *static_cast<CUdeviceptr*>(out[i]) = b == nullptr ? 0 : begin; break;
      case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *static_cast<size_t*>(out[i]) = b == nullptr ? 0 : b->bytes; break;
      default: return CUDA_ERROR_INVALID_VALUE;
    }
  }
  return CUDA_SUCCESS;
}

// ---- copies ---------------------------------------------------------------------------------------------------------------------------

namespace {

CUresult copy_later(CUstream_st* s, uintptr_t to, uintptr_t from, size_t bytes) {
  return enqueue(s, [to, from, bytes] { std::memcpy(real_of(to), real_of(from), bytes); });
}

}  // namespace

FAKE_CUDA CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream handle) {
  const called hold(__func__);
  CUstream_st* s = nullptr;
  FAKE_TRY(find_stream(handle, s));
  if (!on_device(to, bytes)) return CUDA_ERROR_INVALID_VALUE;
  const auto at = reinterpret_cast<uintptr_t>(from);
  if (find_block(at, 1) != nullptr || is_captured(s)) return copy_later(s, to, at, bytes);  // a graph reads it when it runs
  const auto now = std::make_shared<std::string>(static_cast<const char*>(from), bytes);
  return enqueue(s, [to, now] { std::memcpy(real_of(to), now->data(), now->size()); });
}

FAKE_CUDA CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream handle) {
  const called hold(__func__);
  CUstream_st* s = nullptr;
  FAKE_TRY(find_stream(handle, s));
  if (!on_device(from, bytes)) return CUDA_ERROR_INVALID_VALUE;
  const auto at = reinterpret_cast<uintptr_t>(to);
  FAKE_TRY(copy_later(s, at, from, bytes));
  if (find_block(at, 1) == nullptr && !is_captured(s)) run_all(s);  // pageable: complete on return
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream handle) {
  const called hold(__func__);
  CUstream_st* s = nullptr;
  FAKE_TRY(find_stream(handle, s));
  return on_device(to, bytes) && on_device(from, bytes) ? copy_later(s, to, from, bytes) : CUDA_ERROR_INVALID_VALUE;
}

FAKE_CUDA CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream handle) {
  const called hold(__func__);
  CUstream_st* s = nullptr;
  FAKE_TRY(find_stream(handle, s));
  if (!on_device(to, count * 4)) return CUDA_ERROR_INVALID_VALUE;
  return enqueue(s, [=] {
    char* const real = real_of(to);
    for (size_t i = 0; i < count; ++i) std::memcpy(real + 4 * i, &value, 4);
  });
}

// ---- streams, events, graphs -------------------------------------------------------------------------------------------------------------

FAKE_CUDA CUresult cuStreamCreate(CUstream* out, unsigned flags) {
  const called hold(__func__);
  FAKE_TRY(need_context());
  *out = new CUstream_st{current(), (flags & CU_STREAM_NON_BLOCKING) == 0};
  m().streams.push_back(*out);
  ++m().counts.streams;
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuStreamGetFlags(CUstream s, unsigned* out) {
  note(__func__);
  return *out = s->blocking ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING, CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuStreamDestroy_v2(CUstream s) {
  const called hold(__func__);
  FAKE_TRY(find_stream(s, s));
  run_all(s);
  std::erase(m().streams, s);
  delete s;
  --m().counts.streams;
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuStreamSynchronize(CUstream handle) {
  const called hold(__func__);
  CUstream_st* s = nullptr;
  FAKE_TRY(find_stream(handle, s));
  FAKE_TRY(unsafe_call());
  if (is_captured(s)) return s->capture = CU_STREAM_CAPTURE_STATUS_INVALIDATED, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  run_all(s);
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned) {
  const called hold(__func__);
  CUstream_st* s = nullptr;
  FAKE_TRY(find_stream(handle, s));
  CUstream_st* const other = event->where;
  if (other == nullptr || other == s) return CUDA_SUCCESS;
  return enqueue(s, [other, marks = event->marks, mark = event->marks->recorded] { run_until(other, *marks, mark); });
}

FAKE_CUDA CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* out) {
  const called hold(__func__);
  CUstream_st* s = nullptr;
  FAKE_TRY(find_stream(handle, s));
  if (s == s->context->defaults[0])
    for (const CUstream_st* other : m().streams)
      if (other->context == s->context && other->blocking && is_captured(const_cast<CUstream_st*>(other)))
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  return *out = s->capture, CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuStreamGetCtx(CUstream handle, CUcontext* out) { return note(__func__), *out = handle->context, CUDA_SUCCESS; }

FAKE_CUDA CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode) {
  const called hold(__func__);
  CUstream_st* s = nullptr;
  FAKE_TRY(find_stream(handle, s));
  if (s == s->context->defaults[0]) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  s->capture = CU_STREAM_CAPTURE_STATUS_ACTIVE;
  s->capture_mode = mode;
  s->graph = new CUgraph_st;
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuStreamEndCapture(CUstream handle, CUgraph* out) {
  const called hold(__func__);
  CUstream_st* s = nullptr;
  FAKE_TRY(find_stream(handle, s));
  const bool intact = s->capture == CU_STREAM_CAPTURE_STATUS_ACTIVE;
  if (!intact) delete s->graph;
  *out = intact ? s->graph : nullptr;
  s->graph = nullptr;
  s->capture = CU_STREAM_CAPTURE_STATUS_NONE;
  return intact ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
}

FAKE_CUDA CUresult cuGraphInstantiateWithFlags(CUgraphExec* out, CUgraph graph, unsigned long long) {
  note(__func__);
  *out = reinterpret_cast<CUgraphExec>(new CUgraph_st(*graph));
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuGraphLaunch(CUgraphExec graph, CUstream handle) {
  const called hold(__func__);
  CUstream_st* s = nullptr;
  FAKE_TRY(find_stream(handle, s));
  for (const auto& node : reinterpret_cast<CUgraph_st*>(graph)->nodes) FAKE_TRY(enqueue(s, node));
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuGraphExecDestroy(CUgraphExec graph) { return note(__func__), delete reinterpret_cast<CUgraph_st*>(graph), CUDA_SUCCESS; }
FAKE_CUDA CUresult cuGraphDestroy(CUgraph graph) { return note(__func__), delete graph, CUDA_SUCCESS; }

FAKE_CUDA CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void* data) {
  const called hold(__func__);
  CUstream_st* s = nullptr;
  FAKE_TRY(find_stream(handle, s));
  return enqueue(s, [=] { function(data); });
}

FAKE_CUDA CUresult cuEventCreate(CUevent* out, unsigned flags) {
  const called hold(__func__);
  FAKE_TRY(need_context());
  *out = new CUevent_st{current(), (flags & CU_EVENT_DISABLE_TIMING) == 0};
  ++m().counts.events;
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuEventDestroy_v2(CUevent event) {
  const called hold(__func__);
  delete event;
  --m().counts.events;
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuEventRecord(CUevent event, CUstream handle) {
  const called hold(__func__);
  CUstream_st* s = nullptr;
  FAKE_TRY(find_stream(handle, s));
  if (event->context != current()) return lost(CUDA_ERROR_INVALID_HANDLE);
  event->where = s;
  return enqueue(s, [marks = event->marks, mark = ++event->marks->recorded] { marks->done = mark; });
}

FAKE_CUDA CUresult cuEventSynchronize(CUevent event) {
  const called hold(__func__);
  FAKE_TRY(unsafe_call());
  if (event->where != nullptr) run_until(event->where, *event->marks, event->marks->recorded);
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuEventElapsedTime(float* out, CUevent start, CUevent end) {
  note(__func__);
  if (!start->timed || !end->timed) return CUDA_ERROR_INVALID_HANDLE;
  return *out = 1, CUDA_SUCCESS;
}

// ---- for the tests ------------------------------------------------------------------------------------------------------------------------

FAKE_CUDA void fake_cuda_counts(fake_counts* out) {
  const guard hold(m().lock);
  *out = m().counts;
}

FAKE_CUDA void fake_cuda_last_launch(fake_launch* out) {
  const guard hold(m().lock);
  *out = m().last;
}

FAKE_CUDA void fake_cuda_fail_allocation(int64_t n) {
  const guard hold(m().lock);
  m().fail_allocation = n;
}

FAKE_CUDA void fake_cuda_note_calls(char* out, uint64_t size) {
  const guard hold(m().lock);
  if (out != nullptr) std::snprintf(out, size, "%s", m().noted.c_str());
  m().noting = out == nullptr;
  m().noted.clear();
}
