// SPDX-License-Identifier: Apache-2.0
// Conformance of the CUDA plugin: every function of its struct, on whatever libcuda.so.1 the process finds: the real one, or the
// one of tests/cuda. Usage: test_cuda_backend <libcqsa_cuda.so> [case...]; without a case, all of them.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cinttypes>
#include <thread>
#include <vector>

#include "driver.h"

namespace {

const cqsa_backend_v1* plugin;
const cqsa_backend_v1& b() { return *plugin; }

// A device opened for a scope.
struct opened {
  const int32_t index;
  void* handle = nullptr;
  explicit opened(int32_t number = 0) : index(number) {
    CALL_OK(b(), device_open, index, &handle);
    if (handle == nullptr) std::exit(1);  // nothing else can be tried
  }
  ~opened() { CALL(b(), device_close, handle); }
  opened(const opened&) = delete;
};

// The devices for which the plugin has code; device 0 must be one.
int32_t usable_devices() {
  int32_t count = 0;
  void* handle = nullptr;
  for (; count < b().device_count() && b().device_open(count, &handle) == CQSA_OK; ++count) b().device_close(handle);
  return count;
}

bool says(const char* words) { return std::strstr(b().last_error(), words) != nullptr; }

std::vector<unsigned char> pattern(size_t bytes, unsigned seed) {
  std::vector<unsigned char> out(bytes);
  uint32_t x = seed * 2654435761u + 1;
  for (unsigned char& c : out) {
    x = x * 1664525u + 1013904223u;
    c = static_cast<unsigned char>(x >> 24);
  }
  return out;
}

// For what the tests themselves do on the device.
struct in_primary {
  CUdevice device = 0;
  CUcontext context = nullptr;
  explicit in_primary(int index = 0) {
    cu().cuDeviceGet(&device, index);
    retain_or_release(true);
    cu().cuCtxPushCurrent_v2(context);
  }
  ~in_primary() {
    CUcontext popped = nullptr;
    cu().cuCtxPopCurrent_v2(&popped);
    CHECK(popped == context, "the context stack is out of balance");
    retain_or_release(false);
  }
  void retain_or_release(bool retain) {  // also while the test itself has a capture under way
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    cu().cuThreadExchangeStreamCaptureMode(&mode);
    retain ? cu().cuDevicePrimaryCtxRetain(&context, device) : cu().cuDevicePrimaryCtxRelease_v2(device);
    cu().cuThreadExchangeStreamCaptureMode(&mode);
  }
  in_primary(const in_primary&) = delete;
};

void* make_stream(const opened& d) {
  void* stream = nullptr;
  CALL_OK(b(), stream_create, d.handle, &stream);
  const in_primary here(d.index);
  unsigned flags = 0;
  cu().cuStreamGetFlags(static_cast<CUstream>(stream), &flags);
  CHECK(flags == CU_STREAM_NON_BLOCKING, "the stream waits for the application's default stream");
  return stream;
}

void CUDA_CB sleep_200ms(void*) { std::this_thread::sleep_for(std::chrono::milliseconds(200)); }
void CUDA_CB sleep_20ms(void*) { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }

// ---- cases --------------------------------------------------------------------------------------------------------------------------

void case_properties() {
  char reason[64] = "x";
  CHECK(CALL(b(), state, reason, sizeof reason) == CQSA_BACKEND_READY && reason[0] == '\0', "%s", reason);
  const int32_t count = CALL(b(), device_count);
  CHECK(count >= 1, "%d devices", count);
  cqsa_device_properties p = {};
  for (int32_t i = 0; i < count; ++i) {
    CALL_OK(b(), device_properties, i, &p);
    CHECK(p.name[0] != '\0' && std::strncmp(p.arch, "sm_", 3) == 0 && p.total_bytes > 0 && p.chip.compute_units > 0, "device %d", i);
    std::printf("device %d: %s, %s, %" PRIu64 " bytes, %d units\n", i, p.name, p.arch, p.total_bytes, p.chip.compute_units);
  }
  CHECK(p.free_bytes == 0, "without a context the free memory is not known");
  for (const int32_t bad : {-1, count, INT32_MAX}) {
    CHECK(CALL(b(), device_properties, bad, &p) == CQSA_ERROR_NO_DEVICE && says("no device"), "%s", b().last_error());
    void* handle = &p;
    CHECK(CALL(b(), device_open, bad, &handle) == CQSA_ERROR_NO_DEVICE && handle == &p, "device %d", bad);
  }
  const opened d;
  CALL_OK(b(), device_properties, 0, &p);
  CHECK(p.free_bytes > 0 && p.free_bytes <= p.total_bytes, "%" PRIu64 " bytes are free", p.free_bytes);
  CHECK(b().code != nullptr && b().code[0] != '\0' && b().num_attention >= 1 && b().merge != nullptr, "the struct");
  std::printf("code: %s\n", b().code);
}

int is_active() {
  CUdevice device = 0;
  unsigned flags = 0;
  int active = -1;
  cu().cuDeviceGet(&device, 0);
  cu().cuDevicePrimaryCtxGetState(device, &flags, &active);
  return active;
}

void case_open_close() {
  CHECK(is_active() == 0, "somebody has the device open already");
  void *one = nullptr, *two = nullptr;
  CALL_OK(b(), device_open, 0, &one);
  CALL_OK(b(), device_open, 0, &two);
  CHECK(is_active() == 1, "open");
  CALL(b(), device_close, one);
  CHECK(is_active() == 1, "open once more");
  void* memory = nullptr;
  CALL_OK(b(), device_alloc, two, uint64_t{100}, &memory);
  CALL(b(), device_free, two, memory);
  CALL(b(), device_close, two);
  CHECK(is_active() == 0, "the context must not stay");
  for (int i = 0; i < 2; ++i) opened again;
  CHECK(is_active() == 0, "the context must not stay");
  const in_primary keep;  // an application's own, with which ours comes and goes
  for (int i = 0; i < 2; ++i) opened again;
  CHECK(is_active() == 1, "the application's context must stay");
}

// Every function that has a device, with whatever context is current.
void sweep(const opened& d, unsigned seed) {
  constexpr size_t bytes = 100000;
  void *stream = make_stream(d), *other = make_stream(d), *event = nullptr;
  void *memory = nullptr, *second = nullptr, *pinned = nullptr, *ordered = nullptr;
  CALL_OK(b(), event_create, d.handle, &event);
  CALL_OK(b(), device_alloc, d.handle, uint64_t{bytes}, &memory);
  CALL_OK(b(), device_alloc, d.handle, uint64_t{bytes}, &second);
  CALL_OK(b(), pinned_alloc, d.handle, uint64_t{bytes}, &pinned);
  const auto source = pattern(bytes, seed);
  CALL_OK(b(), copy, d.handle, memory, source.data(), uint64_t{bytes}, CQSA_COPY_TO_DEVICE, stream);
  CALL_OK(b(), event_record, d.handle, event, stream);
  CALL_OK(b(), stream_wait, d.handle, other, event);
  CALL_OK(b(), copy, d.handle, second, memory, uint64_t{bytes}, CQSA_COPY_ON_DEVICE, other);
  CALL_OK(b(), copy, d.handle, pinned, second, uint64_t{bytes}, CQSA_COPY_TO_HOST, other);
  CALL_OK(b(), event_record, d.handle, event, other);
  CALL_OK(b(), event_sync, d.handle, event);
  CHECK(std::memcmp(pinned, source.data(), bytes) == 0, "the bytes changed on their way");
  int32_t capturing = 7;
  CALL_OK(b(), stream_query, d.handle, stream, &capturing);
  CHECK(capturing == 0, "%d", capturing);
  CALL_OK(b(), stream_alloc, d.handle, uint64_t{bytes}, stream, &ordered);
  CALL_OK(b(), copy, d.handle, ordered, pinned, uint64_t{bytes}, CQSA_COPY_TO_DEVICE, stream);
  std::vector<unsigned char> back(bytes);
  CALL_OK(b(), copy, d.handle, back.data(), ordered, uint64_t{bytes}, CQSA_COPY_TO_HOST, stream);
  CALL_OK(b(), stream_free, d.handle, ordered, stream);
  CALL_OK(b(), stream_sync, d.handle, stream);
  CHECK(back == source, "the bytes changed on their way");
  cqsa_pointer_info info = {};
  CALL_OK(b(), pointer_query, d.handle, memory, &info);
  CHECK(info.kind == CQSA_POINTER_DEVICE, "kind %d", info.kind);
  cqsa_device_properties p = {};
  CALL_OK(b(), device_properties, 0, &p);
  CALL_OK(b(), copy, d.handle, nullptr, nullptr, uint64_t{0}, CQSA_COPY_TO_DEVICE, stream);
  CHECK(CALL(b(), copy, d.handle, memory, second, uint64_t{1}, 9, stream) == CQSA_ERROR_INTERNAL, "direction 9");
  CALL(b(), event_destroy, d.handle, event);
  CALL(b(), stream_destroy, d.handle, stream);
  CALL(b(), stream_destroy, d.handle, other);
  CALL(b(), device_free, d.handle, memory);
  CALL(b(), device_free, d.handle, second);
  CALL(b(), pinned_free, d.handle, pinned);
  for (void (*release)(void*, void*) : {b().device_free, b().pinned_free, b().stream_destroy, b().event_destroy})
    watched("releasing nothing", release, d.handle, nullptr);
}

void case_contexts() {
  const opened d;
  CHECK(current_context() == nullptr, "opening a device leaves no current context");
  sweep(d, 1);
  {
    const in_primary here;
    sweep(d, 2);
  }
  int count = 0;
  cu().cuDeviceGetCount(&count);
  for (int i = 0; i < count; ++i) {
    CUcontext other = nullptr;
    CHECK(cu().cuCtxCreate_v2(&other, 0, i) == CUDA_SUCCESS, "a context of the application on device %d", i);
    sweep(d, 3);
    const opened again;  // opened while another context is current
    cu().cuCtxDestroy_v2(other);
  }
  CHECK(current_context() == nullptr, "the context stack is out of balance");
  for (int i = 1; i < usable_devices(); ++i) {  // each device on its own, while another is current
    cqsa_device_properties p = {};
    CALL_OK(b(), device_properties, i, &p);
    const in_primary here;
    const opened second(i);
    sweep(second, 4);
  }
}

void check_pointer(const opened& d, const void* pointer, int32_t kind, const char* what) {
  cqsa_pointer_info info = {77, 77, 77, 77};
  CALL_OK(b(), pointer_query, d.handle, pointer, &info);
  CHECK(info.kind == kind && info.device == 0, "%s: kind %d of device %d", what, info.kind, info.device);
  const auto address = reinterpret_cast<uint64_t>(pointer);
  const bool inside = address - info.start < info.bytes;
  CHECK(kind == CQSA_POINTER_UNKNOWN ? info.bytes == 0 : inside, "%s: %" PRIx64 " in %" PRIu64 " bytes at %" PRIx64, what, address, info.bytes, info.start);
}

void case_memory() {
  const opened d;
  void *memory = nullptr, *pinned = nullptr, *none = nullptr, *ordered = nullptr, *const stream = make_stream(d);
  CALL_OK(b(), device_alloc, d.handle, uint64_t{1} << 20, &memory);
  CALL_OK(b(), device_alloc, d.handle, uint64_t{0}, &none);
  CALL_OK(b(), pinned_alloc, d.handle, uint64_t{1} << 20, &pinned);
  CALL_OK(b(), stream_alloc, d.handle, uint64_t{1} << 20, stream, &ordered);
  const auto heap = pattern(1 << 20, 1);
  char on_stack = 0;
  check_pointer(d, memory, CQSA_POINTER_DEVICE, "device memory");
  check_pointer(d, static_cast<char*>(memory) + 1001, CQSA_POINTER_DEVICE, "inside device memory");
  check_pointer(d, none, CQSA_POINTER_DEVICE, "an allocation of nothing");
  check_pointer(d, ordered, CQSA_POINTER_DEVICE, "memory in stream order");
  check_pointer(d, pinned, CQSA_POINTER_PINNED, "pinned memory");
  check_pointer(d, static_cast<char*>(pinned) + 999999, CQSA_POINTER_PINNED, "inside pinned memory");
  check_pointer(d, heap.data(), CQSA_POINTER_UNKNOWN, "the heap");
  check_pointer(d, &on_stack, CQSA_POINTER_UNKNOWN, "the stack");
  check_pointer(d, nullptr, CQSA_POINTER_UNKNOWN, "NULL");
  check_pointer(d, reinterpret_cast<void*>(0x10), CQSA_POINTER_UNKNOWN, "a wild address");
  {
    const in_primary here;
    CUdeviceptr managed = 0;
    CHECK(cu().cuMemAllocManaged(&managed, 4096, CU_MEM_ATTACH_GLOBAL) == CUDA_SUCCESS, "managed memory");
    check_pointer(d, reinterpret_cast<void*>(managed), CQSA_POINTER_MANAGED, "managed memory");
    cu().cuMemFree_v2(managed);
  }
  void* untouched = &on_stack;
  CHECK(CALL(b(), device_alloc, d.handle, uint64_t{1} << 50, &untouched) == CQSA_ERROR_OUT_OF_DEVICE_MEMORY, "%s", b().last_error());
  CHECK(says("1125899906842624 bytes of device memory") && says("CUDA_ERROR_OUT_OF_MEMORY"), "%s", b().last_error());
  CHECK(CALL(b(), pinned_alloc, d.handle, uint64_t{1} << 50, &untouched) == CQSA_ERROR_OUT_OF_PINNED_MEMORY, "%s", b().last_error());
  CHECK(says("pinned host memory"), "%s", b().last_error());
  CHECK(CALL(b(), stream_alloc, d.handle, uint64_t{1} << 50, stream, &untouched) == CQSA_ERROR_OUT_OF_DEVICE_MEMORY, "%s", b().last_error());
  CHECK(untouched == &on_stack, "a failing call wrote its output");
  CALL_OK(b(), stream_free, d.handle, ordered, stream);
  CALL_OK(b(), stream_free, d.handle, nullptr, stream);
  CALL_OK(b(), stream_sync, d.handle, stream);
  CALL(b(), stream_destroy, d.handle, stream);
  CALL(b(), device_free, d.handle, none);
  CALL(b(), device_free, d.handle, memory);
  CALL(b(), pinned_free, d.handle, pinned);
  sweep(d, 5);  // no failure of before shows now
}

// Pageable memory has been read when a copy returns, although the stream is still busy.
void case_pageable() {
  const opened d;
  const in_primary here;
  void* const stream = make_stream(d);
  for (const size_t bytes : {size_t{1}, size_t{1000}, size_t{64} << 10, size_t{65537}, size_t{1} << 20, size_t{64} << 20}) {
    void* memory = nullptr;
    CALL_OK(b(), device_alloc, d.handle, uint64_t{bytes}, &memory);
    auto source = pattern(bytes, 9);
    const auto kept = source;
    CHECK(cu().cuLaunchHostFunc(static_cast<CUstream>(stream), sleep_200ms, nullptr) == CUDA_SUCCESS, "a busy stream");
    CALL_OK(b(), copy, d.handle, memory, source.data(), uint64_t{bytes}, CQSA_COPY_TO_DEVICE, stream);
    std::memset(source.data(), 0xEE, bytes);
    std::vector<unsigned char> back(bytes);
    CALL_OK(b(), copy, d.handle, back.data(), memory, uint64_t{bytes}, CQSA_COPY_TO_HOST, stream);
    CALL_OK(b(), stream_sync, d.handle, stream);
    CHECK(back == kept, "%zu bytes were read after the copy had returned", bytes);
    CALL(b(), device_free, d.handle, memory);
  }
  CALL(b(), stream_destroy, d.handle, stream);
}

// What an event orders happens in that order, though the first stream is slow.
void case_events() {
  const opened d;
  const in_primary here;
  constexpr size_t bytes = 1 << 20;
  void *first = make_stream(d), *second = make_stream(d), *event = nullptr, *memory = nullptr, *pinned = nullptr, *back = nullptr;
  CALL_OK(b(), event_create, d.handle, &event);
  CALL_OK(b(), device_alloc, d.handle, uint64_t{bytes}, &memory);
  CALL_OK(b(), pinned_alloc, d.handle, uint64_t{bytes}, &pinned);
  CALL_OK(b(), pinned_alloc, d.handle, uint64_t{bytes}, &back);
  for (int round = 0; round < 10; ++round) {
    std::memset(pinned, round + 1, bytes);
    cu().cuLaunchHostFunc(static_cast<CUstream>(first), sleep_20ms, nullptr);
    CALL_OK(b(), copy, d.handle, memory, pinned, uint64_t{bytes}, CQSA_COPY_TO_DEVICE, first);
    CALL_OK(b(), event_record, d.handle, event, first);
    CALL_OK(b(), stream_wait, d.handle, second, event);
    CALL_OK(b(), copy, d.handle, back, memory, uint64_t{bytes}, CQSA_COPY_TO_HOST, second);
    CALL_OK(b(), event_record, d.handle, event, second);
    CALL_OK(b(), event_sync, d.handle, event);
    CHECK(std::memcmp(back, pinned, bytes) == 0, "round %d came too early", round);
  }
  CALL(b(), event_destroy, d.handle, event);
  for (void* stream : {first, second}) CALL(b(), stream_destroy, d.handle, stream);
  for (void* p : {pinned, back}) CALL(b(), pinned_free, d.handle, p);
  CALL(b(), device_free, d.handle, memory);
}

void check_query(const opened& d, CUstream stream, int32_t wanted, const char* what) {
  int32_t capturing = 7;
  CALL_OK(b(), stream_query, d.handle, stream, &capturing);
  CHECK(capturing == wanted, "%s: capturing is %d", what, capturing);
}

void check_queries_of_capture(const opened& d, unsigned flags) {
  CUstream stream = nullptr, bystander = nullptr;
  CUgraph graph = nullptr;
  cu().cuStreamCreate(&stream, flags);
  cu().cuStreamCreate(&bystander, flags);
  check_query(d, stream, 0, "a stream of the application");
  CHECK(cu().cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS, "a capture");
  check_query(d, stream, 1, "a captured stream");
  check_query(d, bystander, 0, "a stream beside a captured one");
  check_query(d, CU_STREAM_PER_THREAD, 0, "the default stream of the thread");
  int32_t capturing = 7;
  const cqsa_status status = CALL(b(), stream_query, d.handle, nullptr, &capturing);
  if (flags == CU_STREAM_NON_BLOCKING) {
    CHECK(status == CQSA_OK && capturing == 0, "the default stream beside a capture that does not concern it: %s", b().last_error());
  } else {
    CHECK(status != CQSA_OK && capturing == 7 && says("legacy default stream"), "status %d %s", status, b().last_error());
  }
  CHECK(cu().cuStreamEndCapture(stream, &graph) == CUDA_SUCCESS && graph != nullptr, "the question broke the capture");
  if (graph != nullptr) cu().cuGraphDestroy(graph);
  check_query(d, stream, 0, "a stream after its capture");
  cu().cuStreamDestroy_v2(stream);
  cu().cuStreamDestroy_v2(bystander);
}

// A stream of a context other than the device's primary one.
void check_foreign_stream(const opened& d, int device, const char* words) {
  CUcontext other = nullptr;
  CUstream stream = nullptr;
  cu().cuCtxCreate_v2(&other, 0, device);
  cu().cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
  int32_t capturing = 7;
  CHECK(CALL(b(), stream_query, d.handle, stream, &capturing) == CQSA_ERROR_DEVICE && capturing == 7, "%s", b().last_error());
  CHECK(says(words), "%s", b().last_error());
  cu().cuStreamDestroy_v2(stream);
  cu().cuCtxDestroy_v2(other);
}

void case_stream_query() {
  const opened d;
  check_query(d, nullptr, 0, "the default stream, with no context current");
  check_query(d, CU_STREAM_LEGACY, 0, "the legacy default stream");
  check_query(d, CU_STREAM_PER_THREAD, 0, "the default stream of the thread");
  {
    const in_primary here;
    check_queries_of_capture(d, CU_STREAM_NON_BLOCKING);
    check_queries_of_capture(d, CU_STREAM_DEFAULT);
  }
  check_foreign_stream(d, 0, "another CUDA context of device 0");
  int count = 0;
  cu().cuDeviceGetCount(&count);
  if (count < 2) return;
  check_foreign_stream(d, 1, "stream belongs to CUDA device 1, the context is on CUDA device 0");
}

// A capture by an application that forbids everybody everything must survive all that we do beside it.
void case_foreign_capture() {
  const opened d;
  const in_primary here;
  CUstream stream = nullptr;
  CUgraph graph = nullptr;
  cu().cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
  for (const bool from_thread : {false, true}) {
    CHECK(cu().cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS, "a capture");
    const auto work = [&] {
      sweep(d, 6);
      const opened again, last(usable_devices() - 1);
    };
    from_thread ? std::thread(work).join() : work();
    CHECK(cu().cuStreamEndCapture(stream, &graph) == CUDA_SUCCESS && graph != nullptr, "a capture beside us was broken");
    if (graph != nullptr) cu().cuGraphDestroy(graph);
  }
  cu().cuStreamDestroy_v2(stream);
}

// Two devices' handles, or twice the only one's, and eight threads.
void case_threads() {
  const opened one, two(usable_devices() > 1 ? 1 : 0);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (unsigned round = 0; round < 20; ++round) sweep(t % 2 ? one : two, 100 * t + round);
      CHECK(current_context() == nullptr, "a thread was left with a context");
    });
  }
  for (unsigned t = 0; t < 4; ++t)
    threads.emplace_back([] {
      for (int round = 0; round < 20; ++round) opened again;
    });
  for (std::thread& t : threads) t.join();
}

