// SPDX-License-Identifier: Apache-2.0
#include "trial.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "interrupt.h"
#include "library.h"
#include "sizes.h"

namespace tool {
namespace {

struct wrong_result : std::runtime_error {
  using std::runtime_error::runtime_error;
};

int threads_of(int asked) { return asked > 0 ? asked : static_cast<int>(std::max(1u, std::thread::hardware_concurrency())); }

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

// The workspace between guard zones, full of NaN before the library sees it.
class guarded_workspace {
 public:
  explicit guarded_workspace(const cqsa_plan* plan) {
    require(cqsa_workspace_query(plan, &bytes_));
    memory_.assign(bytes_ + 2 * kGuardBytes + CQSA_WORKSPACE_ALIGNMENT, kGuard);
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data()) + kGuardBytes;
    first_ = kGuardBytes + (CQSA_WORKSPACE_ALIGNMENT - address % CQSA_WORKSPACE_ALIGNMENT) % CQSA_WORKSPACE_ALIGNMENT;
    std::memset(data(), 0xFF, bytes_);
    require(cqsa_workspace_init(plan, data(), bytes_));
  }
  unsigned char* data() { return memory_.data() + first_; }
  uint64_t bytes() const { return bytes_; }
  bool guards_intact() const {
    const auto guard = [](unsigned char c) { return c == kGuard; };
    const auto first = static_cast<std::ptrdiff_t>(first_), last = first + static_cast<std::ptrdiff_t>(bytes_);
    return std::all_of(memory_.begin(), memory_.begin() + first, guard) && std::all_of(memory_.begin() + last, memory_.end(), guard);
  }

 private:
  static constexpr uint64_t kGuardBytes = 4096;
  static constexpr unsigned char kGuard = 0xCB;
  std::vector<unsigned char> memory_;
  uint64_t bytes_ = 0;
  std::size_t first_ = 0;
};

void execute(const cqsa_plan* plan, const cqsa_attention_args& args) {
  const cqsa_status status = cqsa_attention_execute(plan, &args, nullptr);
  if (status == CQSA_ERROR_CANCELLED) throw interrupted_error();
  require(status);
}

double best_seconds(const cqsa_plan* plan, const cqsa_attention_args& args, const timing& wanted) {
  using clock = std::chrono::steady_clock;
  const auto since = [](clock::time_point start) { return std::chrono::duration<double>(clock::now() - start).count(); };
  double best = std::numeric_limits<double>::infinity();
  const auto begin = clock::now();
  for (int run = 0; run < wanted.runs || since(begin) < wanted.seconds; ++run) {
    const auto start = clock::now();
    execute(plan, args);
    best = std::min(best, since(start));
  }
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
      line_(line),
      spec_(parse_problem(line)),
      data_(context, spec_),
      args_(data_.args()),
      reference_(data_.params(), args_, spec_.rows, spec_.seed, threads_of(threads)) {}

void problem_trials::try_run(const schedule_choice& schedule, const std::string& budget, const timing* speed, trial_report& report) {
  cqsa_attention_params params = data_.params();
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

  // The workspace is memory of the device, which the tool cannot make on a backend that is not the host.
  const bool host = is_host_backend(cqsa_context_backend(context_));
  const std::unique_ptr<guarded_workspace> workspace(host ? new guarded_workspace(plan.get()) : nullptr);
  cqsa_run_info run = CQSA_RUN_INFO_INIT;
  cqsa_attention_args args = args_;
  args.workspace = host ? workspace->data() : nullptr;
  args.workspace_bytes = host ? workspace->bytes() : 0;
  args.cancel = interrupt_flag();
  args.info = &run;
  data_.poison_results();
  execute(plan.get(), args);

  report.peak = host ? run.peak_host_bytes : run.peak_device_bytes;
  check_peak("host", run.peak_host_bytes, info.peak_host_bytes, params.max_host_bytes);
  check_peak("device", run.peak_device_bytes, info.peak_device_bytes, params.max_device_bytes);
  check_peak("pinned", run.peak_pinned_bytes, info.peak_pinned_bytes, params.max_pinned_bytes);
  report.check = reference_.compare(spec_.tolerance);
  if (!report.check.pass) throw wrong_result("wrong result: " + error_text(report.check));
  if (data_.nan_in_results()) throw wrong_result("NaN in out or lse");
  if (const std::string damage = data_.damage(); !damage.empty()) throw wrong_result(damage);
  if (host && !workspace->guards_intact()) throw wrong_result("bytes around the workspace were written");
  if (!speed) return;
  // Of the segments as they are; the plan knows their bounds only.
  report.flops = 2.0 * static_cast<double>(params.head_dim + params.head_dim_v) * visible_pairs(params, args_);
  report.seconds = best_seconds(plan.get(), args, *speed);
}

trial_report problem_trials::run(const schedule_choice& schedule, const std::string& budget, const timing* speed) {
  trial_report report;
  report.line = line_;
  report.line.set("schedule", schedule.name);
  report.line.set("budget", budget);
  report.line.set("seed", std::to_string(spec_.seed));
  try {
    try_run(schedule, budget, speed, report);
  } catch (const interrupted_error&) {
    throw;
  } catch (const library_error& error) {
    report.failure = error.what();
    report.skipped = schedule.optional && error.status == CQSA_ERROR_UNSUPPORTED;
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
