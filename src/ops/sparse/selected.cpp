// SPDX-License-Identifier: Apache-2.0
#include "ops/sparse/selected.h"

#include <cinttypes>

#include "abi_struct.h"
#include "tensor.h"
#include "workspace.h"

namespace cqsa {

namespace {

constexpr uint32_t first_args = sizeof(cqsa_attention_selected_args);

cqsa_status choose(const cqsa_backend_v1& backend, const cqsa_selected_leaf& leaf, const cqsa_selected_impl*& impl_out) {
  if (backend.selected == nullptr || backend.num_selected < 1)
    return fail(CQSA_ERROR_UNSUPPORTED, "backend %s has no attention over selected cells", backend.name);
  char reason[256] = "";
  cqsa_status status = CQSA_ERROR_UNSUPPORTED;
  for (int32_t i = 0; i < backend.num_selected; ++i) {
    status = backend.selected[i].probe(&leaf, reason, sizeof reason);
    if (status == CQSA_OK) return impl_out = &backend.selected[i], CQSA_OK;
  }
  return fail(status, "no implementation of backend %s takes this problem; the last one says: %s", backend.name, reason);
}

uint64_t workspace_of(const cqsa_context& context, const cqsa_selected_leaf& leaf, const cqsa_selected_impl& impl) {
  arena counting;
  if (leaf.total_q > 0) counting.take_bytes(impl.workspace(&leaf, context.num_threads));
  return counting.used();
}

struct run {
  const cqsa_context& context;
  const cqsa_selected_leaf& leaf;
  const cqsa_selected_impl& impl;
  uint64_t bytes;
  void* stream;

  cqsa_status launch(void* workspace) const {
    const cqsa_backend_v1& backend = *context.backend;
    const cqsa_exec exec = plain_exec(context);
    const cqsa_status status = impl.launch(context.device, &leaf, workspace, bytes, context.is_host() ? &exec : nullptr, stream);
    if (status == CQSA_OK || status == CQSA_ERROR_CALLBACK) return status;  // of the callback the core has said what is wrong
    return fail(status, "%s failed on backend %s: %s", impl.name, backend.name, backend.last_error());
  }
};

cqsa_status fail_memory(const run& r, cqsa_status status) {
  return fail(status, "the allocation of %" PRIu64 " bytes of device memory failed on backend %s: %s", r.bytes, r.context.backend->name,
              r.context.backend->last_error());
}

cqsa_status run_with_host_memory(const run& r) {
  void* const memory = host_allocate(r.context, r.bytes);
  if (memory == nullptr) return fail(CQSA_ERROR_OUT_OF_HOST_MEMORY, "the allocation of %" PRIu64 " bytes of host memory failed", r.bytes);
  const cqsa_status status = r.launch(memory);
  host_release(r.context, memory, r.bytes);
  return status;
}

// A device without memory in stream order: ordinary memory, which is given back once the device has done with it.
cqsa_status run_and_wait(const run& r) {
  const cqsa_backend_v1& backend = *r.context.backend;
  void* memory = nullptr;
  cqsa_status status = backend.device_alloc(r.context.device, r.bytes, &memory);
  if (status != CQSA_OK) return fail_memory(r, status);
  status = r.launch(memory);
  const cqsa_status waited = backend.stream_sync(r.context.device, r.stream);
  if (status == CQSA_OK && waited != CQSA_OK)
    status = fail(waited, "waiting for the device failed on backend %s: %s", backend.name, backend.last_error());
  backend.device_free(r.context.device, memory);
  return status;
}

cqsa_status run_with_device_memory(const run& r) {
  const cqsa_backend_v1& backend = *r.context.backend;
  void* memory = nullptr;
  cqsa_status status = backend.stream_alloc(r.context.device, r.bytes, r.stream, &memory);
  if (status == CQSA_ERROR_UNSUPPORTED) return run_and_wait(r);
  if (status != CQSA_OK) return fail_memory(r, status);
  status = r.launch(memory);
  const cqsa_status freed = backend.stream_free(r.context.device, memory, r.stream);
  if (status != CQSA_OK || freed == CQSA_OK) return status;
  return fail(freed, "giving back device memory failed on backend %s: %s", backend.name, backend.last_error());
}

cqsa_status check_capture(const cqsa_attention_selected_args& args, uint64_t bytes) {
  if (args.flags & CQSA_SELECTED_CHECK)
    return fail(CQSA_ERROR_CAPTURE_UNSAFE, "stream is being captured into a graph, but CQSA_SELECTED_CHECK waits for what is queued on it");
  if (bytes == 0 || args.workspace) return CQSA_OK;
  return fail(CQSA_ERROR_CAPTURE_UNSAFE,
              "stream is being captured into a graph, where nothing can be allocated, and this call needs %" PRIu64
              " bytes: pass them as args->workspace",
              bytes);
}

cqsa_status check_workspace_bytes(const cqsa_attention_selected_args& args, uint64_t bytes) {
  if (args.workspace == nullptr || args.workspace_bytes >= bytes) return CQSA_OK;
  return fail(CQSA_ERROR_WORKSPACE, "args->workspace_bytes is %" PRIu64 ", this call needs %" PRIu64, args.workspace_bytes, bytes);
}

cqsa_status copy_args(const cqsa_attention_selected_args* caller, cqsa_attention_selected_args& out) {
  return copy_struct(caller, "args", first_args, CQSA_SELECTED_CHECK, out);
}

}  // namespace

cqsa_status attention_selected(const cqsa_context& context, const cqsa_attention_selected_args* caller, void* stream, bool capturing) {
  cqsa_attention_selected_args args{};
  cqsa_selected_leaf leaf;
  const cqsa_selected_impl* impl = nullptr;
  CQSA_TRY(copy_args(caller, args));
  CQSA_TRY(bind_selected(context, args, false, leaf));
  CQSA_TRY(choose(*context.backend, leaf, impl));
  const run r{context, leaf, *impl, workspace_of(context, leaf, *impl), stream};
  CQSA_TRY(check_workspace_bytes(args, r.bytes));
  if (leaf.total_q == 0) return CQSA_OK;
  if (capturing) CQSA_TRY(check_capture(args, r.bytes));
  if (args.flags & CQSA_SELECTED_CHECK) CQSA_TRY(check_selection(context, leaf, stream));
  if (args.workspace || r.bytes == 0) return r.launch(args.workspace);
  return context.is_host() ? run_with_host_memory(r) : run_with_device_memory(r);
}

cqsa_status attention_selected_workspace(const cqsa_context& context, const cqsa_attention_selected_args* caller, uint64_t& bytes_out) {
  cqsa_attention_selected_args args{};
  cqsa_selected_leaf leaf;
  const cqsa_selected_impl* impl = nullptr;
  CQSA_TRY(copy_args(caller, args));
  CQSA_TRY(bind_selected(context, args, true, leaf));
  CQSA_TRY(choose(*context.backend, leaf, impl));
  bytes_out = workspace_of(context, leaf, *impl);
  return CQSA_OK;
}

}  // namespace cqsa
