// SPDX-License-Identifier: Apache-2.0
// Quantization: which passages over a tensor are needed, and who works on what.
#include "cpu_features.h"
#include "fp8_float_mode.h"
#include "fp8_job.h"
#include "fp8_region.h"

#include <algorithm>

namespace cqsa::cpu {
namespace {

constexpr int64_t few_elements = 1 << 15;  // done before another thread is awake
constexpr int64_t many_bytes = 1 << 24;    // codes that no cache keeps for their reader

// ---- threads ----------------------------------------------------------------------------------------------------------------

int64_t workers_of(const cqsa_exec* exec) { return exec && exec->run && exec->num_workers > 1 ? exec->num_workers : 1; }

cqsa_status run_tasks(const cqsa_exec* exec, int64_t tasks, void (*task)(void*, int64_t), void* data) {
  if (tasks > 1) return exec->run(exec->user, tasks, task, data);
  task(data, 0);
  return CQSA_OK;
}

// ---- one job ----------------------------------------------------------------------------------------------------------------

// What belongs to a job while it is worked on. Some kilobytes.
struct quantization {
  quantization(const fp8_target& t, const cqsa_fp8_job& j, const cqsa_exec* e, int64_t n) : target(t), job(j), exec(e), workers(n) {}
  const fp8_target& target;
  const cqsa_fp8_job& job;
  const cqsa_exec* exec;
  int64_t workers;
  fp8_pass pass{};
  fp8_results results;
  std::atomic<uint32_t> slot_amax[fp8_slots];
  bool has_slot_amax = false;
};

struct pass_run {
  const fp8_pass* pass;
  fp8_results* results;
};

cqsa_status run_pass(quantization& q, const fp8_pass& pass) {
  pass_run run{&pass, &q.results};
  q.results.next = 0;
  const int64_t tasks = std::min(q.workers, fp8_region_count(pass));
  return run_tasks(q.exec, tasks, [](void* data, int64_t) {
    const plain_floats mode;
    const pass_run& run = *static_cast<pass_run*>(data);
    fp8_work_on_regions(*run.pass, run.results);
  }, &run);
}

// ---- scales of the tensor or of groups ----------------------------------------------------------------------------------------

int64_t slot_top(const fp8_pass& p, int64_t slot) { return p.groups.data ? std::clamp(p.groups.begin(p.group0 + slot), p.top, p.bottom) : p.top; }
int64_t slot_bottom(const fp8_pass& p, int64_t slot) { return p.groups.data ? std::clamp(p.groups.end(p.group0 + slot), p.top, p.bottom) : p.bottom; }

// Pieces of `rows` rows and `columns` columns, none across two slots.
struct amax_run {
  quantization& q;
  int64_t rows, columns, across;
  int64_t first[fp8_slots + 1];  // piece of each slot
  std::atomic<int64_t> next{0};
};

int64_t slot_of_piece(const amax_run& run, int64_t n) {
  return std::upper_bound(run.first, run.first + run.q.pass.group_count + 1, n) - run.first - 1;
}

void find_amax_of_piece(const amax_run& run, int64_t n, fp8_line_scratch* mem) {
  const quantization& q = run.q;
  const int64_t slot = slot_of_piece(run, n), at = n - run.first[slot];
  const int64_t top = slot_top(q.pass, slot) + at / run.across * run.rows, bottom = std::min(top + run.rows, slot_bottom(q.pass, slot));
  const int64_t left = at % run.across * run.columns, right = std::min(left + run.columns, q.job.columns);
  uint32_t most = 0;
  for (int64_t i = top; i < bottom; ++i)
    for (int64_t j = left; j < right; j += fp8_line) {
      const int64_t count = std::min(fp8_line, right - j);
      const fp8_line_view x = fp8_fetch(q.target, q.job, i, j, count, mem);
      q.target.largest(x.data, x.type, count, count, q.job.nan_policy == CQSA_FP8_NAN_IGNORE, &most);
    }
  fp8_raise(run.q.slot_amax[slot], most);
}

cqsa_status find_slot_amaxes(quantization& q) {
  amax_run run{q, 1, std::min<int64_t>(q.job.columns, 1 << 16), 1, {}};
  run.across = (q.job.columns + run.columns - 1) / run.columns;
  const int64_t spread = (q.pass.bottom - q.pass.top) / (4 * q.workers);
  run.rows = std::clamp<int64_t>(std::min((1 << 16) / run.columns, spread), 1, 1 << 16);
  for (int64_t s = 0; s < q.pass.group_count; ++s) {
    q.slot_amax[s] = 0;
    run.first[s + 1] = run.first[s] + (slot_bottom(q.pass, s) - slot_top(q.pass, s) + run.rows - 1) / run.rows * run.across;
  }
  const int64_t tasks = std::clamp<int64_t>(run.first[q.pass.group_count], 1, q.workers);
  q.has_slot_amax = true;
  const cqsa_status status = run_tasks(q.exec, tasks, [](void* data, int64_t) {
    const plain_floats mode;
    amax_run& run = *static_cast<amax_run*>(data);
    fp8_line_scratch mem;
    for (int64_t n; (n = run.next.fetch_add(1, std::memory_order_relaxed)) < run.first[run.q.pass.group_count];) find_amax_of_piece(run, n, &mem);
  }, &run);
  for (int64_t s = 0; s < q.pass.group_count; ++s) fp8_raise(q.results.amax, q.slot_amax[s]);
  return status;
}

void fill_slots(quantization& q, fp8_side_pass& side) {
  if (!side.side) return void(side.slots[0] = 1.0f);
  const int64_t count = side.per_group ? q.pass.group_count : 1;
  for (int64_t s = 0; s < count; ++s) {
    const int64_t r = side.per_group ? q.pass.group0 + s : 0;
    fp8::scale_pair pair;
    if (q.job.source == CQSA_FP8_CURRENT) pair = fp8::scale_of(amax_of(q.slot_amax[s]), job_rule(q.job, *side.side));
    else pair = given_scale(q.job, *side.side, r, 0);
    store_scale(side.side->scale, r, 0, pair.scale);
    store_scale(side.side->scale_inv, r, 0, pair.scale_inv);
    side.slots[s] = pair.scale;
  }
}

// ---- passages -----------------------------------------------------------------------------------------------------------------

// {0, 0}, of the tensor or of groups.
bool is_by_row(const quantization& q, const cqsa_fp8_output& side) {
  return q.job.groups ? side.per_group != 0 : side.scale.rows == 1 && side.scale.columns == 1;
}

void add_side(quantization& q, const cqsa_fp8_output& side) {
  if (!fp8::is_format(side.codes.dtype)) return;
  fp8_side_pass& to = q.pass.sides[q.pass.side_count++];
  to.side = &side;
  to.grid = &side.scale;
  to.transposed = &side == &q.job.transposed;
  to.counted = q.job.counters && q.pass.side_count == 1;
  to.by_row = is_by_row(q, side);
  to.per_group = side.per_group != 0;
  to.found = q.job.source == CQSA_FP8_CURRENT && !to.by_row;
}

void add_sides(quantization& q) {
  add_side(q, q.job.row);
  add_side(q, q.job.transposed);
  if (q.pass.side_count > 0) return;
  fp8_side_pass& only = q.pass.sides[0];
  only.grid = &q.job.block_amax;
  only.counted = q.job.counters != nullptr;
  only.by_row = !q.job.block_amax.data;
  only.found = !only.by_row;
  q.pass.side_count = only.counted || only.found;
}

cqsa_status run_split(quantization& q) {
  cqsa_status status = CQSA_OK;
  for (int s = 0; s < 2 && status == CQSA_OK; ++s) {
    fp8_pass one = q.pass;
    one.sides[0] = q.pass.sides[s];
    one.side_count = 1;
    fp8_plan_pass(&one);
    status = run_pass(q, one);
  }
  return status;
}

// Rows of up to fp8_slots groups, or all.
cqsa_status run_rows(quantization& q) {
  fp8_pass& p = q.pass;
  bool slots = false, found = false;
  for (int s = 0; s < p.side_count; ++s) {
    slots = slots || (p.sides[s].by_row && p.sides[s].side);
    found = found || p.sides[s].found;
  }
  q.has_slot_amax = false;
  cqsa_status status = CQSA_OK;
  if (slots && q.job.source == CQSA_FP8_CURRENT) status = find_slot_amaxes(q);
  for (int s = 0; s < p.side_count; ++s)
    if (p.sides[s].by_row) fill_slots(q, p.sides[s]);
  p.finds_amax = (q.job.amax || q.job.ring.state) && !q.has_slot_amax && !found;
  p.backwards = q.has_slot_amax;
  if (status != CQSA_OK || (p.side_count == 0 && !p.finds_amax) || p.bottom <= p.top) return status;
  return fp8_plan_pass(&p) ? run_pass(q, p) : run_split(q);
}

cqsa_status run_groups(quantization& q) {
  fp8_pass& p = q.pass;
  cqsa_status status = CQSA_OK;
  for (int64_t g = 0; g < q.job.num_groups && status == CQSA_OK; g += fp8_slots) {
    p.group0 = g;
    p.group_count = std::min(fp8_slots, q.job.num_groups - g);
    p.top = p.groups.begin(g);
    p.bottom = std::max(p.groups.begin(g + p.group_count), p.top);
    status = run_rows(q);
  }
  return status;
}

// ---- sums of columns ------------------------------------------------------------------------------------------------------------

struct sum_run {
  const quantization& q;
  std::atomic<int64_t> next{0};
};
constexpr int64_t sum_columns = 64;

// In f64 from the first row to the last, whoever does it.
void sum_stripe(const quantization& q, int64_t left, fp8_line_scratch* mem) {
  const cqsa_fp8_job& job = q.job;
  const fp8_groups& groups = q.pass.groups;
  const int64_t top = groups.data ? groups.begin(0) : 0, bottom = groups.data ? groups.begin(job.num_groups) : groups.rows;
  const int64_t n = std::min(sum_columns, job.columns - left);
  double sums[sum_columns] = {};
  for (int64_t i = top; i < bottom; ++i) q.target.sum(fp8_fetch_f32(q.target, job, i, left, n, mem), n, sums);
  for (int64_t k = 0; k < n; ++k) {
    const float sum = plain_nan(float(sums[k]));
    std::memcpy(job.column_sum + (left + k) * job.column_sum_stride, &sum, sizeof sum);
  }
}

cqsa_status sum_all_columns(quantization& q) {
  sum_run run{q};
  const int64_t stripes = (q.job.columns + sum_columns - 1) / sum_columns;
  return run_tasks(q.exec, std::min(q.workers, stripes), [](void* data, int64_t) {
    const plain_floats mode;
    sum_run& run = *static_cast<sum_run*>(data);
    fp8_line_scratch mem;
    for (int64_t n; (n = run.next.fetch_add(sum_columns, std::memory_order_relaxed)) < run.q.job.columns;) sum_stripe(run.q, n, &mem);
  }, &run);
}

// ---- jobs -----------------------------------------------------------------------------------------------------------------------

int64_t elements_of(const cqsa_fp8_job& job) { return job.batch * job.rows * job.columns; }

void prepare(quantization& q) {
  fp8_pass& p = q.pass;
  p.target = &q.target;
  p.job = &q.job;
  p.groups = {q.job.groups, q.job.groups_dtype, q.job.groups_stride, q.job.num_groups, q.job.batch * q.job.rows};
  p.bottom = p.groups.rows;
  p.group_count = 1;
  p.streams = elements_of(q.job) >= many_bytes;
  p.workers = q.workers;
  for (auto& count : q.results.counts) count = 0;
  add_sides(q);
}

cqsa_status quantize_job(const fp8_target& target, const cqsa_fp8_job& job, const cqsa_exec* exec) {
  if (elements_of(job) == 0) return fp8_quantize_job_reference(job), CQSA_OK;
  quantization q(target, job, exec, elements_of(job) > few_elements ? workers_of(exec) : 1);
  prepare(q);
  cqsa_status status = job.groups ? run_groups(q) : run_rows(q);
  if (status == CQSA_OK && job.column_sum) status = sum_all_columns(q);
  if (status != CQSA_OK) return status;
  clear_padding(job.row.scale_inv);
  clear_padding(job.transposed.scale_inv);
  const int64_t counts[3] = {q.results.counts[0], q.results.counts[1], q.results.counts[2]};
  fp8_publish(job, q.results.amax, counts);
  return CQSA_OK;
}

// Small jobs are handed out whole; large ones come one after the other, each on all workers.
struct small_jobs {
  const fp8_target& target;
  const cqsa_fp8_quantize_leaf& leaf;
  std::atomic<int64_t> next{0};
};

bool is_small(const cqsa_fp8_job& job) { return elements_of(job) <= 8 * few_elements; }

cqsa_status run_small_jobs(const fp8_target& target, const cqsa_fp8_quantize_leaf& leaf, const cqsa_exec* exec) {
  small_jobs run{target, leaf};
  return run_tasks(exec, std::min(workers_of(exec), leaf.count), [](void* data, int64_t) {
    const plain_floats mode;
    small_jobs& run = *static_cast<small_jobs*>(data);
    for (int64_t n; (n = run.next.fetch_add(1, std::memory_order_relaxed)) < run.leaf.count;) {
      const cqsa_fp8_job& job = run.leaf.jobs[n];
      if (is_small(job) && !fp8_is_skipped(job)) quantize_job(run.target, job, nullptr);
    }
  }, &run);
}

}  // namespace

const fp8_target& fp8_best() {
#if defined(CQSA_CPU_X86)
  if (this_cpu().avx512) return fp8_avx512;
  if (this_cpu().avx2) return fp8_avx2;
#endif
  return fp8_baseline;
}

cqsa_status fp8_quantize_on(const fp8_target& target, const cqsa_fp8_quantize_leaf* leaf, const cqsa_exec* exec) {
  const plain_floats mode;
  cqsa_status status = fp8_check_jobs(leaf);
  const bool several = leaf->count > 1;
  if (status == CQSA_OK && several) status = run_small_jobs(target, *leaf, exec);
  for (int64_t n = 0; n < leaf->count && status == CQSA_OK; ++n) {
    const cqsa_fp8_job& job = leaf->jobs[n];
    if (!fp8_is_skipped(job) && !(several && is_small(job))) status = quantize_job(target, job, exec);
  }
  return status;
}

uint64_t fp8_quantize_workspace(const cqsa_fp8_quantize_leaf*, int64_t) { return 0; }
cqsa_status fp8_quantize(void*, const cqsa_fp8_quantize_leaf* leaf, void*, uint64_t, const cqsa_exec* exec, void*) {
  return fp8_quantize_on(fp8_best(), leaf, exec);
}

}  // namespace cqsa::cpu
