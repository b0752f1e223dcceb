// SPDX-License-Identifier: Apache-2.0
// The extern "C" bodies of attention: guard, validate, call.
#include <atomic>
#include <chrono>
#include <cinttypes>
#include <cstring>

#include "abi_struct.h"
#include "guard.h"
#include "ops/attention/bind_cache.h"
#include "ops/attention/describe.h"
#include "ops/attention/enqueue.h"
#include "ops/attention/merge.h"
#include "ops/attention/operand_names.h"
#include "ops/attention/plan.h"
#include "ops/attention/plan_cache.h"
#include "tensor.h"

using namespace cqsa;

namespace {

// Sizes of the structs in version 0.1, below which struct_size is not one that any version had.
constexpr uint32_t first_params = sizeof(cqsa_attention_params);
constexpr uint32_t first_run_info = sizeof(cqsa_run_info);
constexpr uint32_t first_plan_info = sizeof(cqsa_plan_info);

constexpr char workspace_mark[16] = "cqsa workspace";

cqsa_status need_context(const cqsa_context* context) {
  return context ? CQSA_OK : fail(CQSA_ERROR_NULL_POINTER, "context is NULL");
}

cqsa_status need_plan(const cqsa_plan* plan) { return plan ? CQSA_OK : fail(CQSA_ERROR_NULL_POINTER, "plan is NULL"); }

// An implementation that keeps no state (the f64 reference) still computes directly, so AUTO falls back to that.
cqsa_status choose_implementation_for(const cqsa_backend_v1& backend, const hardware_model& machine, cqsa_plan& plan) {
  const bool state = needs_state(plan.problem, machine);
  const cqsa_status status = choose_implementation(backend, plan.problem, state, plan.impl);
  if (status == CQSA_OK || !state || plan.problem.p.schedule != CQSA_SCHEDULE_AUTO) return status;
  plan.problem.p.schedule = CQSA_SCHEDULE_DIRECT;
  return choose_implementation(backend, plan.problem, false, plan.impl);
}

// What a plan for this problem and machine is; plan.problem and plan.hardware are set.
cqsa_status choose_plan(cqsa_plan& plan) {
  const hardware_model& machine = plan.hardware;
  const cqsa_backend_v1* backend = plan.context ? plan.context->backend : machine.host ? cqsa_cpu_backend() : nullptr;
  if (backend) CQSA_TRY(choose_implementation_for(*backend, machine, plan));
  return choose_schedule(plan.problem, machine, plan.impl, budget_of(plan.problem, machine), plan.choice, plan.cost);
}

// One leaf call on what is on the device already: never slower than another schedule, and open to implementations that keep no
// state. False when there is none within the budget.
bool choose_whole(cqsa_plan& plan) {
  // Below this the budget is not worth asking the driver for: should even that not be there, the run plans again.
  constexpr uint64_t small = uint64_t{32} << 20;
  const int32_t wanted = plan.problem.p.schedule;
  if (!plan.problem.on_device() || (wanted != CQSA_SCHEDULE_AUTO && wanted != CQSA_SCHEDULE_DIRECT)) return false;
  if (choose_implementation(*plan.context->backend, plan.problem, false, plan.impl) != CQSA_OK) return false;
  const budget limit = budget_of(plan.problem, plan.hardware);
  plan.problem.p.schedule = CQSA_SCHEDULE_DIRECT;
  const cqsa_status status = choose_schedule(plan.problem, plan.hardware, plan.impl, limit, plan.choice, plan.cost);
  plan.problem.p.schedule = wanted;
  return status == CQSA_OK && (limit.device != UINT64_MAX || plan.cost.device <= small);
}

// Everything that is decided before operands are seen. The plan's context is not counted here. lasting_out: the same params will
// get the same plan, as nothing that changes from call to call was asked for it.
cqsa_status make_plan(const cqsa_context* context, const cqsa_attention_params* params, cqsa_plan& plan, bool* lasting_out = nullptr) {
  static std::atomic<uint64_t> plans{0};
  CQSA_TRY(make_problem(params, plan.problem));
  plan.number = plans.fetch_add(1, std::memory_order_relaxed) + 1;
  plan.context = const_cast<cqsa_context*>(context);
  plan.problem.chip = context->chip;
  CQSA_TRY(hardware_of(*context, rates::known, plan.hardware));
  if (context->is_host()) return choose_plan(plan);
  const bool whole = choose_whole(plan);
  if (lasting_out) *lasting_out = whole;
  if (whole) return CQSA_OK;
  CQSA_TRY(add_capacities(*context, plan.hardware));
  return choose_whole(plan) ? CQSA_OK : choose_plan(plan);
}

// The plan of one call: programs make the same one again and again.
cqsa_status find_plan(const cqsa_context* context, const one_shot_params& params, cqsa_plan& plan) {
  if (find_cached_plan(*context, params, plan)) return CQSA_OK;
  bool lasting = false;
  CQSA_TRY(make_plan(context, &params.complete, plan, &lasting));
  if (lasting) cache_plan(*context, params, plan);
  return CQSA_OK;
}

cqsa_status check_workspace(const cqsa_plan& plan, const void* workspace, uint64_t bytes) {
  if (workspace == nullptr && plan.cost.workspace == 0) return CQSA_OK;
  if (workspace == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "workspace is NULL");
  if (bytes < plan.cost.workspace)
    return fail(CQSA_ERROR_WORKSPACE, "workspace_bytes is %" PRIu64 ", the plan needs %" PRIu64, bytes, plan.cost.workspace);
  if (reinterpret_cast<uintptr_t>(workspace) % CQSA_WORKSPACE_ALIGNMENT)
    return fail(CQSA_ERROR_WORKSPACE, "workspace is not aligned to %d bytes", CQSA_WORKSPACE_ALIGNMENT);
  const auto address = reinterpret_cast<uintptr_t>(workspace);
  if (bytes > INT64_MAX || address > UINTPTR_MAX - bytes)
    return fail(CQSA_ERROR_WORKSPACE, "workspace at 0x%" PRIxPTR " with workspace_bytes %" PRIu64 " reaches past the end of the address space",
                address, bytes);
  return CQSA_OK;
}

// A run writes to all of its workspace, at any time.
cqsa_status check_workspace_apart(const cqsa_attention_args& args) {
  int64_t bytes = static_cast<int64_t>(args.workspace_bytes);
  const cqsa_tensor workspace{args.workspace, CQSA_DEVICE_CPU, 0, 1, CQSA_DTYPE_U8, &bytes, nullptr, 0};
  for (const operand_name& o : operand_names)
    if (const cqsa_tensor* t = args.*o.tensor) CQSA_TRY(check_no_overlap(workspace, "args->workspace", *t, o.name));
  return CQSA_OK;
}

cqsa_status check_run_workspace(const cqsa_plan& plan, const cqsa_attention_args& args, bool apart) {
  if (args.workspace == nullptr) {
    if (args.workspace_bytes)
      return fail(CQSA_ERROR_NULL_POINTER, "args->workspace is NULL with workspace_bytes %" PRIu64, args.workspace_bytes);
    return CQSA_OK;
  }
  CQSA_TRY(check_workspace(plan, args.workspace, args.workspace_bytes));
  if (!apart) CQSA_TRY(check_workspace_apart(args));
  // Device memory cannot be looked at without a copy; there the mark is not checked.
  if (plan.hardware.host && std::memcmp(args.workspace, workspace_mark, sizeof workspace_mark) != 0)
    return fail(CQSA_ERROR_WORKSPACE, "args->workspace was not prepared with cqsa_workspace_init()");
  return CQSA_OK;
}

// Device operands must be on the context's own device, not on a sibling.
cqsa_status check_device_index(const cqsa_context& context, const cqsa_attention_args& args) {
  for (const operand_name& o : operand_names)
    if (const cqsa_tensor* t = args.*o.tensor; t && t->device_type == context.backend->device_type && t->device_id != context.device_index)
      return fail(CQSA_ERROR_DEVICE, "%s is on device %d, the context is for device %d", o.name, t->device_id, context.device_index);
  return CQSA_OK;
}

cqsa_status start_run(run_state& run, cqsa_attention_leaf& whole) {
  if (run.plan->problem.empty()) return CQSA_OK;
  if (run.plan->hardware.host) return run_host(run, whole);
  return enqueues(*run.plan) ? run_enqueued(run, whole) : run_device(run, whole);
}

// To what is on the device already: the checks of an earlier run hold as long as only addresses differ.
cqsa_status bind_on_device(const cqsa_plan& plan, const cqsa_attention_args& args, cqsa_attention_leaf& whole, bool& again) {
  again = bind_again(plan, args, whole);
  if (again) return CQSA_OK;
  CQSA_TRY(check_device_index(*plan.context, args));
  CQSA_TRY(bind_operands(plan.problem, *plan.context->backend, args, whole));
  remember_binding(plan, args, whole);
  return CQSA_OK;
}

// again: bind_again() took the operands.
cqsa_status run_bound(const cqsa_plan& plan, const cqsa_attention_args& args, cqsa_attention_leaf& whole, void* stream, bool capturing, bool again) {
  if (!plan.hardware.host) CQSA_TRY(check_pointers(*plan.context, args));
  if (args.checkpoint && enqueues(plan))
    return fail(CQSA_ERROR_UNSUPPORTED, "args->checkpoint is given, but a run whose operands are all on the device is one launch");
  CQSA_TRY(check_run_workspace(plan, args, again));
  if (args.info) CQSA_TRY(check_out_struct(args.info, "args->info", first_run_info));
  if (capturing && !plan.problem.empty()) CQSA_TRY(check_capture(plan, args));
  whole.batch_invariant = plan.problem.batch_invariant();
  run_state run{&plan, &args, stream};
  report_choice(plan.choice, plan.hardware.host, run.info);
  if (args.info == nullptr) return start_run(run, whole);  // nobody asks how long it took
  const auto start = std::chrono::steady_clock::now();
  const cqsa_status status = start_run(run, whole);
  run.info.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  write_struct(run.info, args.info);
  return status;
}

cqsa_status run_plan(const cqsa_plan& plan, const cqsa_attention_args& args, void* stream, bool capturing) {
  cqsa_attention_leaf whole;
  bool again = false;
  CQSA_TRY(plan.hardware.host ? bind_operands(plan.problem, *plan.context->backend, args, whole) : bind_on_device(plan, args, whole, again));
  return run_bound(plan, args, whole, stream, capturing, again);
}

cqsa_status copy_params(const cqsa_attention_params* params, cqsa_attention_params& out) {
  return copy_struct(params, "params", first_params, attention_flags, out);
}

cqsa_status prepare_header(const cqsa_plan& plan, void* workspace) {
  if (plan.hardware.host) {
    std::memset(workspace, 0, workspace_header_bytes);
    std::memcpy(workspace, workspace_mark, sizeof workspace_mark);
  }
  return CQSA_OK;
}

}  // namespace

