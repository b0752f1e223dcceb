// SPDX-License-Identifier: Apache-2.0
// Runs of a backend with its own memory that are not enqueued (enqueue.h): attempts at what is still to be done, each with all
// its memory allocated at the start. When the device has less than the plan was promised, the next attempt asks for half and
// goes on where the last one stopped.
#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include "ops/attention/device_checkpoint.h"

namespace cqsa {
namespace {

constexpr int most_retries = 4;

class device_runner {
 public:
  device_runner(run_state& run, const cqsa_attention_leaf& whole)
      : run_(run), whole_(whole), choice_(run.plan->choice), limit_(budget_of(run.plan->problem, run.plan->hardware)) {
    const auto& p = run.plan->problem.p;
    push({0, p.batch, 0, p.num_kv_heads, 0, INT64_MAX});
  }

  cqsa_status run() {
    CQSA_TRY(wait_for_caller());
    cqsa_status status = attempt();
    while (status == CQSA_ERROR_OUT_OF_DEVICE_MEMORY && (status = plan_again()) == CQSA_OK) {
      saved_.freeze();
      status = attempt();
    }
    if (status == CQSA_OK) return saved_.remove();
    saved_.save_quietly();  // the reason of the failure is already written
    return status;
  }

  cqsa_status run_in_less(uint64_t bytes) {
    failed_bytes_ = bytes;
    CQSA_TRY(plan_again());
    return run();
  }

 private:
  // What the host gathers must have been written too, so an event that only orders streams would not do.
  cqsa_status wait_for_caller() {
    const cqsa_context& context = *run_.plan->context;
    const cqsa_status status = context.backend->stream_sync(context.device, run_.stream);
    if (status == CQSA_OK) return CQSA_OK;
    return fail(status, "waiting for what is queued on stream failed on backend %s: %s", context.backend->name,
                context.backend->last_error());
  }

  void push(const device_region& r) {
    if (r.item_begin < r.item_end && r.head_begin < r.head_end && r.row_begin < r.row_end) regions_[count_++] = r;
  }

  cqsa_status attempt() {
    device_run run(run_, whole_, run_.plan->impl, choice_);
    cqsa_status status = run.open(limit_);
    failed_bytes_ = run.session.device_bytes();
    if (status == CQSA_OK) status = run_parts(run);
    // Nothing that the caller owns may be in use when this returns, whatever happened.
    const cqsa_status drained = status == CQSA_OK ? run.session.drain() : CQSA_OK;
    return status == CQSA_OK ? drained : status;
  }

  cqsa_status run_parts(device_run& run) {
    run_.total = run.progress_total();
    if (run_.args->checkpoint) CQSA_TRY(resume(run));
    if (!tail_done_) CQSA_TRY(clear_tail(run));
    tail_done_ = true;
    while (count_ > 0) {
      const device_region region = regions_[count_ - 1];
      const cqsa_status status = run.g.cqs ? run_device_cqs(run, region) : run_device_stream(run, region);
      --count_;
      if (status != CQSA_OK) {
        push_rest(region, run.unfinished);
        return status;
      }
    }
    return CQSA_OK;
  }

  // Goes on where the checkpoint says; with another plan than the first it is only kept.
  cqsa_status resume(device_run& run) {
    run.listener = &saved_;
    if (saved_.is_open()) return CQSA_OK;
    query_tile first;
    bool all_done = false;
    CQSA_TRY(saved_.open(run, first, all_done));
    const device_region whole = regions_[--count_];
    if (!all_done) push_rest(whole, first);
    return CQSA_OK;
  }

  // What is left of a region, in the order of the work: the group at hand, its other heads, the other batch items.
  void push_rest(const device_region& r, const query_tile& at) {
    const device_group& g = at.group;
    const int64_t item_end = std::min(g.item + std::max<int64_t>(g.items, 1), r.item_end);
    const int64_t head_end = std::min(g.head + std::max<int64_t>(g.heads, 1), r.head_end);
    push({item_end, r.item_end, r.head_begin, r.head_end, r.row_begin, r.row_end});
    push({g.item, item_end, head_end, r.head_end, r.row_begin, r.row_end});
    push({g.item, item_end, g.head, head_end, std::max(at.q, r.row_begin), r.row_end});
  }

