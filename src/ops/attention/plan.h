// SPDX-License-Identifier: Apache-2.0
// A plan: the problem, the machine, the schedule chosen, and what it costs.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "context.h"
#include "ops/attention/problem.h"

namespace cqsa {

// How much of a machine's model must be measured.
enum class rates {
  known,    // costs nothing: nominal on a host backend; on a device whatever was measured before, else nominal. Without capacities
  compute,  // the compute rate too, on a host backend: some tens of ms, little memory
  all       // copies as well, through buffers of 32 MiB
};

// What the planner knows of a machine; measured once (cqsa_context_hardware) or read from JSON (docs/planning.md).
struct hardware_model {
  char name[128] = "";
  char backend[32] = "";
  bool host = true;             // operands are used in place, nothing is copied (the CPU backend)
  bool pinned = false;          // the backend can pin host memory
  uint64_t device_bytes = 0;    // free; 0: unknown, no limit
  uint64_t device_total_bytes = 0;
  uint64_t host_bytes = 0;
  int32_t workers = 1;          // threads of a host backend
  double flops_64 = 0;          // FLOP/s at head_dim 64 and 128; other sizes are interpolated
  double flops_128 = 0;
  double flops_64_f16 = 0;      // likewise for f16 and bf16 queries, where matrix units make a difference; 0: as f32
  double flops_128_f16 = 0;
  double copy_in = 0;           // bytes/s host -> device from pinned memory, and back
  double copy_out = 0;
  double host_copy = 0;         // bytes/s of a memcpy into staging
  double device_copy = 0;       // bytes/s read plus written in device memory; 0: 20 x copy_in
  double launch_seconds = 0;    // cost of one leaf call
  double parallel_blocks = 0;   // leaf tiles that a device works on at once, where the implementation does not say; 0: unknown
  rates measured = rates::known;
  const hardware_model* previous = nullptr;  // an older model of the same context, which readers may still hold

  double flops(int64_t head_dim, cqsa_dtype dtype_q) const;
  double memory_rate() const { return device_copy > 0 ? device_copy : 20 * copy_in; }
  // What another context has measured of the same device.
  void take_rates(const hardware_model& other) {
    flops_64 = other.flops_64, flops_128 = other.flops_128;
    flops_64_f16 = other.flops_64_f16, flops_128_f16 = other.flops_128_f16;
    copy_in = other.copy_in, copy_out = other.copy_out, host_copy = other.host_copy, device_copy = other.device_copy;
    launch_seconds = other.launch_seconds;
    measured = other.measured;
  }
};

// Staging memory of a device run: slots that threads fill for the way in, and empty on the way back.
struct staging_choice {
  bool pinned = false;  // else pageable, which the driver stages once more
  int32_t in_slots = 0, back_slots = 0;
  int32_t threads = 0;  // I/O threads of each direction, the caller's included
  uint64_t in_bytes = 0, back_bytes = 0;  // of a slot

  bool operator==(const staging_choice&) const = default;
};

// One way to do it: everything a run needs besides problem and operands.
struct schedule_choice {
  int32_t schedule = CQSA_SCHEDULE_DIRECT;
  int32_t c = 0, itr = 0;       // CQS
  int64_t chunk_alignment = 1;  // CQS
  int64_t group_batch = 1;      // a group is so many batch items ..
  int64_t group_heads = 1;      // .. times so many KEY heads (with their query heads); more than one item only with all heads
  int64_t tile_q = 0;           // query rows resident at a time (CQS: rows of a task)
  int64_t tile_k = 0;           // keys resident at a time (CQS: likewise)
  int64_t leaf_tile_q = 0;      // tiling of the leaf
  int64_t leaf_tile_k = 0;
  bool window_state = false;    // host, mapped operands: memory for the f32 state of a block's rows between windows of keys
  int32_t workers = 1;          // host backend: threads at work
  int32_t buffers = 1;          // device backend: key windows (CQS: tasks) in flight, 1 to 3
  bool operands_resident = false;    // CQS on a device: q, k, v of the group stay on the device instead of coming per task
  bool accumulator_on_host = false;  // CQS on a device: partial states are merged in host memory
  staging_choice staging;            // device
  double leaf_efficiency = 1;
  double parallel_blocks = 0;  // leaf tiles that the device works on at once; 0: unknown, few are as good as many

