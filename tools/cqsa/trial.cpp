// SPDX-License-Identifier: Apache-2.0
#include "trial.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <vector>

#include <fmt/format.h>

#include "interrupt.h"
#include "library.h"
#include "parallel.h"
#include "sizes.h"

namespace tool {
namespace {

struct wrong_result : std::runtime_error {
  using std::runtime_error::runtime_error;
};

const char* schedule_name(int32_t schedule) {
  constexpr const char* names[] = {"auto", "direct", "stream", "cqs"};
  return schedule >= 0 && schedule < 4 ? names[schedule] : "unknown";
}

std::string schedule_text(const cqsa_plan_info& info) {
  if (info.schedule != CQSA_SCHEDULE_CQS) return schedule_name(info.schedule);
  return fmt::format("cqs:{}:{}", info.cqs_c, info.cqs_itr);
}

uint64_t budget_bytes(cqsa_context* context, const cqsa_attention_params& params, const std::string& budget) {
  if (budget == "none") return 0;
  if (budget != "least" && budget != "half") return parse_bytes(budget);
  const uint64_t least = least_budget(context, params);
  if (budget == "least") return least;
  const cqsa_plan_info free = describe(make_plan(context, params).get());
  const uint64_t most = is_host_backend(cqsa_context_backend(context)) ? free.peak_host_bytes : free.peak_device_bytes;
  return least + (std::max(most, least) - least) / 2;
}

// The workspace between guard zones, full of NaN before the library sees it. In the memory that the backend computes in.
class guarded_workspace {
 public:
  // device nullptr: host memory.
  guarded_workspace(const cqsa_plan* plan, device_memory* device) {
    require(cqsa_workspace_query(plan, &bytes_));
    const uint64_t all = bytes_ + 2 * kGuardBytes + CQSA_WORKSPACE_ALIGNMENT;
    if (device) buffer_ = device_buffer(*device, all, false);
    if (!device) memory_.resize(all);
    const auto address = reinterpret_cast<std::uintptr_t>(start()) + kGuardBytes;
    first_ = kGuardBytes + (CQSA_WORKSPACE_ALIGNMENT - address % CQSA_WORKSPACE_ALIGNMENT) % CQSA_WORKSPACE_ALIGNMENT;
    fill(0, first_, kGuard);
    fill(first_, bytes_, 0xFF);
    fill(first_ + bytes_, all - first_ - bytes_, kGuard);
    require(cqsa_workspace_init(plan, data(), bytes_));
  }
  unsigned char* data() { return static_cast<unsigned char*>(start()) + first_; }
  uint64_t bytes() const { return bytes_; }
  bool guards_intact() { return is_guard(0, first_) && is_guard(first_ + bytes_, 2 * kGuardBytes + CQSA_WORKSPACE_ALIGNMENT - first_); }

 private:
  void* start() { return buffer_.address() ? buffer_.address() : memory_.data(); }

  void fill(uint64_t offset, uint64_t bytes, unsigned char value) {
    if (!buffer_.address()) return void(std::memset(memory_.data() + offset, value, bytes));
    const std::vector<unsigned char> piece(std::min<uint64_t>(bytes, kPieceBytes), value);
    for (uint64_t done = 0; done < bytes; done += piece.size())
      buffer_.write_part(offset + done, piece.data(), std::min<uint64_t>(piece.size(), bytes - done));
  }

  bool is_guard(uint64_t offset, uint64_t bytes) {
    std::vector<unsigned char> now(bytes);
    if (buffer_.address()) buffer_.read_part(offset, now.data(), bytes);
    else std::memcpy(now.data(), memory_.data() + offset, bytes);
    return std::all_of(now.begin(), now.end(), [](unsigned char c) { return c == kGuard; });
  }

