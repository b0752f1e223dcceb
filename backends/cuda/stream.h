// SPDX-License-Identifier: Apache-2.0
// Streams, events and copies of cqsa_backend_v1: see there. The handles are CUstream and CUevent.
#pragma once

#include "backends/cqsa_backend.h"

namespace cqsa::cuda {

cqsa_status stream_create(void* handle, void** stream_out);
void stream_destroy(void* handle, void* stream);
cqsa_status stream_sync(void* handle, void* stream);
cqsa_status stream_wait(void* handle, void* stream, void* event);
cqsa_status stream_query(void* handle, void* stream, int32_t* capturing_out);
cqsa_status event_create(void* handle, void** event_out);
void event_destroy(void* handle, void* event);
cqsa_status event_record(void* handle, void* event, void* stream);
cqsa_status event_sync(void* handle, void* event);
cqsa_status copy(void* handle, void* to, const void* from, uint64_t bytes, int32_t direction, void* stream);

}  // namespace cqsa::cuda
