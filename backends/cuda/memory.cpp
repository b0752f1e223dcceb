// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <cinttypes>
#include <cstdio>

#include "device.h"
#include "error.h"

namespace cqsa::cuda {

namespace {

// "allocating 512 bytes of device memory on device 0"
struct sentence {
  char text[120];
  sentence(uint64_t bytes, const char* kind, const device& d) {
    std::snprintf(text, sizeof text, "allocating %" PRIu64 " bytes of %s on device %" PRId32, bytes, kind, d.index);
  }
};

// The driver refuses to allocate nothing, and a caller who asks for nothing must get an address of its own.
size_t at_least_one(uint64_t bytes) { return bytes > 0 ? bytes : 1; }

CUdeviceptr address_of(const void* memory) { return reinterpret_cast<CUdeviceptr>(memory); }
void* pointer_of(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

}  // namespace

cqsa_status device_alloc(void* handle, uint64_t bytes, void** memory_out) {
  const device& d = device_of(handle);
  const scope here(d);
  CQSA_CUDA_TRY(here.status());
  CUdeviceptr address = 0;
  CQSA_CUDA_TRY(check(driver().cuMemAlloc_v2(&address, at_least_one(bytes)), sentence(bytes, "device memory", d).text));
  *memory_out = pointer_of(address);
  return CQSA_OK;
}

void device_free(void* handle, void* memory) {
  const scope here(device_of(handle));
  if (here.status() == CQSA_OK && memory != nullptr) driver().cuMemFree_v2(address_of(memory));
}

// Portable: a context of another device may use the memory at full speed too.
cqsa_status pinned_alloc(void* handle, uint64_t bytes, void** memory_out) {
  const device& d = device_of(handle);
  const scope here(d);
  CQSA_CUDA_TRY(here.status());
  void* memory = nullptr;
  CQSA_CUDA_TRY(check(driver().cuMemHostAlloc(&memory, at_least_one(bytes), CU_MEMHOSTALLOC_PORTABLE),
                      sentence(bytes, "pinned host memory", d).text, CQSA_ERROR_OUT_OF_PINNED_MEMORY));
  *memory_out = memory;
  return CQSA_OK;
}

void pinned_free(void* handle, void* memory) {
  const scope here(device_of(handle));
  if (here.status() == CQSA_OK && memory != nullptr) driver().cuMemFreeHost(memory);
}

// From the pool that the application has made the device's current one, by its rules: how much a pool keeps is not ours to
// decide. In a stream that is being captured the two calls become nodes of the graph.
cqsa_status stream_alloc(void* handle, uint64_t bytes, void* stream, void** memory_out) {
  const device& d = device_of(handle);
  if (!d.has_pools)
    return fail(CQSA_ERROR_UNSUPPORTED, "device %" PRId32 " (%s) has no memory in stream order; give a workspace", d.index, d.name);
  const scope here(d);
  CQSA_CUDA_TRY(here.status());
  CUdeviceptr address = 0;
  CQSA_CUDA_TRY(check(driver().cuMemAllocAsync(&address, at_least_one(bytes), static_cast<CUstream>(stream)),
                      sentence(bytes, "device memory in stream order", d).text));
  *memory_out = pointer_of(address);
  return CQSA_OK;
}

cqsa_status stream_free(void* handle, void* memory, void* stream) {
  const scope here(device_of(handle));
  CQSA_CUDA_TRY(here.status());
  if (memory == nullptr) return CQSA_OK;
  return check(driver().cuMemFreeAsync(address_of(memory), static_cast<CUstream>(stream)), "freeing memory in stream order");
}

// Asked for several attributes at once, the driver answers also about memory that it does not know, without an error.
cqsa_status pointer_query(void* handle, const void* pointer, cqsa_pointer_info* info_out) {
  const device& d = device_of(handle);
  const scope here(d, scope::capture::as_is);
  CQSA_CUDA_TRY(here.status());
  CUpointer_attribute wanted[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                  CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE};
  constexpr unsigned count = sizeof wanted / sizeof *wanted;
  unsigned type = 0, managed = 0;
  int ordinal = -1;
  CUdeviceptr start = 0;
  size_t bytes = 0;
  void* answers[count] = {&type, &managed, &ordinal, &start, &bytes};
  CQSA_CUDA_TRY(check(driver().cuPointerGetAttributes(count, wanted, answers, address_of(pointer)), "asking what a pointer is"));
  *info_out = {CQSA_POINTER_UNKNOWN, d.index, start, bytes};
  if (managed != 0) {
    info_out->kind = CQSA_POINTER_MANAGED;
  } else if (type == CU_MEMORYTYPE_DEVICE) {
    info_out->kind = CQSA_POINTER_DEVICE;
  } else if (type == CU_MEMORYTYPE_HOST) {
    info_out->kind = CQSA_POINTER_PINNED;
  }
  if (info_out->kind != CQSA_POINTER_UNKNOWN && ordinal >= 0) info_out->device = ordinal;
  return CQSA_OK;
}

}  // namespace cqsa::cuda