// ---- leaves -------------------------------------------------------------------------------------------------------------------------

// Two states of one row of four channels, the second empty: the merge is the first.
struct small_merge {
  float *memory = nullptr, host[16] = {};  // out_a 0..3, lse_a 4, out_b 5..8, lse_b 9, out 10..13, lse 14
  cqsa_merge_leaf leaf = {};
  const opened& d;
  void* stream;
  explicit small_merge(const opened& device) : d(device), stream(make_stream(device)) {
    const float a[] = {1, 2, 3, 4, 0.5f, 9, 9, 9, 9, -__builtin_inff()};
    void* p = nullptr;
    CALL_OK(b(), device_alloc, d.handle, uint64_t{sizeof host}, &p);
    memory = static_cast<float*>(p);
    std::memcpy(host, a, sizeof a);
    CALL_OK(b(), copy, d.handle, memory, host, uint64_t{sizeof host}, CQSA_COPY_TO_DEVICE, stream);
    leaf.shape[0] = leaf.shape[1] = leaf.shape[2] = leaf.shape[3] = 1;
    leaf.head_dim_v = 4;
    leaf.out_a = memory, leaf.lse_a = memory + 4, leaf.out_b = memory + 5, leaf.lse_b = memory + 9;
    leaf.out = memory + 10, leaf.lse = memory + 14;
    leaf.out_a_stride[4] = leaf.out_b_stride[4] = leaf.out_stride[4] = 1;
  }
  ~small_merge() {
    CALL(b(), stream_destroy, d.handle, stream);
    CALL(b(), device_free, d.handle, memory);
  }
  void check(const char* when) {
    CALL_OK(b(), copy, d.handle, host, memory, uint64_t{sizeof host}, CQSA_COPY_TO_HOST, stream);
    CALL_OK(b(), stream_sync, d.handle, stream);
    const bool right = std::memcmp(host + 10, host, 16) == 0 && host[14] == 0.5f;
    CHECK(right || is_fake(), "%s: the merge is %g %g %g %g, lse %g", when, host[10], host[11], host[12], host[13], host[14]);
  }
};

