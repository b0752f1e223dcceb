// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/enqueue.h"

#include <cinttypes>

#include "ops/attention/operand_names.h"
#include "tensor.h"
#include "workspace.h"

namespace cqsa {

cqsa_status query_stream(const cqsa_context& context, void* stream, bool& capturing_out) {
  const cqsa_backend_v1& backend = *context.backend;
  capturing_out = false;
  if (context.is_host()) {
    if (stream == nullptr) return CQSA_OK;
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "stream is not NULL, but backend %s has no streams", backend.name);
  }
  int32_t capturing = 0;
  const cqsa_status status = backend.stream_query(context.device, stream, &capturing);
  if (status != CQSA_OK)
    return fail(status, "stream cannot be used with %s device %d: %s", backend.name, context.device_index, backend.last_error());
  capturing_out = capturing != 0;
  return CQSA_OK;
}

// ---- pointers ---------------------------------------------------------------------------------------------------------------

namespace {

cqsa_status refuse_pointer(const cqsa_context& context, const cqsa_tensor& t, const char* name, const cqsa_pointer_info& found) {
  const char* const backend = context.backend->name;
  if (t.device_type != context.backend->device_type)
    return fail(CQSA_ERROR_DEVICE, "%s is declared in host memory, but its pointer is memory of %s device %d", name, backend,
                found.device);
  if (found.kind == CQSA_POINTER_DEVICE)
    return fail(CQSA_ERROR_DEVICE, "%s is declared on %s device %d, but its pointer is memory of device %d", name, backend,
                t.device_id, found.device);
  return fail(CQSA_ERROR_DEVICE, "%s is declared on %s device %d, but its pointer is %s host memory", name, backend, t.device_id,
              found.kind == CQSA_POINTER_PINNED ? "pinned" : "ordinary");
}

// Managed memory counts as the device's.
bool is_on_device(const cqsa_context& context, const cqsa_pointer_info& found) {
  return found.kind == CQSA_POINTER_MANAGED || (found.kind == CQSA_POINTER_DEVICE && found.device == context.device_index);
}

cqsa_status query_pointer(const cqsa_context& context, const void* pointer, const char* name, cqsa_pointer_info& found) {
  const cqsa_status status = context.backend->pointer_query(context.device, pointer, &found);
  if (status == CQSA_OK) return CQSA_OK;
  return fail(status, "the driver cannot say what %s points to: %s", name, context.backend->last_error());
}

}  // namespace

cqsa_status pointer_answers::ask(const cqsa_context& context, uintptr_t address, const char* name, cqsa_pointer_info& out) {
  for (int i = 0; i < count_; ++i)
    if (address - known_[i].start < known_[i].bytes) return out = known_[i], CQSA_OK;
  out = {};
  CQSA_TRY(query_pointer(context, reinterpret_cast<const void*>(address), name, out));
  if (out.bytes > 0 && count_ < most) known_[count_++] = out;
  return CQSA_OK;
}

bool pointer_answers::on_device(const cqsa_context& context, uintptr_t address) const {
  for (int i = 0; i < count_; ++i)
    if (address - known_[i].start < known_[i].bytes) return is_on_device(context, known_[i]);
  return false;
}

// Memory declared pinned that is not is only slower: a copy from or to it has read or written it when it returns.
cqsa_status check_pointer(const cqsa_context& context, const cqsa_tensor& t, const char* name, pointer_answers& answers) {
  if (context.backend->pointer_query == nullptr) return CQSA_OK;
  const bool device = t.device_type == context.backend->device_type;
  if (device && answers.on_device(context, reinterpret_cast<uintptr_t>(t.data) + t.byte_offset)) return CQSA_OK;
  if (is_empty(t)) return CQSA_OK;
  cqsa_pointer_info found;
  CQSA_TRY(answers.ask(context, address_of(t), name, found));
  if (found.kind == CQSA_POINTER_MANAGED) return CQSA_OK;
  const bool fits = device ? is_on_device(context, found) : found.kind != CQSA_POINTER_DEVICE;
  return fits ? CQSA_OK : refuse_pointer(context, t, name, found);
}

cqsa_status check_pointers(const cqsa_context& context, const cqsa_attention_args& args) {
  if (context.backend->pointer_query == nullptr) return CQSA_OK;
  pointer_answers answers;
  for (const operand_name& o : operand_names)
    if (const cqsa_tensor* t = args.*o.tensor) CQSA_TRY(check_pointer(context, *t, o.name, answers));
  if (args.workspace == nullptr) return CQSA_OK;
  cqsa_pointer_info found;
  CQSA_TRY(answers.ask(context, reinterpret_cast<uintptr_t>(args.workspace), "args->workspace", found));
  if (is_on_device(context, found)) return CQSA_OK;
  return fail(CQSA_ERROR_WORKSPACE, "args->workspace is not memory of %s device %d", context.backend->name, context.device_index);
}

// ---- the run ----------------------------------------------------------------------------------------------------------------

