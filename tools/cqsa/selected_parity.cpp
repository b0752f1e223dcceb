// SPDX-License-Identifier: Apache-2.0
#include "selected_parity.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <memory>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "device_memory.h"
#include "elements.h"
#include "interrupt.h"
#include "library.h"
#include "machine.h"
#include "options.h"
#include "selected_data.h"
#include "selected_reference.h"

namespace tool {
namespace {

using clock = std::chrono::steady_clock;

constexpr int64_t kContexts[] = {1500, 2100, 8192, 32768, 131072};
constexpr int64_t kDeviceQueries = 2048, kHostQueries = 256;
constexpr double kFactorOfF32 = 4, kLeastOfReference = 1e-6, kOfOldEverywhere = 1e-4;  // what SPLIT may be off
constexpr double kTimedSeconds = 0.3;

// Runs at first: the others are measured by what it gives.
struct precision_name {
  int32_t value;
  const char* name;
};
constexpr precision_name kPrecisions[] = {{CQSA_PRECISION_F32, "f32"}, {CQSA_PRECISION_SPLIT, "split"}, {CQSA_PRECISION_FAST, "fast"}};

struct selected_trial {
  selected_spec spec;
  const char* precision = "";
  bool skipped = false;
  std::string failure;  // "" or why it failed or was skipped
  double error = 0, allowed = 0;                   // largest, of out on the samples against fp64
  double lse_error = 0, lse_allowed = 0;
  double off_f32 = 0, off_f32_allowed = 0;         // .. on all queries against the f32 run; allowed 0: only reported
  double seconds = 0;

  bool pass() const { return skipped || failure.empty(); }
  const char* kv() const { return spec.kv == CQSA_DTYPE_I8 ? "int8" : "f16"; }
};

// A tensor where the backend computes.
struct placed_tensor {
  device_buffer buffer;
  cqsa_tensor view{};

  placed_tensor(selected_tensor& from, device_memory* device) {
    if (device && !from.bytes.empty()) buffer = device_buffer(*device, from.bytes.size(), false);
    if (buffer.address()) buffer.write(from.bytes.data());
    view = from.view(buffer.address() ? buffer.address() : from.bytes.data(), device ? device->device_type() : CQSA_DEVICE_CPU);
  }
};

// A problem on the backend, and its results in the host.
class selected_runner {
 public:
  selected_runner(cqsa_context* context, device_memory* device, selected_data& data)
      : context_(context), device_(device), data_(data), q_(data.q, device), k_(data.k, device), v_(data.v, device),
        k_scale_(data.k_scale, device), v_scale_(data.v_scale, device), table_(data.page_table, device), cells_(data.cells, device),
        counts_(data.counts, device), out_host_(results(CQSA_DTYPE_F32, {data.spec.queries, data.spec.heads, data.spec.head_dim})),
        lse_host_(results(CQSA_DTYPE_F32, {data.spec.heads, data.spec.queries})), out_(out_host_, device), lse_(lse_host_, device) {}

  // Runs at a precision and brings the results to the host.
  void run(int32_t precision) {
    args(precision);
    reserve();
    poison();
    launch();
    wait();
    if (!device_) return;
    out_.buffer.read(out_host_.bytes.data());
    lse_.buffer.read(lse_host_.bytes.data());
  }

  // Of one run, the best of several series of runs that are queued one behind the other.
  double time() {
    const auto series = [&](int count) {
      const auto begin = clock::now();
      for (int i = 0; i < count; ++i) launch();
      wait();
      return since(begin) / count;
    };
    double best = series(1);
    const int count = device_ ? static_cast<int>(std::clamp(0.05 / std::max(best, 1e-9), 1.0, 200.0)) : 1;
    const auto begin = clock::now();
    for (int i = 0; i < 3 || (since(begin) < kTimedSeconds && i < 100); ++i) best = std::min(best, series(count));
    return best;
  }

  const float* out() const { return out_host_.as<float>(); }
  const float* lse() const { return lse_host_.as<float>(); }
  int64_t out_count() const { return static_cast<int64_t>(out_host_.bytes.size() / sizeof(float)); }

 private:
  static double since(clock::time_point begin) { return std::chrono::duration<double>(clock::now() - begin).count(); }

  static selected_tensor results(cqsa_dtype dtype, std::vector<int64_t> shape) {
    selected_tensor t;
    int64_t step = 1;
    t.dtype = dtype;
    t.strides.resize(shape.size());
    for (std::size_t i = shape.size(); i-- > 0; step *= shape[i]) t.strides[i] = step;
    t.shape = std::move(shape);
    t.bytes.resize(static_cast<std::size_t>(step * type_of(dtype).bytes));
    return t;
  }