// The first launch of the process is in a captured stream: nothing may be left to be loaded.
void case_capture_launch() {
  const opened d;
  small_merge m(d);
  const in_primary here;
  const auto stream = static_cast<CUstream>(m.stream);
  cu().cuStreamSynchronize(stream);
  CUgraph graph = nullptr;
  CUgraphExec exec = nullptr;
  CHECK(cu().cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS, "a capture");
  void* ordered = nullptr;
  CALL_OK(b(), stream_alloc, d.handle, uint64_t{4096}, m.stream, &ordered);
  CALL_OK(b(), merge, d.handle, &m.leaf, nullptr, m.stream);
  CALL_OK(b(), stream_free, d.handle, ordered, m.stream);
  CHECK(cu().cuStreamEndCapture(stream, &graph) == CUDA_SUCCESS && graph != nullptr, "the launch broke the capture");
  if (graph == nullptr) return;
  CHECK(cu().cuGraphInstantiateWithFlags(&exec, graph, 0) == CUDA_SUCCESS, "the graph");
  for (int i = 0; i < 3; ++i) CHECK(cu().cuGraphLaunch(exec, stream) == CUDA_SUCCESS, "launch %d of the graph", i);
  m.check("in a graph");
  cu().cuGraphExecDestroy(exec);
  cu().cuGraphDestroy(graph);
}

