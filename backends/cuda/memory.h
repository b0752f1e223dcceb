// SPDX-License-Identifier: Apache-2.0
// Memory of cqsa_backend_v1: see there.
#pragma once

#include "backends/cqsa_backend.h"

namespace cqsa::cuda {

cqsa_status device_alloc(void* handle, uint64_t bytes, void** memory_out);
void device_free(void* handle, void* memory);
cqsa_status pinned_alloc(void* handle, uint64_t bytes, void** memory_out);
void pinned_free(void* handle, void* memory);
cqsa_status stream_alloc(void* handle, uint64_t bytes, void* stream, void** memory_out);
cqsa_status stream_free(void* handle, void* memory, void* stream);
cqsa_status pointer_query(void* handle, const void* pointer, cqsa_pointer_info* info_out);

}  // namespace cqsa::cuda