  void args(int32_t precision) {
    args_ = CQSA_ATTENTION_SELECTED_ARGS_INIT;
    args_.q = &q_.view, args_.k = &k_.view, args_.v = &v_.view;
    args_.page_table = &table_.view, args_.cells = &cells_.view, args_.counts = &counts_.view;
    args_.out = &out_.view, args_.lse = &lse_.view;
    args_.precision = precision;
    if (data_.spec.kv != CQSA_DTYPE_I8) return;
    args_.k_scale = &k_scale_.view, args_.v_scale = &v_scale_.view;
    args_.kv_group = static_cast<int32_t>(data_.spec.group);
  }

  // A workspace of exactly what the call says it needs: nothing is allocated while it is timed.
  void reserve() {
    uint64_t bytes = 0;
    require(cqsa_attention_selected_workspace(context_, &args_, &bytes));
    workspace_host_.assign(device_ ? 0 : static_cast<std::size_t>(bytes) + CQSA_WORKSPACE_ALIGNMENT, std::byte{0});
    workspace_ = device_ && bytes > 0 ? device_buffer(*device_, bytes, false) : device_buffer();
    const auto host = (reinterpret_cast<uintptr_t>(workspace_host_.data()) + CQSA_WORKSPACE_ALIGNMENT - 1) / CQSA_WORKSPACE_ALIGNMENT;
    args_.workspace = bytes == 0 ? nullptr : device_ ? workspace_.address() : reinterpret_cast<void*>(host * CQSA_WORKSPACE_ALIGNMENT);
    args_.workspace_bytes = bytes;
  }

  // NaN: what is not written shows.
  void poison() {
    for (auto [host, placed] : {std::pair{&out_host_, &out_}, std::pair{&lse_host_, &lse_}}) {
      std::fill(host->bytes.begin(), host->bytes.end(), std::byte{0xFF});
      if (device_) placed->buffer.write(host->bytes.data());
    }
  }

  void launch() { require(cqsa_attention_selected(context_, &args_, device_ ? device_->stream() : nullptr)); }
  void wait() {
    if (device_) device_->wait();
  }

  cqsa_context* context_;
  device_memory* device_;
  selected_data& data_;
  placed_tensor q_, k_, v_, k_scale_, v_scale_, table_, cells_, counts_;
  selected_tensor out_host_, lse_host_;
  placed_tensor out_, lse_;
  device_buffer workspace_;
  std::vector<std::byte> workspace_host_;
  cqsa_attention_selected_args args_ = CQSA_ATTENTION_SELECTED_ARGS_INIT;
};

// The largest of the magnitudes and of the distances; NaN counts as infinite.
double largest(const std::vector<double>& x) {
  double most = 0;
  for (const double value : x) most = std::max(most, std::fabs(value));
  return most;
}
double distance(double a, double b) {
  const double d = std::fabs(a - b);
  return a == b ? 0 : std::isnan(d) ? std::numeric_limits<double>::infinity() : d;
}
double distance(const std::vector<double>& a, const std::vector<double>& b) {
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i) most = std::max(most, distance(a[i], b[i]));
  return most;
}

// The sampled rows of a run.
selected_rows sampled(const selected_runner& run, const selected_data& data, const selected_reference& reference) {
  const selected_spec& s = data.spec;
  selected_rows rows;
  for (const int64_t query : reference.queries)
    for (int64_t h = 0; h < s.heads; ++h) {
      const float* const from = run.out() + (query * s.heads + h) * s.head_dim;
      rows.out.insert(rows.out.end(), from, from + s.head_dim);
      rows.lse.push_back(run.lse()[h * s.queries + query]);
    }
  return rows;
}

// Twice the error of the plainest code for the same types, and two steps of the result's.
double tolerance(double naive, double size) { return 2 * naive + 2 * ulp(CQSA_DTYPE_F32, size); }

class selected_checker {
 public:
  selected_checker(const selected_data& data, const selected_reference& reference) : data_(data), reference_(reference) {
    out_size_ = largest(reference.exact.out);
    lse_size_ = std::max(1.0, largest(reference.exact.lse));
  }

  void check(const selected_runner& run, int32_t precision, selected_trial& trial) {
    const selected_rows rows = sampled(run, data_, reference_);
    const selected_rows& naive = precision == CQSA_PRECISION_FAST ? reference_.naive_fast : reference_.naive_f32;
    trial.error = distance(rows.out, reference_.exact.out);
    trial.lse_error = distance(rows.lse, reference_.exact.lse);
    trial.allowed = tolerance(distance(naive.out, reference_.exact.out), out_size_);
    trial.lse_allowed = tolerance(distance(naive.lse, reference_.exact.lse), lse_size_);
    // An f32 run that is wrong allows the others nothing.
    if (precision == CQSA_PRECISION_F32) keep(run, std::min(trial.error, trial.allowed), std::min(trial.lse_error, trial.lse_allowed));
    if (precision == CQSA_PRECISION_SPLIT) {
      trial.allowed = std::max(kFactorOfF32 * f32_error_, kLeastOfReference * out_size_);
      trial.lse_allowed = std::max(kFactorOfF32 * f32_lse_error_, kLeastOfReference * lse_size_);
    }
    compare_all(run, precision, trial);
    judge(trial);
  }

