// SPDX-License-Identifier: Apache-2.0
// Runs of a host backend: operands are used in place. Direct and stream are one leaf call, which tiles inside itself, unless
// operands are in mapped files or there is a checkpoint (host_blocks.cpp); CQS is one leaf call per task with the state of all
// rows in host memory.
#include <pthread.h>

#include <atomic>
#include <cmath>
#include <cstring>

#include "tensor.h"
#include "ops/attention/decompose.h"
#include "ops/attention/host_blocks.h"
#include "ops/attention/host_mapped.h"
#include "ops/attention/host_run.h"
#include "ops/attention/positions.h"
#include "workspace.h"

namespace cqsa {

namespace {

cqs_shape shape_of(const attention_problem& problem, const schedule_choice& choice) {
  return {problem.p.seqlen_q, choice.c, choice.itr, choice.chunk_alignment};
}

void set_tiles(const schedule_choice& choice, cqsa_attention_leaf& leaf) {
  leaf.tile_q = choice.leaf_tile_q;
  leaf.tile_k = choice.leaf_tile_k;
}

host_layout carve(const attention_problem& problem, const cqsa_attention_impl* impl, const schedule_choice& choice, arena& memory) {
  host_layout layout{};
  layout.header = memory.take_bytes(workspace_header_bytes);
  cqsa_attention_leaf leaf = shape_of_leaf(problem);
  set_tiles(choice, leaf);
  if (choice.schedule == CQSA_SCHEDULE_CQS) {
    const int64_t rows = choice.group_batch * choice.group_heads * problem.ratio() * problem.p.seqlen_q;
    layout.acc = memory.take<float>(rows * problem.p.head_dim_v);
    layout.m = memory.take<float>(rows);
    layout.l = memory.take<float>(rows);
    const int64_t blocks = std::max<int64_t>(1, cqs_max_blocks(shape_of(problem, choice)));
    layout.blocks = memory.take<cqs_block>(blocks);
    layout.rects = memory.take<cqsa_rect>(blocks);
    leaf.flags |= CQSA_LEAF_STATE_IN | CQSA_LEAF_STATE_OUT;
    leaf.batch = choice.group_batch;
    leaf.num_kv_heads = choice.group_heads;
    leaf.num_heads = choice.group_heads * problem.ratio();
  }
  if (choice.window_state) {
    const int64_t rows = choice.group_heads * problem.ratio() * choice.tile_q;
    layout.acc = memory.take<float>(rows * problem.p.head_dim_v);
    layout.m = memory.take<float>(rows);
    layout.l = memory.take<float>(rows);
  }
  layout.leaf_bytes = impl ? impl->workspace(&leaf, choice.workers) : 0;
  layout.leaf = memory.take_bytes(layout.leaf_bytes);
  return layout;
}

// The bridge from a leaf to the context's threads, to progress and to cancel.
struct host_exec {
  run_state* run;
  pthread_t caller;
  std::atomic<int64_t> done{0};
  std::atomic<cqsa_status> stop{CQSA_OK};
  bool counts;  // the leaf's tiles are the run's tiles

  static cqsa_status run_on_context(void* user, int64_t num_tasks, task_fn task, void* data) {
    return run_tasks(*static_cast<host_exec*>(user)->run->plan->context, num_tasks, task, data);
  }