  bool operator==(const schedule_choice&) const = default;
};

// The first bytes of every workspace: a mark by which execute knows that cqsa_workspace_init() was called.
inline constexpr int workspace_header_bytes = 64;

struct footprint {
  uint64_t device = 0, host = 0, pinned = 0;  // peak bytes
  uint64_t workspace = 0;                     // what the caller may provide: host arena on a host backend, else device arena
  double bytes_in = 0, bytes_out = 0;
  int64_t tasks = 0;  // leaf calls
};

// Exact, with the code that carves the memory of a run (on a host backend host = workspace + resident pages of mapped operands). impl may be nullptr (a machine that is not here): leaf workspace 0.
footprint host_footprint(const attention_problem&, const cqsa_attention_impl* impl, const schedule_choice&);

// Budgets with 0 replaced by "no limit".
struct budget {
  uint64_t device, host, pinned;
  bool admits(const footprint& f) const { return f.device <= device && f.host <= host && f.pinned <= pinned; }
};

// .. on a device, after the staging of `choice` (but for staging.pinned, which is the caller's) was made as large as the limit
// and the work make sensible, for `threads` threads of the host.
footprint device_footprint(const attention_problem&, const cqsa_attention_impl* impl, const budget& limit, int32_t threads,
                           schedule_choice& choice);
budget budget_of(const attention_problem&, const hardware_model&);

// Of one leaf call on what is on the device already, whose leaf (without data) is at hand.
footprint whole_footprint(const cqsa_attention_leaf&, const cqsa_attention_impl* impl, const schedule_choice&);
// One leaf call on operands that are all on the device, priced by whole_footprint(). On a host backend nothing is on a device.
inline bool is_one_launch(const attention_problem& problem, const schedule_choice& choice) {
  return choice.schedule == CQSA_SCHEDULE_DIRECT && problem.on_device();
}

// Why a candidate is not the plan; text is made only for explain.
struct candidate_note {
  schedule_choice choice;
  footprint cost;
  double seconds;
  std::string verdict;
};

// Picks the schedule. impl may be nullptr as above. Fails with UNSUPPORTED or BUDGET_TOO_SMALL (the message states the least
// budget that works).
cqsa_status choose_schedule(const attention_problem&, const hardware_model&, const cqsa_attention_impl* impl, const budget&,
                            schedule_choice& choice_out, footprint& cost_out);

// All candidates, with what speaks against each when `chosen` is the plan.
std::vector<candidate_note> explain_schedule(const attention_problem&, const hardware_model&, const cqsa_attention_impl* impl,
                                             const budget&, const schedule_choice& chosen);

// First implementation of the backend's list that takes the problem under this schedule (state: CQS and windows need it).
// declined, when given, gets one line for each earlier entry.
cqsa_status choose_implementation(const cqsa_backend_v1&, const attention_problem&, bool needs_state,
                                  const cqsa_attention_impl*& impl_out, std::string* declined = nullptr);

double predicted_seconds(const attention_problem&, const hardware_model&, const schedule_choice&, const footprint&);
double problem_flops(const attention_problem&);

// Name and capacity: the free memory of a device. Asking a driver for it takes longer than everything else that planning does.
cqsa_status add_capacities(const cqsa_context&, hardware_model& inout);

// The context's machine. What is measured is kept in the context.
cqsa_status hardware_of(const cqsa_context&, rates needed, hardware_model& out);
cqsa_status hardware_from_json(const char* json, hardware_model& out);
std::string hardware_to_json(const hardware_model&);

}  // namespace cqsa

struct cqsa_plan {
  uint64_t number = 0;              // of one that runs: no other plan of this process has it, but copies
  cqsa_context* context = nullptr;  // a counted reference; nullptr: planned for a machine that is not here
  cqsa::attention_problem problem;
  cqsa::hardware_model hardware;
  const cqsa_attention_impl* impl = nullptr;
  cqsa::schedule_choice choice;
  cqsa::footprint cost;
};

namespace cqsa {

// Runs. `whole` is the bound leaf of the whole problem. info collects what really happened.
struct run_state {
  const cqsa_plan* plan;
  const cqsa_attention_args* args;
  void* stream = nullptr;  // the caller's, on a backend with memory of its own; nullptr: the default stream
  cqsa_run_info info{};
  int64_t done = 0, total = 1;  // tiles, for progress
};
cqsa_status run_host(run_state&, const cqsa_attention_leaf& whole);
// Begins when what is queued on run.stream has ended.
cqsa_status run_device(run_state&, const cqsa_attention_leaf& whole);
// The same for a run of one leaf call that wanted so many bytes of device memory which were not to be had: by STREAM, unless
// DIRECT was asked for.
cqsa_status run_device_in_less(run_state&, const cqsa_attention_leaf& whole, uint64_t bytes);

// varlen: out = 0 and lse = -inf in the rows past the last segment, through views of host memory.
void clear_rows_past_segments(const attention_problem&, const cqsa_attention_leaf& whole);

// Writes into info what a run works by; a run that plans again calls it again.
void report_choice(const schedule_choice&, bool host, cqsa_run_info& info);

// Progress and cancel between tiles, from the calling thread: CQSA_ERROR_CANCELLED when the run must stop.
cqsa_status poll_run(run_state&, int64_t done_now);

}  // namespace cqsa