 private:
  void keep(const selected_runner& run, double error, double lse_error) {
    old_.assign(run.out(), run.out() + run.out_count());
    f32_error_ = error, f32_lse_error_ = lse_error;
  }
  void compare_all(const selected_runner& run, int32_t precision, selected_trial& trial) {
    double size = 0;
    for (std::size_t i = 0; i < old_.size(); ++i) {
      trial.off_f32 = std::max(trial.off_f32, distance(run.out()[i], old_[i]));
      size = std::max(size, std::fabs(static_cast<double>(old_[i])));
    }
    if (precision != CQSA_PRECISION_FAST) trial.off_f32_allowed = kOfOldEverywhere * size;
  }
  static void judge(selected_trial& t) {
    if (!(t.error <= t.allowed)) t.failure = fmt::format("out is off by {:.2e} on the sampled queries, allowed {:.2e}", t.error, t.allowed);
    else if (!(t.lse_error <= t.lse_allowed))
      t.failure = fmt::format("lse is off by {:.2e} on the sampled queries, allowed {:.2e}", t.lse_error, t.lse_allowed);
    else if (t.off_f32_allowed > 0 && !(t.off_f32 <= t.off_f32_allowed))
      t.failure = fmt::format("out is off by {:.2e} from the f32 run, allowed {:.2e}", t.off_f32, t.off_f32_allowed);
    else if (!std::isfinite(t.off_f32)) t.failure = "out has NaN or infinity where the f32 run has none";
  }

  const selected_data& data_;
  const selected_reference& reference_;
  double out_size_, lse_size_, f32_error_ = 0, f32_lse_error_ = 0;
  std::vector<float> old_;
};

// ---- what is printed --------------------------------------------------------------------------------------------------------

class selected_output {
 public:
  selected_output(const selected_options& options, const cqsa_context* context) : options_(options) {
    report_ = fmt::format("cqsa parity --op attention-selected --backend {} --seed {}\n\n{}\n", options.backend, options.seed,
                          machine_text(context));
    if (options.json) fmt::print("{}\n", dump(machine_json(context)));
    line(fmt::format("{:>8} {:>7}  {:<4} {:<5}  {:>9} {:>9}  {:>9} {:>9}  {:>9}  ok", "context", "queries", "kv", "prec", "max abs",
                     "allowed", "off f32", "allowed", "ms"),
         true);
  }

  void add(const selected_trial& t) {
    ++(t.skipped ? skipped_ : runs_);
    if (!t.pass()) ++failures_;
    if (options_.json) return print_json(t);
    line(text(t), t.pass());
    if (!t.failure.empty()) line("         " + t.failure, t.pass());
    if (!t.pass()) line("         reproduce: " + reproducer(t), false);
  }

  int finish() {
    const std::string summary =
        fmt::format("{} runs, {} skipped, {} failures: {}", runs_, skipped_, failures_, failures_ ? "FAIL" : "PASS");
    report_ += "\n" + summary + "\n";
    if (options_.json)
      fmt::print("{}\n",
                 dump({{"record", "summary"}, {"runs", runs_}, {"skipped", skipped_}, {"failures", failures_}, {"pass", failures_ == 0}}));
    else fmt::print("{}\n", summary);
    if (!options_.report.empty()) write_report();
    return failures_ == 0 ? kExitOk : kExitCheckFailed;
  }