  // varlen: rows past the last segment have no key and no sink.
  cqsa_status clear_tail(device_run& run) {
    if (!run.problem.varlen()) return CQSA_OK;
    if (run.g.out_back) {
      run.clear_host_rows();
      const int64_t last = run.last_segment_end();
      if (run.session.mapped) run.pages.drop_rows(whole_, {last, run.problem.p.total_q - last, 0, 0});
      return CQSA_OK;
    }
    const int64_t first = run.last_segment_end(), rows = run.problem.p.total_q - first;
    if (rows <= 0) return CQSA_OK;
    device_group all{};
    all.items = 1;
    all.heads = whole_.num_kv_heads;
    all.q_heads = whole_.num_heads;
    all.seqlen_q = rows;
    cqsa_attention_leaf leaf = run.leaf_of(all);
    for (cqsa_view* view : {&leaf.q, &leaf.k, &leaf.v, &leaf.k_scale, &leaf.v_scale})
      *view = unread_view(*view, run.session.device.header);
    for (cqsa_view* view : {&leaf.mask, &leaf.bias, &leaf.slopes, &leaf.sinks}) *view = {};
    leaf.out = moved(whole_.out, 0, 0, first, 0);
    leaf.lse = moved(whole_.lse, 0, 0, first, 0);
    run.session.host.rects[0] = {0, 0, rows, 0, 0, 0, 0};
    leaf.num_rects = 1;
    return run.launch(leaf);
  }

  // Another schedule, for half of the memory that could not be had.
  cqsa_status plan_again() {
    char reason[400];
    std::snprintf(reason, sizeof reason, "%s", last_error_text());
    if (run_.args->workspace)
      return fail(CQSA_ERROR_OUT_OF_DEVICE_MEMORY, "the device ran out of memory although args->workspace was given: %s", reason);
    if (attempts_again_ == most_retries)
      return fail(CQSA_ERROR_OUT_OF_DEVICE_MEMORY, "%" PRIu64 " bytes of device memory could not be had after %d retries: %s",
                  failed_bytes_, most_retries, reason);
    ++attempts_again_;
    ++run_.info.retries;
    const uint64_t half = failed_bytes_ / 2;
    // Host memory stays within what the plan said, if that is possible at all.
    const footprint& cost = run_.plan->cost;
    const budget planned{half, std::min(limit_.host, cost.host), std::min(limit_.pinned, cost.pinned)};
    const budget allowed{half, limit_.host, limit_.pinned};
    footprint unused;
    const cqsa_plan& plan = *run_.plan;
    if (choose_schedule(plan.problem, plan.hardware, plan.impl, planned, choice_, unused) != CQSA_OK &&
        choose_schedule(plan.problem, plan.hardware, plan.impl, allowed, choice_, unused) != CQSA_OK) {
      std::snprintf(reason, sizeof reason, "%s", last_error_text());
      return fail(CQSA_ERROR_OUT_OF_DEVICE_MEMORY, "%" PRIu64 " bytes of device memory could not be had, and %" PRIu64
                  " are too few: %s", failed_bytes_, half, reason);
    }
    report_choice(choice_, false, run_.info);
    log(*plan.context, CQSA_LOG_WARNING, "%" PRIu64 " bytes of device memory could not be had (%s); going on with %" PRIu64,
        failed_bytes_, reason, half);
    return CQSA_OK;
  }

  run_state& run_;
  const cqsa_attention_leaf& whole_;
  schedule_choice choice_;
  const budget limit_;
  device_region regions_[1 + 2 * (most_retries + 1)];  // a stack; a failure replaces one region by three
  int count_ = 0;
  uint64_t failed_bytes_ = 0;
  int attempts_again_ = 0;  // info.retries also counts staging that was replaced
  bool tail_done_ = false;
  device_checkpoint saved_;
};

}  // namespace

cqsa_status run_device(run_state& run, const cqsa_attention_leaf& whole) { return device_runner(run, whole).run(); }

cqsa_status run_device_in_less(run_state& run, const cqsa_attention_leaf& whole, uint64_t bytes) {
  // The failure's own sentence says what could not be had.
  if (run.plan->problem.p.schedule == CQSA_SCHEDULE_DIRECT) return CQSA_ERROR_OUT_OF_DEVICE_MEMORY;
  cqsa_plan plan = *run.plan;
  plan.problem.p.schedule = CQSA_SCHEDULE_STREAM;
  // One leaf call may be an implementation that keeps no state; several want one that does.
  if (choose_implementation(*plan.context->backend, plan.problem, true, plan.impl) != CQSA_OK)
    return fail(CQSA_ERROR_OUT_OF_DEVICE_MEMORY, "%" PRIu64 " bytes of device memory could not be had, and no implementation can do "
                                                 "with less", bytes);
  const cqsa_plan* const whole_plan = run.plan;
  run.plan = &plan;
  const cqsa_status result = device_runner(run, whole).run_in_less(bytes);
  run.plan = whole_plan;
  return result;
}

}  // namespace cqsa