  // Workers only count and look at the cancel flag; the progress callback belongs to the calling thread.
  static int32_t poll(void* user, int64_t done) {
    auto& self = *static_cast<host_exec*>(user);
    self.done.fetch_add(done, std::memory_order_relaxed);
    if (pthread_equal(pthread_self(), self.caller)) {
      const cqsa_status status = poll_run(*self.run, self.counts ? self.done.exchange(0, std::memory_order_relaxed) : 0);
      if (status != CQSA_OK) self.stop.store(status, std::memory_order_relaxed);
    } else if (const int32_t* cancel = self.run->args->cancel; cancel && __atomic_load_n(cancel, __ATOMIC_RELAXED)) {
      self.stop.store(CQSA_ERROR_CANCELLED, std::memory_order_relaxed);
    }
    return self.stop.load(std::memory_order_relaxed);
  }
};

}  // namespace

cqsa_status launch_host(run_state& run, const cqsa_attention_leaf& leaf, const host_layout& layout, bool counts) {
  const cqsa_plan& plan = *run.plan;
  host_exec bridge{&run, pthread_self(), {0}, {CQSA_OK}, counts};
  const cqsa_exec exec{&bridge, host_exec::run_on_context, host_exec::poll, plan.choice.workers};
  const cqsa_status status = plan.impl->launch(plan.context->device, &leaf, layout.leaf, layout.leaf_bytes, &exec, nullptr);
  ++run.info.tasks;
  if (status == CQSA_OK) return poll_run(run, counts ? bridge.done.exchange(0) : 0);
  if (status == CQSA_ERROR_CANCELLED) return fail(status, "the run was cancelled after about %lld of %lld tiles",
                                                  static_cast<long long>(run.done), static_cast<long long>(run.total));
  if (status == CQSA_ERROR_CALLBACK) return status;  // run_tasks has written the sentence
  return fail(status, "%s failed: %s", plan.impl->name, plan.context->backend->last_error());
}

namespace {

cqsa_status run_whole(run_state& run, const cqsa_attention_leaf& whole, const host_layout& layout) {
  cqsa_attention_leaf leaf = whole;
  set_tiles(run.plan->choice, leaf);
  run.total = run.plan->impl->units ? std::max<int64_t>(1, run.plan->impl->units(&leaf)) : 1;
  return launch_host(run, leaf, layout, true);
}

// ---- CQS ------------------------------------------------------------------------------------------------------------------

void advance(cqsa_view& view, int64_t batch, int64_t head) {
  if (view.data == nullptr) return;
  view.data = static_cast<char*>(view.data) + (batch * view.stride[0] + head * view.stride[1]) * (dtype_bytes(view.dtype));
}

}  // namespace

cqsa_attention_leaf group_leaf(const cqsa_attention_leaf& whole, const schedule_choice& choice, int64_t batch, int64_t head,
                               int64_t heads) {
  cqsa_attention_leaf leaf = whole;
  const int64_t ratio = whole.num_heads / whole.num_kv_heads;
  leaf.batch = 1;
  leaf.num_kv_heads = heads;
  leaf.num_heads = heads * ratio;
  for (cqsa_view* view : {&leaf.q, &leaf.mask, &leaf.bias, &leaf.slopes, &leaf.sinks, &leaf.out, &leaf.lse})
    advance(*view, batch, head * ratio);
  for (cqsa_view* view : {&leaf.k, &leaf.v, &leaf.k_scale, &leaf.v_scale}) advance(*view, batch, head);
  set_tiles(choice, leaf);
  return leaf;
}

namespace {

int64_t visible_rects(const key_band& band, int64_t seqlen_k, const cqs_block* blocks, int64_t num_blocks, cqsa_rect* rects) {
  int64_t count = 0;
  for (int64_t i = 0; i < num_blocks; ++i) {
    const cqs_block& b = blocks[i];
    const key_range seen = band.of_rows(b.q_pos, b.q_len, seqlen_k);
    if (seen.end <= b.k_pos || seen.begin >= b.k_pos + b.k_len) continue;
    rects[count++] = {b.q_pos, b.k_pos, b.q_len, b.k_len, b.q_pos, b.k_pos, b.q_pos};
  }
  return count;
}

void clear_state(const host_layout& layout, int64_t rows, int64_t head_dim_v) {
  std::fill_n(layout.acc, rows * head_dim_v, 0.0f);
  std::fill_n(layout.m, rows, -HUGE_VALF);
  std::fill_n(layout.l, rows, 0.0f);
}

cqsa_status run_cqs_group(run_state& run, cqsa_attention_leaf leaf, const host_layout& layout) {
  const attention_problem& problem = run.plan->problem;
  const cqs_shape shape = shape_of(problem, run.plan->choice);
  const int64_t rows = leaf.num_heads * shape.seqlen;
  clear_state(layout, rows, leaf.head_dim_v);
  leaf.state_acc = layout.acc;
  leaf.state_m = layout.m;
  leaf.state_l = layout.l;
  leaf.state_rows = shape.seqlen;
  leaf.rects = layout.rects;
  const key_band band = key_band::of(problem.p, shape.seqlen, shape.seqlen);
  for (int64_t task = 0, tasks = cqs_num_tasks(shape); task < tasks; ++task) {
    const int64_t blocks = cqs_task_blocks(shape, task, layout.blocks);
    leaf.num_rects = visible_rects(band, shape.seqlen, layout.blocks, blocks, layout.rects);
    leaf.flags = CQSA_LEAF_STATE_IN | CQSA_LEAF_STATE_OUT;
    if (leaf.num_rects) CQSA_TRY(launch_host(run, leaf, layout, false));
    CQSA_TRY(poll_run(run, 1));
  }
  layout.rects[0] = {0, 0, shape.seqlen, 0, 0, 0, 0};
  leaf.num_rects = 1;
  leaf.flags = CQSA_LEAF_STATE_IN;
  CQSA_TRY(launch_host(run, leaf, layout, false));
  return poll_run(run, 1);
}

cqsa_status run_cqs(run_state& run, const cqsa_attention_leaf& whole, const host_layout& layout) {
  const schedule_choice& choice = run.plan->choice;
  const int64_t groups = whole.batch * ((whole.num_kv_heads + choice.group_heads - 1) / choice.group_heads);
  run.total = groups * (cqs_num_tasks(shape_of(run.plan->problem, choice)) + 1);
  for (int64_t batch = 0; batch < whole.batch; ++batch)
    for (int64_t head = 0; head < whole.num_kv_heads; head += choice.group_heads) {
      const int64_t heads = std::min(choice.group_heads, whole.num_kv_heads - head);
      CQSA_TRY(run_cqs_group(run, group_leaf(whole, choice, batch, head, heads), layout));
    }
  return CQSA_OK;
}

// ---- varlen: rows past the last segment -------------------------------------------------------------------------------------

void clear_row(const cqsa_view& out, const cqsa_view& lse, int64_t head, int64_t row, int64_t head_dim_v) {
  const int64_t bytes = dtype_bytes(out.dtype);
  char* base = static_cast<char*>(out.data) + (head * out.stride[1] + row * out.stride[2]) * bytes;
  for (int64_t c = 0; c < head_dim_v; ++c) std::memset(base + c * out.stride[3] * bytes, 0, static_cast<size_t>(bytes));
  if (lse.data == nullptr) return;
  char* at = static_cast<char*>(lse.data) + (head * lse.stride[1] + row * lse.stride[2]) * dtype_bytes(lse.dtype);
  const float f = -HUGE_VALF;
  const double d = -HUGE_VAL;
  lse.dtype == CQSA_DTYPE_F64 ? std::memcpy(at, &d, sizeof d) : std::memcpy(at, &f, sizeof f);
}

}  // namespace

void clear_rows_past_segments(const attention_problem& problem, const cqsa_attention_leaf& whole) {
  if (whole.cu_seqlens_q == nullptr) return;
  const int64_t last = index_at(whole.cu_seqlens_q, whole.index_dtype, whole.batch);
  for (int64_t row = last; row < problem.p.total_q; ++row)
    for (int64_t head = 0; head < whole.num_heads; ++head) clear_row(whole.out, whole.lse, head, row, whole.head_dim_v);
}

cqsa_status poll_run(run_state& run, int64_t done_now) {
  run.done = std::min(run.total, run.done + done_now);
  const cqsa_attention_args& args = *run.args;
  if (args.cancel && __atomic_load_n(args.cancel, __ATOMIC_RELAXED))
    return fail(CQSA_ERROR_CANCELLED, "the run was cancelled by args->cancel after %lld of %lld tiles",
                static_cast<long long>(run.done), static_cast<long long>(run.total));
  if (args.progress && args.progress(args.progress_user, run.done, run.total) != 0)
    return fail(CQSA_ERROR_CANCELLED, "the run was cancelled by args->progress after %lld of %lld tiles",
                static_cast<long long>(run.done), static_cast<long long>(run.total));
  return CQSA_OK;
}

namespace {

// Pages of mapped operands that are resident at a time.
uint64_t mapped_bytes(const attention_problem& problem, const schedule_choice& choice) {
  if (!problem.mapped()) return 0;
  cqsa_attention_leaf leaf = shape_of_leaf(problem);
  if (!in_windows(problem, choice)) return resident_bytes_of_all(problem, leaf);
  leaf.num_kv_heads = choice.group_heads;
  leaf.num_heads = choice.group_heads * problem.ratio();
  const int64_t keys = std::min(choice.tile_k, most_keys_of_rows(problem, choice.tile_q, choice.leaf_tile_k));
  return resident_bytes(problem, leaf, choice.tile_q, keys);
}

cqsa_status check_checkpoint(const run_state& run) {
  if (run.args->checkpoint == nullptr) return CQSA_OK;
  if (*run.args->checkpoint == 0) return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->checkpoint is an empty path");
  if (run.plan->choice.schedule != CQSA_SCHEDULE_CQS) return CQSA_OK;
  return fail(CQSA_ERROR_UNSUPPORTED, "args->checkpoint is given, but the plan's schedule is cqs, which keeps partial results; "
                                      "direct and stream take a checkpoint");
}

cqsa_status run_schedule(run_state& run, const cqsa_attention_leaf& whole, const host_layout& layout) {
  if (run.plan->choice.schedule == CQSA_SCHEDULE_CQS) return run_cqs(run, whole, layout);
  if (run.args->checkpoint || in_windows(run.plan->problem, run.plan->choice)) return run_blocks(run, whole, layout);
  clear_rows_past_segments(run.plan->problem, whole);
  return run_whole(run, whole, layout);
}

}  // namespace

footprint host_footprint(const attention_problem& problem, const cqsa_attention_impl* impl, const schedule_choice& choice) {
  arena counting;
  carve(problem, impl, choice, counting);
  footprint cost;
  cost.host = cost.workspace = counting.used();
  cost.host += mapped_bytes(problem, choice);
  cost.tasks = in_windows(problem, choice) ? window_tasks(problem, choice) : 1;
  if (choice.schedule == CQSA_SCHEDULE_CQS) {
    const int64_t groups = problem.p.batch * ((problem.p.num_kv_heads + choice.group_heads - 1) / choice.group_heads);
    cost.tasks = groups * (cqs_num_tasks(shape_of(problem, choice)) + 1);
  }
  return cost;
}

cqsa_status run_host(run_state& run, const cqsa_attention_leaf& whole) {
  const cqsa_plan& plan = *run.plan;
  CQSA_TRY(check_checkpoint(run));
  const uint64_t bytes = plan.cost.workspace;
  void* own = run.args->workspace ? nullptr : host_allocate(*plan.context, bytes);
  if (!own && !run.args->workspace)
    return fail(CQSA_ERROR_OUT_OF_HOST_MEMORY, "the allocation of %llu bytes of host memory for the workspace failed",
                static_cast<unsigned long long>(bytes));
  arena memory(own ? own : run.args->workspace);
  const host_layout layout = carve(plan.problem, plan.impl, plan.choice, memory);
  run.info.peak_host_bytes = memory.used();
  if (plan.problem.mapped() && !in_windows(plan.problem, plan.choice))
    run.info.peak_host_bytes += resident_bytes_of_all(plan.problem, whole);
  const cqsa_status status = run_schedule(run, whole, layout);
  if (own) host_release(*plan.context, own, bytes);
  return status;
}

}  // namespace cqsa