 private:
  static std::string dump(const nlohmann::ordered_json& json) {
    return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  }
  static std::string text(const selected_trial& t) {
    const std::string head = fmt::format("{:>8} {:>7}  {:<4} {:<5}  ", t.spec.context, t.spec.queries, t.kv(), t.precision);
    if (t.skipped) return head + "skipped";
    const std::string ms = t.seconds > 0 ? fmt::format("{:.3f}", t.seconds * 1e3) : "-";
    const std::string everywhere = t.off_f32_allowed > 0 ? fmt::format("{:.2e}", t.off_f32_allowed) : "-";
    return head + fmt::format("{:>9.2e} {:>9.2e}  {:>9.2e} {:>9}  {:>9}  {}", t.error, t.allowed, t.off_f32, everywhere, ms,
                              t.pass() ? "ok" : "FAIL");
  }
  std::string reproducer(const selected_trial& t) const {
    std::string text =
        fmt::format("cqsa parity --op attention-selected {} {} --kv {} --seed {}", t.spec.context, t.spec.queries, t.kv(), options_.seed);
    if (options_.backend != "auto") text += " --backend " + options_.backend;
    if (options_.threads > 0) text += fmt::format(" --threads {}", options_.threads);
    return text;
  }
  void print_json(const selected_trial& t) const {
    nlohmann::ordered_json json = {{"record", "trial"}, {"context", t.spec.context}, {"queries", t.spec.queries}, {"kv", t.kv()},
                                   {"precision", t.precision}, {"pass", t.pass()}};
    if (t.skipped) json["skipped"] = true;
    if (!t.failure.empty()) json["failure"] = t.failure;
    if (!t.pass()) json["reproduce"] = reproducer(t);
    if (!t.skipped)
      json.update({{"max_abs", t.error}, {"allowed_max_abs", t.allowed}, {"lse_max_abs", t.lse_error}, {"lse_allowed", t.lse_allowed},
                   {"off_f32", t.off_f32}, {"allowed_off_f32", t.off_f32_allowed}});
    if (t.seconds > 0) json["seconds"] = t.seconds;
    fmt::print("{}\n", dump(json));
    std::fflush(stdout);
  }
  void line(const std::string& text, bool dispensable) {
    report_ += text + "\n";
    if (options_.json || (options_.quiet && dispensable)) return;
    fmt::print("{}\n", text);
    std::fflush(stdout);
  }
  void write_report() const {
    std::ofstream file(options_.report);
    file << report_ << std::flush;
    if (!file) throw std::runtime_error(fmt::format("{}: {}", options_.report, std::strerror(errno)));
  }

  const selected_options& options_;
  std::string report_;
  int64_t runs_ = 0, skipped_ = 0, failures_ = 0;
};

// ---- the runs ---------------------------------------------------------------------------------------------------------------

selected_trial try_precision(selected_runner& runner, selected_checker& checker, const selected_spec& spec,
                             const precision_name& precision) {
  selected_trial trial;
  trial.spec = spec;
  trial.precision = precision.name;
  try {
    runner.run(precision.value);
    checker.check(runner, precision.value, trial);
    if (trial.pass()) trial.seconds = runner.time();
  } catch (const library_error& error) {
    trial.failure = error.what();
    trial.skipped = error.status == CQSA_ERROR_UNSUPPORTED && precision.value != CQSA_PRECISION_F32;
  }
  if (interrupted()) throw interrupted_error();
  return trial;
}

void run_problem(cqsa_context* context, device_memory* device, const selected_options& options, const selected_spec& spec,
                 selected_output& output) {
  selected_data data(spec);
  const selected_reference reference(data, options.samples, options.threads > 0 ? options.threads : core_count());
  selected_runner runner(context, device, data);
  selected_checker checker(data, reference);
  for (const precision_name& precision : kPrecisions) output.add(try_precision(runner, checker, spec, precision));
}

std::vector<cqsa_dtype> kv_types(const std::string& text) {
  std::vector<cqsa_dtype> types;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    if (word != "f16" && word != "int8") throw std::runtime_error(fmt::format("--kv \"{}\": f16, int8 or f16,int8 is wanted", text));
    types.push_back(word == "f16" ? CQSA_DTYPE_F16 : CQSA_DTYPE_I8);
    begin = end + 1;
  }
  return types;
}

void check_range(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) throw std::runtime_error(fmt::format("{} is {}, wanted {} to {}", name, value, low, high));
}

}  // namespace

int run_selected_parity(const selected_options& options) {
  const std::vector<cqsa_dtype> types = kv_types(options.kv);
  const std::vector<int64_t> contexts =
      options.contexts.empty() ? std::vector<int64_t>(std::begin(kContexts), std::end(kContexts)) : options.contexts;
  for (const int64_t context : contexts) check_range("the context", context, 1, int64_t{1} << 24);
  if (options.queries != 0) check_range("the number of queries", options.queries, 1, 65536);
  check_range("--samples", options.samples, 1, 65536);
  catch_signals();
  const context_ptr context = make_context(options.backend, options.threads);
  const std::string backend = cqsa_context_backend(context.get());
  const bool host = is_host_backend(backend);
  const std::unique_ptr<device_memory> device = host ? nullptr : open_device_memory(backend);
  selected_output output(options, context.get());
  for (const int64_t cells : contexts)
    for (const cqsa_dtype kv : types) {
      selected_spec spec;
      spec.context = cells, spec.kv = kv, spec.seed = options.seed;
      spec.queries = options.queries != 0 ? options.queries : host ? kHostQueries : kDeviceQueries;
      run_problem(context.get(), device.get(), options, spec, output);
    }
  return output.finish();
}

}  // namespace tool