void case_launch() {
  const opened d;
  small_merge m(d);
  CALL_OK(b(), merge, d.handle, &m.leaf, nullptr, m.stream);
  m.check("in a stream");
  CALL_OK(b(), merge, d.handle, &m.leaf, nullptr, nullptr);  // the default stream, with no context current
  CALL_OK(b(), stream_sync, d.handle, nullptr);
  m.check("in the default stream");
  constexpr int rounds = 1000;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < rounds; ++i) b().merge(d.handle, &m.leaf, nullptr, m.stream);
  const double us = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() * 1e6 / rounds;
  CALL_OK(b(), stream_sync, d.handle, m.stream);
  std::printf("a launch takes %.2f us of host time\n", us);
}

uint64_t free_memory() {
  const in_primary here;
  size_t free = 0, total = 0;
  cu().cuMemGetInfo_v2(&free, &total);
  return free;
}

// The most memory of the device that is taken while something runs, as another thread sees it.
template <class F> uint64_t most_taken_during(F&& something) {
  const uint64_t before = free_memory();
  std::atomic<bool> done{false};
  uint64_t least = before;
  std::thread watcher([&] {
    while (!done) least = std::min(least, free_memory());
  });
  something();
  done = true;
  watcher.join();
  return before - least;
}

void case_compute_rate() {
  const opened d;
  CALL(b(), compute_rate, 0, 64, CQSA_DTYPE_F32, nullptr);
  const uint64_t before = free_memory();
  for (const int64_t head_dim : {int64_t{64}, int64_t{128}}) {
    const auto start = std::chrono::steady_clock::now();
    const double rate = CALL(b(), compute_rate, 0, head_dim, CQSA_DTYPE_F32, nullptr);
    const double ms = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() * 1e3;
    std::printf("head_dim %" PRId64 ": %.3g FLOP/s, measured in %.1f ms\n", head_dim, rate, ms);
    CHECK(rate > 0, "%s", b().last_error());
    CHECK(ms < 150 || is_fake(), "%.1f ms", ms);
    // Apart, because the watcher may take time from it.
    const uint64_t bytes = most_taken_during([&] { CALL(b(), compute_rate, 0, head_dim, CQSA_DTYPE_F32, nullptr); });
    std::printf("head_dim %" PRId64 ": with %.1f MiB of device memory\n", head_dim, static_cast<double>(bytes) / (1 << 20));
    CHECK(bytes <= 32 << 20 && (bytes > 0 || is_fake()), "%" PRIu64 " bytes", bytes);
  }
  CHECK(free_memory() == before, "the measurement left %" PRId64 " bytes behind", static_cast<int64_t>(before - free_memory()));
  CHECK(CALL(b(), compute_rate, 0, 0, CQSA_DTYPE_F32, nullptr) == 0, "head_dim 0");
  CHECK(CALL(b(), compute_rate, 99, 64, CQSA_DTYPE_F32, nullptr) == 0, "device 99");
  CHECK(CALL(b(), compute_rate, 0, 64, CQSA_DTYPE_I8, nullptr) == 0, "int8");
}