  static constexpr uint64_t kGuardBytes = 4096, kPieceBytes = uint64_t{8} << 20;
  static constexpr unsigned char kGuard = 0xCB;
  std::vector<unsigned char> memory_;  // or the buffer
  device_buffer buffer_;
  uint64_t bytes_ = 0, first_ = 0;
};

// Queues a run, or does it; wait for the device afterwards.
void execute(const cqsa_plan* plan, const cqsa_attention_args& args, void* stream) {
  const cqsa_status status = cqsa_attention_execute(plan, &args, stream);
  if (status == CQSA_ERROR_CANCELLED) throw interrupted_error();
  require(status);
}

using steady = std::chrono::steady_clock;
double seconds_since(steady::time_point start) { return std::chrono::duration<double>(steady::now() - start).count(); }
double lap(steady::time_point& start) {
  const double seconds = seconds_since(start);
  start = steady::now();
  return seconds;
}

// Of a run that returns when it is done.
double best_seconds(const cqsa_plan* plan, const cqsa_attention_args& args, const timing& wanted) {
  double best = std::numeric_limits<double>::infinity();
  const auto begin = steady::now();
  for (int run = 0; run < wanted.runs || seconds_since(begin) < wanted.seconds; ++run) {
    const auto start = steady::now();
    execute(plan, args, nullptr);
    best = std::min(best, seconds_since(start));
  }
  return best;
}

// Of a run that may return earlier: many are queued one behind the other, so that neither the way to the device nor the wait for
// it counts.
double best_resident_seconds(const cqsa_plan* plan, const cqsa_attention_args& args, const timing& wanted, device_memory& device) {
  constexpr double series_seconds = 0.02;
  const auto series = [&](int64_t count) {
    const auto start = steady::now();
    for (int64_t i = 0; i < count; ++i) execute(plan, args, device.stream());
    device.wait();
    return seconds_since(start) / static_cast<double>(count);
  };
  double best = series(1);
  const auto count = static_cast<int64_t>(std::clamp(series_seconds / std::max(best, 1e-9), 1.0, 1000.0));
  const auto begin = steady::now();
  for (int run = 0; run < wanted.runs || seconds_since(begin) < wanted.seconds; ++run) best = std::min(best, series(count));
  return best;
}

void check_peak(const char* name, uint64_t real, uint64_t planned, uint64_t budget) {
  if (real > planned) throw wrong_result(fmt::format("{} memory rose to {} bytes, above the plan's {}", name, real, planned));
  if (budget > 0 && planned > budget)
    throw wrong_result(fmt::format("the plan's {} memory of {} bytes is above the budget of {}", name, planned, budget));
}

std::string error_text(const check_report& r) {
  std::string text = fmt::format("max abs {:.3g} (allowed {:.3g}), relative RMS {:.3g} (allowed {:.3g}), cosine {:.9f}", r.max_abs,
                                 r.allowed_max_abs, r.relative_rms, r.allowed_relative_rms, r.cosine);
  if (r.has_lse) text += fmt::format(", lse max abs {:.3g} (allowed {:.3g})", r.lse_max_abs, r.lse_allowed);
  return text;
}

}  // namespace

problem_trials::problem_trials(cqsa_context* context, const problem_line& line, int threads)
    : context_(context),
      host_(is_host_backend(cqsa_context_backend(context))),
      line_(line),
      spec_(parse_problem(line)),
      data_(context, spec_, threads_or_all(threads)),
      args_(data_.args()),
      made_(steady::now()),
      reference_(data_.params(), args_, spec_.rows, spec_.seed, threads_or_all(threads)) {
  seconds_.operands = std::chrono::duration<double>(made_ - begun_).count();
  seconds_.reference = seconds_since(made_);
}

// Whether a backend has f64 is its own matter: GPUs need not. Which operands and schedules it has is not.
bool problem_trials::computes_f64() const {
  cqsa_attention_params plain = CQSA_ATTENTION_PARAMS_INIT;
  plain.batch = plain.num_heads = plain.num_kv_heads = 1;
  plain.seqlen_q = plain.seqlen_k = 16;
  plain.head_dim = plain.head_dim_v = 64;
  plain.dtype_q = plain.dtype_kv = CQSA_DTYPE_F64;
  return data_.params().dtype_q != CQSA_DTYPE_F64 || cqsa_attention_query(context_, &plain) != CQSA_ERROR_UNSUPPORTED;
}

placed_operands& problem_trials::operands_in(memory_place place) {
  if (place != memory_place::pageable && !device_) device_ = open_device_memory(cqsa_context_backend(context_));
  if (!placed_ || placed_->place() != place) {
    placed_.reset();
    placed_ = std::make_unique<placed_operands>(device_.get(), place, data_);
  }
  return *placed_;
}

void problem_trials::try_run(const memory_choice& memory, const schedule_choice& schedule, const std::string& budget,
                             const timing* speed, trial_report& report) {
  auto started = steady::now();
  placed_operands& operands = operands_in(memory.place);
  cqsa_attention_params params = data_.params();
  operands.tell(params);
  params.schedule = schedule.schedule;
  params.cqs_c = schedule.cqs_c;
  params.cqs_itr = schedule.cqs_itr;
  require(cqsa_attention_query(context_, &params));  // what no budget helps is no matter of budgets
  report.budget = budget_bytes(context_, params, budget);
  set_budget(context_, params, report.budget);
  const plan_ptr plan = make_plan(context_, params);
  const cqsa_plan_info info = describe(plan.get());
  report.schedule = schedule_text(info);
  report.implementation = info.implementation;

  // The workspace is memory that the backend computes in; where this command has no way to it, the library allocates.
  const std::unique_ptr<guarded_workspace> workspace(host_ || device_ ? new guarded_workspace(plan.get(), device_.get()) : nullptr);
  cqsa_run_info run = CQSA_RUN_INFO_INIT;
  cqsa_attention_args args = operands.args();
  args.workspace = workspace ? workspace->data() : nullptr;
  args.workspace_bytes = workspace ? workspace->bytes() : 0;
  args.cancel = interrupt_flag();
  args.info = &run;
  operands.poison_results();
  seconds_.operands += lap(started);
  execute(plan.get(), args, device_ ? device_->stream() : nullptr);
  if (device_) device_->wait();
  seconds_.runs += lap(started);
  operands.collect_results();

  report.peak = host_ ? run.peak_host_bytes : run.peak_device_bytes;
  check_peak("host", run.peak_host_bytes, info.peak_host_bytes, params.max_host_bytes);
  check_peak("device", run.peak_device_bytes, info.peak_device_bytes, params.max_device_bytes);
  check_peak("pinned", run.peak_pinned_bytes, info.peak_pinned_bytes, params.max_pinned_bytes);
  report.check = reference_.compare(spec_.tolerance);
  if (!report.check.pass) throw wrong_result("wrong result: " + error_text(report.check));
  if (data_.nan_in_results()) throw wrong_result("NaN in out or lse");
  if (const std::string damage = data_.damage(); !damage.empty()) throw wrong_result(damage);
  if (const std::string damage = operands.damage(); !damage.empty()) throw wrong_result(damage);
  if (workspace && !workspace->guards_intact()) throw wrong_result("bytes around the workspace were written");
  seconds_.checks += lap(started);
  if (!speed) return;
  // Of the segments as they are; the plan knows their bounds only.
  report.flops = 2.0 * static_cast<double>(params.head_dim + params.head_dim_v) * visible_pairs(params, args_);
  report.seconds = operands.resident() ? best_resident_seconds(plan.get(), args, *speed, *device_) : best_seconds(plan.get(), args, *speed);
}

trial_report problem_trials::run(const memory_choice& memory, const schedule_choice& schedule, const std::string& budget,
                                 const timing* speed) {
  trial_report report;
  report.line = line_;
  if (line_.find("memory")) report.line.set("memory", memory.name);
  report.line.set("schedule", schedule.name);
  report.line.set("budget", budget);
  report.line.set("seed", std::to_string(spec_.seed));
  if (host_ && memory.place != memory_place::pageable) {
    report.failure = "the backend computes in host memory: there is none of a device for operands";
    report.skipped = memory.optional;
    return report;
  }
  try {
    try_run(memory, schedule, budget, speed, report);
  } catch (const interrupted_error&) {
    throw;
  } catch (const library_error& error) {
    report.failure = error.what();
    report.skipped = error.status == CQSA_ERROR_UNSUPPORTED && (schedule.optional || !computes_f64());
  } catch (const std::exception& error) {
    report.failure = error.what();
  }
  if (interrupted()) throw interrupted_error();
  return report;
}

std::string trial_report::text() const {
  std::string text = skipped ? "skip " : pass() ? "ok   " : "FAIL ";
  if (!failure.empty()) return text + line.text() + "\n     " + failure;
  if (seconds > 0) text += fmt::format("{:>9}  {:>7.1f} GFLOP/s  ", seconds_text(seconds), rate() * 1e-9);
  return text + fmt::format("max abs {:.2e} of {:.2e}  rel RMS {:.2e}  cosine {:.9f}  {}", check.max_abs, check.allowed_max_abs,
                            check.relative_rms, check.cosine, line.text());
}

nlohmann::ordered_json trial_report::json() const {
  nlohmann::ordered_json out = {{"record", "trial"}, {"problem", line.text()}, {"pass", pass()}};
  if (skipped) out["skipped"] = true;
  if (!failure.empty()) out["failure"] = failure;
  out.update({{"schedule", schedule}, {"implementation", implementation}, {"budget", budget}, {"peak", peak}, {"rows", check.rows},
              {"max_abs", check.max_abs}, {"allowed_max_abs", check.allowed_max_abs}, {"relative_rms", check.relative_rms},
              {"allowed_relative_rms", check.allowed_relative_rms}, {"cosine", check.cosine}});
  if (check.has_lse) out.update({{"lse_max_abs", check.lse_max_abs}, {"lse_allowed", check.lse_allowed}});
  if (seconds > 0) out.update({{"seconds", seconds}, {"flops", flops}, {"gflops", rate() * 1e-9}});
  return out;
}

std::string reproducer(const problem_line& line, const std::string& backend, int32_t threads) {
  std::string text = "cqsa parity --op attention";
  if (backend != "auto") text += " --backend " + backend;
  if (threads > 0) text += fmt::format(" --threads {}", threads);
  return text + " --problem '" + line.text() + "'";
}

}  // namespace tool
