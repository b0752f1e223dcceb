// SPDX-License-Identifier: Apache-2.0
#include "ops/fp8/quantize.h"

#include <cinttypes>
#include <string>

#include "abi_struct.h"
#include "ops/fp8/quantize_check.h"
#include "ops/fp8/workspace.h"

namespace cqsa::fp8 {

namespace {

using args_type = cqsa_fp8_quantize_args;

constexpr uint32_t first_args = sizeof(args_type);
constexpr uint32_t known_flags = CQSA_FP8_POW2 | CQSA_FP8_NO_SATURATE | CQSA_FP8_RING_STAGE | CQSA_FP8_SILU;
constexpr int few = 4;  // entries without an allocation

cqsa_fp8_quantize_leaf leaf_of(const cqsa_context& context, const cqsa_fp8_job* jobs, int64_t count) {
  return {sizeof(cqsa_fp8_quantize_leaf), 0, jobs, count, context.chip};
}

uint64_t bytes_for(const cqsa_context& context, const cqsa_fp8_quantize_leaf& leaf) {
  const auto ask = context.backend->fp8_quantize_workspace;
  return ask ? ask(&leaf, context.num_threads) : 0;
}

cqsa_status check_list(const args_type* const* args, int64_t count) {
  if (count < 0 || count > INT32_MAX) return fail(CQSA_ERROR_INVALID_ARGUMENT, "count is %" PRId64 ", wanted 0 to %d", count, INT32_MAX);
  return count > 0 && args == nullptr ? fail(CQSA_ERROR_NULL_POINTER, "args is NULL") : CQSA_OK;
}

// Entry by entry; the workspace is that of the first.
struct binder {
  operand_list& list;
  const args_type* const* args;
  int64_t count;
  bool many, query;  // query: only the workspace is asked for

  cqsa_status bind(cqsa_fp8_job* jobs, workspace_use& use) {
    for (int64_t i = 0; i < count; ++i) {
      if (many) list.begin_entry(static_cast<int32_t>(i));
      const cqsa_status status = bind_entry(i, jobs[i], use);
      if (status != CQSA_OK) return many ? name_entry(status, "args", i) : status;
    }
    return CQSA_OK;
  }

  cqsa_status bind_entry(int64_t i, cqsa_fp8_job& job, workspace_use& use) {
    args_type copy;
    CQSA_TRY(copy_struct(args[i], "args", first_args, known_flags, copy));
    if (i == 0) use.memory = copy.workspace, use.given = copy.workspace_bytes;
    else if (!query && (copy.workspace || copy.workspace_bytes))
      return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->workspace is given, wanted NULL: the workspace of the first serves all");
    CQSA_TRY(bind_job(list, copy, job, query));
    return CQSA_OK;
  }
};

struct run {
  const cqsa_context& context;
  const cqsa_fp8_quantize_leaf& leaf;
  workspace_use use;
  const char* what;

  cqsa_status operator()(void* workspace) const {
    const cqsa_exec exec = plain_exec(context);
    const uint64_t bytes = workspace == nullptr ? 0 : use.memory ? use.given : use.needed;
    const cqsa_status status =
        context.backend->fp8_quantize(context.device, &leaf, workspace, bytes, context.is_host() ? &exec : nullptr, use.stream);
    return report(context, status, what);
  }
};

cqsa_status check_all_values(const cqsa_fp8_job* jobs, int64_t count, bool many) {
  for (int64_t i = 0; i < count; ++i) {
    const cqsa_status status = check_job_values(jobs[i]);
    if (status != CQSA_OK) return many ? name_entry(status, "args", i) : status;
  }
  return CQSA_OK;
}

cqsa_status launch(operand_list& list, const cqsa_fp8_job* jobs, int64_t count, workspace_use& use, bool many, const char* what) {
  const cqsa_context& context = list.context();
  const cqsa_fp8_quantize_leaf leaf = leaf_of(context, jobs, count);
  use.needed = bytes_for(context, leaf);
  list.begin_entry(many ? 0 : -1);
  const cqsa_status status = check_workspace(list, use);
  if (status != CQSA_OK) return many ? name_entry(status, "args", 0) : status;
  CQSA_TRY(list.check_overlap());
  if (context.is_host()) CQSA_TRY(check_all_values(jobs, count, many));
  if (context.backend->fp8_quantize == nullptr) return no_leaf(context, what);
  return run_with_workspace(context, use, many ? "args[0]->workspace" : "args->workspace", run{context, leaf, use, what});
}

}  // namespace

cqsa_status quantize(const cqsa_context& context, const args_type* const* args, int64_t count, bool many, void* stream, bool capturing) {
  CQSA_TRY(check_list(args, count));
  small_array<cqsa_fp8_job, few> jobs(count);
  small_array<operand, few * most_operands> operands(count * most_operands);
  operand_list list(context, operands.data(), look::everywhere);
  workspace_use use{nullptr, 0, 0, capturing, stream};
  binder all{list, args, count, many, false};
  CQSA_TRY(all.bind(jobs.data(), use));
  if (count == 0) return CQSA_OK;
  return launch(list, jobs.data(), count, use, many, "fp8_quantize");
}

cqsa_status quantize_workspace(const cqsa_context& context, const args_type* const* args, int64_t count, uint64_t& bytes_out) {
  CQSA_TRY(check_list(args, count));
  small_array<cqsa_fp8_job, few> jobs(count);
  operand_list list(context, nullptr, look::shapes_only);
  workspace_use ignored{};
  binder all{list, args, count, true, true};
  CQSA_TRY(all.bind(jobs.data(), ignored));
  if (count > 0 && context.backend->fp8_quantize == nullptr) return no_leaf(context, "fp8_quantize");
  bytes_out = count == 0 ? 0 : bytes_for(context, leaf_of(context, jobs.data(), count));
  return CQSA_OK;
}

// ---- amax -------------------------------------------------------------------------------------------------------------------

namespace {

cqsa_status amax_of(const cqsa_context& context, const amax_call& call, void* stream, bool capturing) {
  operand room[most_operands];
  operand_list list(context, room, look::everywhere);
  args_type args = CQSA_FP8_QUANTIZE_ARGS_INIT;
  cqsa_fp8_job job;
  if (call.block == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "block is NULL");
  if (call.amax_out == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "amax_out is NULL");
  args.x = call.x, args.nan_policy = call.nan_policy;
  args.row.block[0] = call.block[0], args.row.block[1] = call.block[1];
  CQSA_TRY(bind_job(list, args, job, true));
  job.block_amax.data = nullptr;
  CQSA_TRY(take_f32_grid(list, call.amax_out, "amax_out", true, job.block_amax));
  workspace_use use{call.workspace, call.workspace_bytes, 0, capturing, stream};
  return launch(list, &job, 1, use, false, "fp8_amax");
}

// The arguments have no struct around them.
cqsa_status without_struct(cqsa_status status) {
  if (status == CQSA_OK) return status;
  std::string text = last_error_text();
  for (const char* part : {"args->row.", "args->"})
    for (size_t at; (at = text.find(part)) != std::string::npos;) text.erase(at, std::strlen(part));
  return fail(status, "%s", text.c_str());
}

}  // namespace

cqsa_status amax(const cqsa_context& context, const amax_call& call, void* stream, bool capturing) {
  return without_struct(amax_of(context, call, stream, capturing));
}

}  // namespace cqsa::fp8