// ---- fork ---------------------------------------------------------------------------------------------------------------------------

// In the child, without the driver: nothing may call it.
int in_child(void* device, void* stream, void* memory) {
  char reason[512] = "";
  if (b().state(reason, sizeof reason) != CQSA_BACKEND_NO_DRIVER || std::strstr(reason, "forked") == nullptr) return 1;
  if (b().device_count() != 0) return 2;
  cqsa_device_properties p;
  void* out = nullptr;
  int32_t capturing;
  cqsa_pointer_info info;
  if (b().device_properties(0, &p) != CQSA_ERROR_NO_DRIVER || !says("forked")) return 3;
  if (b().device_open(0, &out) != CQSA_ERROR_NO_DRIVER) return 4;
  if (b().device_alloc(device, 100, &out) != CQSA_ERROR_NO_DRIVER || !says("forked")) return 5;
  if (b().pinned_alloc(device, 100, &out) != CQSA_ERROR_NO_DRIVER) return 6;
  if (b().stream_create(device, &out) != CQSA_ERROR_NO_DRIVER) return 7;
  if (b().stream_sync(device, stream) != CQSA_ERROR_NO_DRIVER) return 8;
  if (b().copy(device, memory, &p, 1, CQSA_COPY_TO_DEVICE, stream) != CQSA_ERROR_NO_DRIVER) return 9;
  if (b().stream_query(device, stream, &capturing) != CQSA_ERROR_NO_DRIVER) return 10;
  if (b().pointer_query(device, memory, &info) != CQSA_ERROR_NO_DRIVER) return 11;
  if (b().compute_rate(0, 64, CQSA_DTYPE_F32, nullptr) != 0) return 12;
  cqsa_merge_leaf leaf = {};
  leaf.shape[0] = leaf.shape[1] = leaf.shape[2] = leaf.shape[3] = leaf.head_dim_v = 1;
  if (b().merge(device, &leaf, nullptr, stream) != CQSA_ERROR_NO_DRIVER) return 13;
  b().device_free(device, memory);
  b().stream_destroy(device, stream);
  b().device_close(device);
  return 0;
}

