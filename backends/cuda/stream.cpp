// SPDX-License-Identifier: Apache-2.0
#include "stream.h"

#include <cinttypes>

#include "device.h"
#include "error.h"

namespace cqsa::cuda {

namespace {

CUstream stream_of(void* stream) { return static_cast<CUstream>(stream); }
CUevent event_of(void* event) { return static_cast<CUevent>(event); }

// NULL, the legacy default stream by its name, and the default stream of each thread stand for a stream of whatever context
// is current, so they are always of this device.
bool is_default(CUstream stream) { return stream == nullptr || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD; }

// Only to be said: the stream cannot be used.
cqsa_status refuse_context(const device& d, CUcontext other) {
  CUdevice its_device = d.handle;
  {
    const scope there(other, scope::capture::as_is);
    CQSA_CUDA_TRY(there.status());
    CQSA_CUDA_TRY(check(driver().cuCtxGetDevice(&its_device), "asking for the device of the stream"));
  }
  if (its_device != d.handle)
    return fail(CQSA_ERROR_DEVICE, "stream belongs to CUDA device %d, the context is on CUDA device %" PRId32, static_cast<int>(its_device),
                d.index);
  return fail(CQSA_ERROR_DEVICE, "stream belongs to another CUDA context of device %" PRId32 " than its primary one, wanted a stream of "
              "the primary context (which the CUDA run-time library uses)", d.index);
}

}  // namespace

// Non-blocking: it does not wait for the default stream of the application, nor that for it.
cqsa_status stream_create(void* handle, void** stream_out) {
  const scope here(device_of(handle));
  CQSA_CUDA_TRY(here.status());
  CUstream stream = nullptr;
  CQSA_CUDA_TRY(check(driver().cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "creating a stream"));
  *stream_out = stream;
  return CQSA_OK;
}

void stream_destroy(void* handle, void* stream) {
  const scope here(device_of(handle));
  if (here.status() == CQSA_OK && stream != nullptr) driver().cuStreamDestroy_v2(stream_of(stream));
}

cqsa_status stream_sync(void* handle, void* stream) {
  const scope here(device_of(handle));
  CQSA_CUDA_TRY(here.status());
  return check(driver().cuStreamSynchronize(stream_of(stream)), "waiting for a stream");
}

cqsa_status stream_wait(void* handle, void* stream, void* event) {
  const scope here(device_of(handle));
  CQSA_CUDA_TRY(here.status());
  return check(driver().cuStreamWaitEvent(stream_of(stream), event_of(event), 0), "ordering a stream after an event");
}

cqsa_status stream_query(void* handle, void* stream, int32_t* capturing_out) {
  const device& d = device_of(handle);
  const scope here(d, scope::capture::as_is);
  CQSA_CUDA_TRY(here.status());
  if (!is_default(stream_of(stream))) {
    CUcontext its_context = nullptr;
    CQSA_CUDA_TRY(check(driver().cuStreamGetCtx(stream_of(stream), &its_context), "asking for the context of the stream"));
    if (its_context != d.context) return refuse_context(d, its_context);
  }
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult result = driver().cuStreamIsCapturing(stream_of(stream), &status);
  if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "stream is the legacy default stream while another stream of device %" PRId32
                " that waits for it is being captured; work on it would break that capture", d.index);
  CQSA_CUDA_TRY(check(result, "asking whether the stream is being captured"));
  *capturing_out = status != CU_STREAM_CAPTURE_STATUS_NONE;
  return CQSA_OK;
}

cqsa_status event_create(void* handle, void** event_out) {
  const scope here(device_of(handle));
  CQSA_CUDA_TRY(here.status());
  CUevent event = nullptr;
  CQSA_CUDA_TRY(check(driver().cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "creating an event"));
  *event_out = event;
  return CQSA_OK;
}

void event_destroy(void* handle, void* event) {
  const scope here(device_of(handle));
  if (here.status() == CQSA_OK && event != nullptr) driver().cuEventDestroy_v2(event_of(event));
}

cqsa_status event_record(void* handle, void* event, void* stream) {
  const scope here(device_of(handle));
  CQSA_CUDA_TRY(here.status());
  return check(driver().cuEventRecord(event_of(event), stream_of(stream)), "recording an event");
}

cqsa_status event_sync(void* handle, void* event) {
  const scope here(device_of(handle));
  CQSA_CUDA_TRY(here.status());
  return check(driver().cuEventSynchronize(event_of(event)), "waiting for an event");
}

// From pageable memory the driver fills its own staging memory before it returns, as the contract wants it.
cqsa_status copy(void* handle, void* to, const void* from, uint64_t bytes, int32_t direction, void* stream) {
  const scope here(device_of(handle));
  CQSA_CUDA_TRY(here.status());
  if (bytes == 0) return CQSA_OK;
  const auto to_address = reinterpret_cast<CUdeviceptr>(to), from_address = reinterpret_cast<CUdeviceptr>(from);
  switch (direction) {
    case CQSA_COPY_TO_DEVICE:
      return check(driver().cuMemcpyHtoDAsync_v2(to_address, from, bytes, stream_of(stream)), "copying to the device");
    case CQSA_COPY_TO_HOST:
      return check(driver().cuMemcpyDtoHAsync_v2(to, from_address, bytes, stream_of(stream)), "copying from the device");
    case CQSA_COPY_ON_DEVICE:
      return check(driver().cuMemcpyDtoDAsync_v2(to_address, from_address, bytes, stream_of(stream)), "copying on the device");
    default: return fail(CQSA_ERROR_INTERNAL, "direction of a copy is %" PRId32, direction);
  }
}

}  // namespace cqsa::cuda
