// SPDX-License-Identifier: Apache-2.0
// The one export of libcqsa_cuda.so.
#include "plugin.h"

#include <cstdio>
#include <cstring>

#include "device.h"
#include "error.h"
#include "images.h"
#include "memory.h"
#include "rate.h"
#include "stream.h"
#include "tuned.h"

#if __has_include("cqsa_build_id.h")
#include "cqsa_build_id.h"
#endif
#ifndef CQSA_BUILD_ID
#define CQSA_BUILD_ID "dev"
#endif

namespace cqsa::cuda {

namespace {

int32_t state(char* reason, uint64_t size) {
  const driver_status& now = ensure_driver();
  if (size > 0) std::snprintf(reason, size, "%s", now.reason);
  return now.state;
}

cqsa_backend_v1 make_backend() {
  cqsa_backend_v1 b = {};
  b.struct_size = sizeof b;
  b.name = "cuda";
  b.build_id = CQSA_BUILD_ID;
  b.device_type = CQSA_DEVICE_CUDA;
  b.pinned_type = CQSA_DEVICE_CUDA_HOST;
  b.last_error = last_error;
  b.state = state;
  b.device_count = device_count;
  b.device_properties = device_properties;
  b.compute_rate = compute_rate;
  b.device_open = device_open;
  b.device_close = device_close;
  b.device_alloc = device_alloc;
  b.device_free = device_free;
  b.pinned_alloc = pinned_alloc;
  b.pinned_free = pinned_free;
  b.stream_create = stream_create;
  b.stream_destroy = stream_destroy;
  b.stream_sync = stream_sync;
  b.event_create = event_create;
  b.event_destroy = event_destroy;
  b.event_record = event_record;
  b.event_sync = event_sync;
  b.stream_wait = stream_wait;
  b.copy = copy;
  b.stream_query = stream_query;
  b.stream_alloc = stream_alloc;
  b.stream_free = stream_free;
  b.pointer_query = pointer_query;
  b.code = cqsa_cuda_code_list;
  add_leaves(b);
  return b;
}

}  // namespace

}  // namespace cqsa::cuda

extern "C" __attribute__((visibility("default"))) cqsa_status cqsa_backend_entry_v1(const cqsa_host_v1* host, const cqsa_backend_v1** out) {
  static const cqsa_backend_v1 backend = cqsa::cuda::make_backend();
  *out = &backend;
  return std::strcmp(host->build_id, CQSA_BUILD_ID) == 0 ? CQSA_OK : CQSA_ERROR_ABI_MISMATCH;
}