void case_fork() {
  const opened d;
  void *const stream = make_stream(d), *memory = nullptr;
  CALL_OK(b(), device_alloc, d.handle, uint64_t{100}, &memory);
  const pid_t child = fork();
  if (child == 0) _exit(in_child(d.handle, stream, memory));
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ended with %x", static_cast<unsigned>(status));
  sweep(d, 7);
  CALL(b(), device_free, d.handle, memory);
  CALL(b(), stream_destroy, d.handle, stream);
}

struct test_case {
  const char* name;
  void (*run)();
};

// The first launch and the first opening come before what would hide their faults.
const test_case cases[] = {{"properties", case_properties},
                           {"open_close", case_open_close},
                           {"capture_launch", case_capture_launch},
                           {"contexts", case_contexts},
                           {"memory", case_memory},
                           {"pageable", case_pageable},
                           {"events", case_events},
                           {"stream_query", case_stream_query},
                           {"foreign_capture", case_foreign_capture},
                           {"threads", case_threads},
                           {"launch", case_launch},
                           {"compute_rate", case_compute_rate},
                           {"fork", case_fork}};

void check_nothing_left() {
  CHECK(is_active() == 0, "a primary context is still there");
  if (!is_fake()) return;
  fake_counts counts = {};
  cu().fake_cuda_counts(&counts);
  CHECK(counts.pushes == counts.pops, "%" PRId64 " pushes, %" PRId64 " pops", counts.pushes, counts.pops);
  CHECK(counts.contexts == 0 && counts.streams == 0 && counts.events == 0, "%" PRId64 " contexts, %" PRId64 " streams, %" PRId64 " events",
        counts.contexts, counts.streams, counts.events);
  CHECK(counts.device_bytes == 0 && counts.pinned_bytes == 0, "%" PRId64 " and %" PRId64 " bytes", counts.device_bytes, counts.pinned_bytes);
  CHECK(counts.calls_without_context == 0, "%" PRId64 " calls without the right context", counts.calls_without_context);
  CHECK(counts.broken_captures == 0, "%" PRId64 " broken captures", counts.broken_captures);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::printf("usage: test_cuda_backend <libcqsa_cuda.so> [case...]\n");
    return 2;
  }
  plugin = &open_plugin(argv[1]);
  char reason[512] = "";
  if (b().state(reason, sizeof reason) != CQSA_BACKEND_READY) {
    std::printf("skipped: %s\n", reason);
    return 77;
  }
  for (const test_case& c : cases) {
    bool wanted = argc == 2;
    for (int i = 2; i < argc; ++i) wanted = wanted || std::strcmp(argv[i], c.name) == 0;
    if (!wanted) continue;
    const int before = failures;
    c.run();
    std::printf("%s %s\n", failures == before ? "ok    " : "FAILED", c.name);
    std::fflush(stdout);
  }
  check_nothing_left();
  std::printf("%d failures\n", failures.load());
  return failures != 0;
}