extern "C" {

cqsa_status cqsa_attention_params_of(const cqsa_context* context, const cqsa_attention_args* args,
                                     cqsa_attention_params* params_inout) {
  return guard([&]() -> cqsa_status {
    CQSA_TRY(need_context(context));
    cqsa_attention_args operands{};
    CQSA_TRY(copy_args(args, operands));
    cqsa_attention_params params{};
    CQSA_TRY(copy_params(params_inout, params));
    CQSA_TRY(params_of(*context->backend, operands, params));
    write_struct(params, params_inout);
    return CQSA_OK;
  });
}

cqsa_status cqsa_attention(cqsa_context* context, const cqsa_attention_params* params, const cqsa_attention_args* args, void* stream) {
  return guard([&]() -> cqsa_status {
    CQSA_TRY(need_context(context));
    bool capturing = false;
    CQSA_TRY(query_stream(*context, stream, capturing));
    cqsa_attention_args operands{};
    CQSA_TRY(copy_args(args, operands));
    one_shot_params given;
    CQSA_TRY(copy_params(params, given.stated));
    cqsa_plan plan;
    cqsa_attention_leaf whole;
    if (find_repeated(*context, given.stated, operands, plan, whole)) return run_bound(plan, operands, whole, stream, capturing, true);
    given.complete = given.stated;
    CQSA_TRY(complete_params(*context->backend, operands, given.complete));
    CQSA_TRY(find_plan(context, given, plan));
    return run_plan(plan, operands, stream, capturing);
  });
}

cqsa_status cqsa_attention_query(const cqsa_context* context, const cqsa_attention_params* params) {
  return guard([&]() -> cqsa_status {
    CQSA_TRY(need_context(context));
    cqsa_plan plan;
    return make_plan(context, params, plan);
  });
}

cqsa_status cqsa_attention_plan_create(cqsa_context* context, const cqsa_attention_params* params, cqsa_plan** plan_out) {
  return guard([&]() -> cqsa_status {
    CQSA_TRY(need_context(context));
    if (plan_out == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "plan_out is NULL");
    auto plan = std::make_unique<cqsa_plan>();
    CQSA_TRY(make_plan(context, params, *plan));
    // Now, so that execute with the caller's workspace allocates nothing.
    if (context->is_host() && context->pool && plan->choice.workers > 1) context->pool->start();
    retain(context);
    *plan_out = plan.release();
    return CQSA_OK;
  });
}

cqsa_status cqsa_attention_plan_create_for(const char* hardware_json, const cqsa_attention_params* params, cqsa_plan** plan_out) {
  return guard([&]() -> cqsa_status {
    if (plan_out == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "plan_out is NULL");
    auto plan = std::make_unique<cqsa_plan>();
    CQSA_TRY(hardware_from_json(hardware_json, plan->hardware));
    CQSA_TRY(make_problem(params, plan->problem));
    CQSA_TRY(choose_plan(*plan));
    *plan_out = plan.release();
    return CQSA_OK;
  });
}

void cqsa_plan_destroy(cqsa_plan* plan) {
  if (plan == nullptr) return;
  if (plan->context) release(plan->context);
  delete plan;
}

cqsa_status cqsa_plan_describe(const cqsa_plan* plan, cqsa_plan_info* info_out) {
  return guard([&]() -> cqsa_status {
    CQSA_TRY(need_plan(plan));
    CQSA_TRY(check_out_struct(info_out, "info_out", first_plan_info));
    cqsa_plan_info info{};
    CQSA_TRY(describe_plan(*plan, info));
    write_struct(info, info_out);
    return CQSA_OK;
  });
}

cqsa_status cqsa_plan_line(const cqsa_plan* plan, const cqsa_run_info* info, char* buffer, uint64_t size, uint64_t* length_out) {
  return guard([&]() -> cqsa_status {
    CQSA_TRY(need_plan(plan));
    cqsa_run_info run{};
    if (info) CQSA_TRY(copy_struct(info, "info", first_run_info, 0, run));
    std::string text;
    CQSA_TRY(plan_line(*plan, info ? &run : nullptr, text));
    return copy_text(text, buffer, size, length_out);
  });
}

cqsa_status cqsa_plan_explain(const cqsa_plan* plan, char* buffer, uint64_t size, uint64_t* length_out) {
  return guard([&]() -> cqsa_status {
    CQSA_TRY(need_plan(plan));
    std::string text;
    CQSA_TRY(explain_plan(*plan, text));
    return copy_text(text, buffer, size, length_out);
  });
}

cqsa_status cqsa_plan_json(const cqsa_plan* plan, char* buffer, uint64_t size, uint64_t* length_out) {
  return guard([&]() -> cqsa_status {
    CQSA_TRY(need_plan(plan));
    std::string text;
    CQSA_TRY(plan_json(*plan, text));
    return copy_text(text, buffer, size, length_out);
  });
}

cqsa_status cqsa_context_hardware(const cqsa_context* context, char* buffer, uint64_t size, uint64_t* length_out) {
  return guard([&]() -> cqsa_status {
    CQSA_TRY(need_context(context));
    hardware_model machine;
    CQSA_TRY(hardware_of(*context, rates::all, machine));
    return copy_text(hardware_to_json(machine), buffer, size, length_out);
  });
}

cqsa_status cqsa_workspace_query(const cqsa_plan* plan, uint64_t* bytes_out) {
  return guard([&]() -> cqsa_status {
    CQSA_TRY(need_plan(plan));
    if (bytes_out == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "bytes_out is NULL");
    *bytes_out = plan->cost.workspace;
    return CQSA_OK;
  });
}

cqsa_status cqsa_workspace_init(const cqsa_plan* plan, void* workspace, uint64_t bytes) {
  return guard([&]() -> cqsa_status {
    CQSA_TRY(need_plan(plan));
    CQSA_TRY(check_workspace(*plan, workspace, bytes));
    return prepare_header(*plan, workspace);
  });
}

cqsa_status cqsa_attention_execute(const cqsa_plan* plan, const cqsa_attention_args* args, void* stream) {
  return guard([&]() -> cqsa_status {
    CQSA_TRY(need_plan(plan));
    if (plan->context == nullptr)
      return fail(CQSA_ERROR_UNSUPPORTED, "plan was made by cqsa_attention_plan_create_for() for a machine that is not here");
    bool capturing = false;
    CQSA_TRY(query_stream(*plan->context, stream, capturing));
    cqsa_attention_args operands{};
    CQSA_TRY(copy_args(args, operands));
    return run_plan(*plan, operands, stream, capturing);
  });
}

cqsa_status cqsa_attention_merge(cqsa_context* context, const cqsa_attention_merge_args* args, void* stream) {
  return guard([&]() -> cqsa_status {
    CQSA_TRY(need_context(context));
    bool capturing = false;  // a merge is one launch, which may be captured
    CQSA_TRY(query_stream(*context, stream, capturing));
    return merge(*context, args, stream);
  });
}

}  // extern "C"
