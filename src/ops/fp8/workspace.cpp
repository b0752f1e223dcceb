// SPDX-License-Identifier: Apache-2.0
#include "ops/fp8/workspace.h"

#include "backends/fp8_rules.h"

namespace cqsa::fp8 {

namespace {

cqsa_status check_memory(const void* memory, uint64_t bytes, const char* memory_name, const char* bytes_name) {
  const auto address = reinterpret_cast<uintptr_t>(memory);
  if (address % CQSA_WORKSPACE_ALIGNMENT) return fail(CQSA_ERROR_WORKSPACE, "%s is not aligned to %d bytes", memory_name, CQSA_WORKSPACE_ALIGNMENT);
  if (bytes <= INT64_MAX && address <= UINTPTR_MAX - bytes) return CQSA_OK;
  return fail(CQSA_ERROR_WORKSPACE, "%s with %s %" PRIu64 " reaches past the end of the address space", memory_name, bytes_name, bytes);
}

// On a device the kernel looks.
cqsa_status check_prepared(const workspace_use& use) {
  const auto& header = *static_cast<const workspace_header*>(use.memory);
  if (header.magic == workspace_magic && header.bytes >= use.needed && header.bytes <= use.given) return CQSA_OK;
  return fail(CQSA_ERROR_WORKSPACE, "args->workspace was not prepared by cqsa_fp8_workspace_init() with the %" PRIu64 " bytes that this call needs", use.needed);
}

}  // namespace

cqsa_status check_workspace(operand_list& list, const workspace_use& use) {
  if (use.memory == nullptr && use.given == 0) return CQSA_OK;
  if (use.memory == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "args->workspace is NULL with workspace_bytes %" PRIu64, use.given);
  CQSA_TRY(check_memory(use.memory, use.given, "args->workspace", "workspace_bytes"));
  if (use.given < use.needed)
    return fail(CQSA_ERROR_WORKSPACE, "args->workspace_bytes is %" PRIu64 ", this call needs %" PRIu64, use.given, use.needed);
  if (use.given == 0) return CQSA_OK;
  CQSA_TRY(list.check_place(use.memory, "args->workspace", CQSA_ERROR_WORKSPACE));
  list.bytes(use.memory, use.given, "args->workspace");
  return use.prepared && list.context().is_host() && use.needed != 0 ? check_prepared(use) : CQSA_OK;
}

cqsa_status refuse_capture(uint64_t bytes, const char* argument) {
  return fail(CQSA_ERROR_CAPTURE_UNSAFE,
              "stream is being captured into a graph, where nothing can be allocated, and this call needs %" PRIu64 " bytes: pass them as %s", bytes,
              argument);
}

// ---- the library's own ------------------------------------------------------------------------------------------------------

cqsa_status call_workspace::fail_memory(cqsa_status status) const {
  return fail(status, "the allocation of %" PRIu64 " bytes of device memory failed on backend %s: %s", bytes_, context_.backend->name,
              context_.backend->last_error());
}

cqsa_status call_workspace::allocate() {
  const cqsa_backend_v1& backend = *context_.backend;
  if (context_.is_host()) {
    memory_ = host_allocate(context_, bytes_);
    if (memory_) return CQSA_OK;
    return fail(CQSA_ERROR_OUT_OF_HOST_MEMORY, "the allocation of %" PRIu64 " bytes of host memory failed", bytes_);
  }
  cqsa_status status = backend.stream_alloc(context_.device, bytes_, stream_, &memory_);
  waits_ = status == CQSA_ERROR_UNSUPPORTED;
  if (waits_) status = backend.device_alloc(context_.device, bytes_, &memory_);
  return status == CQSA_OK ? CQSA_OK : fail_memory(status);
}

cqsa_status call_workspace::begin(uint64_t bytes, bool prepare) {
  const cqsa_backend_v1& backend = *context_.backend;
  bytes_ = bytes;
  if (!prepare) return allocate();
  if (backend.fp8_workspace_init == nullptr) return no_leaf(context_, "fp8_workspace_init");
  CQSA_TRY(allocate());
  const cqsa_status status = backend.fp8_workspace_init(context_.device, memory_, bytes_, stream_);
  return status == CQSA_OK ? CQSA_OK : end(report(context_, status, "fp8_workspace_init"));
}

cqsa_status call_workspace::give_back() {
  const cqsa_backend_v1& backend = *context_.backend;
  if (context_.is_host()) return host_release(context_, memory_, bytes_), CQSA_OK;
  if (!waits_) return report(context_, backend.stream_free(context_.device, memory_, stream_), "giving back device memory");
  const cqsa_status waited = report(context_, backend.stream_sync(context_.device, stream_), "waiting for the device");
  backend.device_free(context_.device, memory_);
  return waited;
}

cqsa_status call_workspace::end(cqsa_status of_launch) {
  if (of_launch == CQSA_OK) return give_back();
  char said[512];  // what failed first is what is told
  std::memcpy(said, last_error_text(), sizeof said);
  return give_back() == CQSA_OK ? of_launch : fail(of_launch, "%s", said);
}

cqsa_status workspace_init(const cqsa_context& context, void* workspace, uint64_t bytes, void* stream) {
  const cqsa_backend_v1& backend = *context.backend;
  if (workspace == nullptr && bytes == 0) return CQSA_OK;  // of a call that needs none
  if (workspace == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "workspace is NULL with bytes %" PRIu64, bytes);
  CQSA_TRY(check_memory(workspace, bytes, "workspace", "bytes"));
  if (bytes == 0) return CQSA_OK;
  if (bytes < sizeof(workspace_header))
    return fail(CQSA_ERROR_WORKSPACE, "bytes is %" PRIu64 ", wanted 0 or at least %zu", bytes, sizeof(workspace_header));
  operand_list list(context, nullptr, look::everywhere);
  CQSA_TRY(list.check_place(workspace, "workspace", CQSA_ERROR_WORKSPACE));
  if (backend.fp8_workspace_init == nullptr) return no_leaf(context, "fp8_workspace_init");
  return report(context, backend.fp8_workspace_init(context.device, workspace, bytes, stream), "fp8_workspace_init");
}

}  // namespace cqsa::fp8