bool enqueues(const cqsa_plan& plan) {
  return !plan.hardware.host && is_one_launch(plan.problem, plan.choice);
}

cqsa_status check_capture(const cqsa_plan& plan, const cqsa_attention_args& args) {
  if (!enqueues(plan))
    return fail(CQSA_ERROR_CAPTURE_UNSAFE, "stream is being captured into a graph, but this plan waits for the device: only the "
                                           "direct schedule with every operand on the device can be captured");
  if (plan.cost.workspace == 0 || args.workspace) return CQSA_OK;
  return fail(CQSA_ERROR_CAPTURE_UNSAFE, "stream is being captured into a graph, where nothing can be allocated, and the plan needs "
                                         "%" PRIu64 " bytes: pass them as args->workspace", plan.cost.workspace);
}

namespace {

// What priced the plan and what is launched are the same.
void finish(cqsa_attention_leaf& leaf, const schedule_choice& choice) {
  leaf.tile_q = choice.leaf_tile_q;
  leaf.tile_k = choice.leaf_tile_k;
  if (leaf.cu_seqlens_q) leaf.flags |= CQSA_LEAF_CLEAR_TAIL;
}

}  // namespace

footprint whole_footprint(const cqsa_attention_leaf& shape, const cqsa_attention_impl* impl, const schedule_choice& choice) {
  cqsa_attention_leaf leaf = shape;
  finish(leaf, choice);
  arena counting;
  counting.take_bytes(impl ? impl->workspace(&leaf, choice.workers) : 0);
  footprint cost;
  cost.device = cost.workspace = counting.used();
  cost.tasks = 1;
  return cost;
}

namespace {

cqsa_status launch(run_state& run, const cqsa_attention_leaf& leaf, void* workspace) {
  const cqsa_plan& plan = *run.plan;
  const cqsa_status status = plan.impl->launch(plan.context->device, &leaf, workspace, plan.cost.workspace, nullptr, run.stream);
  if (status == CQSA_OK) return CQSA_OK;
  const cqsa_backend_v1& backend = *plan.context->backend;
  return fail(status, "%s failed on backend %s: %s", plan.impl->name, backend.name, backend.last_error());
}

// A device without memory in stream order: the run takes ordinary memory, and has to wait before it gives it back.
cqsa_status launch_and_wait(run_state& run, const cqsa_attention_leaf& leaf) {
  const cqsa_context& context = *run.plan->context;
  const cqsa_backend_v1& backend = *context.backend;
  const uint64_t bytes = run.plan->cost.workspace;
  void* memory = nullptr;
  cqsa_status status = backend.device_alloc(context.device, bytes, &memory);
  if (status != CQSA_OK)
    return fail(status, "the allocation of %" PRIu64 " bytes of device memory failed on backend %s: %s", bytes, backend.name,
                backend.last_error());
  status = launch(run, leaf, memory);
  const cqsa_status waited = backend.stream_sync(context.device, run.stream);
  if (status == CQSA_OK && waited != CQSA_OK)
    status = fail(waited, "waiting for the device failed on backend %s: %s", backend.name, backend.last_error());
  backend.device_free(context.device, memory);
  return status;
}

// With the library's own memory around the launch, in the order of the stream.
cqsa_status launch_with_memory(run_state& run, const cqsa_attention_leaf& leaf) {
  const cqsa_context& context = *run.plan->context;
  const cqsa_backend_v1& backend = *context.backend;
  const uint64_t bytes = run.plan->cost.workspace;
  void* memory = nullptr;
  cqsa_status status = backend.stream_alloc(context.device, bytes, run.stream, &memory);
  if (status == CQSA_ERROR_UNSUPPORTED) return launch_and_wait(run, leaf);
  if (status != CQSA_OK)
    return fail(status, "the allocation of %" PRIu64 " bytes of device memory failed on backend %s: %s", bytes, backend.name,
                backend.last_error());
  status = launch(run, leaf, memory);
  const cqsa_status freed = backend.stream_free(context.device, memory, run.stream);
  if (status != CQSA_OK || freed == CQSA_OK) return status;
  return fail(freed, "giving back device memory failed on backend %s: %s", backend.name, backend.last_error());
}

}  // namespace

cqsa_status run_enqueued(run_state& run, cqsa_attention_leaf& whole) {
  CQSA_TRY(poll_run(run, 0));
  const uint64_t bytes = run.plan->cost.workspace;
  const bool own = bytes != 0 && run.args->workspace == nullptr;
  const uint32_t flags = whole.flags;
  finish(whole, run.plan->choice);
  const cqsa_status status = own ? launch_with_memory(run, whole) : launch(run, whole, run.args->workspace);
  if (status == CQSA_ERROR_OUT_OF_DEVICE_MEMORY && own) {
    whole.flags = flags, whole.tile_q = whole.tile_k = 0;
    return run_device_in_less(run, whole, bytes);
  }
  CQSA_TRY(status);
  run.info.tasks = 1;
  run.info.peak_device_bytes = bytes;
  return poll_run(run, 1);
}

}  // namespace cqsa
