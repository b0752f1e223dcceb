// SPDX-License-Identifier: Apache-2.0
// cqsa bench attention: a grid of problems, timed. Every cell is a problem of `cqsa parity` and checked as one.
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "benchmarks/fma_peak.h"
#include "fp8_bench.h"
#include "interrupt.h"
#include "library.h"
#include "machine.h"
#include "options.h"
#include "sizes.h"
#include "trial.h"

namespace tool {
namespace {

constexpr double kPeakSeconds = 1;

// Lists with commas, each the values of one key of the problem line.
struct bench_options {
  std::string seqlen = "1024,4096", heads = "8", kv_heads, head_dim = "64,128", dtype = "f32,bf16", causal = "none", batch = "1",
              memory = "none", schedule = "auto", threads = "0", backend = "auto", operands;
  int runs = 5;
  bool json_lines = false, peak = false;
};

using grid = std::vector<problem_line>;

// Each line of the grid with each value of one more key.
grid times(const grid& lines, const char* key, const std::string& values) {
  grid out;
  for (const problem_line& line : lines)
    for (const std::string& value : split(values, ',')) {
      out.push_back(line);
      out.back().set(key, value);
    }
  return out;
}

grid cells_of(const bench_options& o) {
  grid lines(1);
  lines[0].set("rows", "64");
  const std::pair<const char*, const std::string*> axes[] = {
      {"dtype", &o.dtype}, {"head_dim", &o.head_dim}, {"batch", &o.batch},   {"heads", &o.heads},
      {"causal", &o.causal}, {"seqlen", &o.seqlen},   {"schedule", &o.schedule}, {"budget", &o.memory}};
  for (const auto& [key, values] : axes) lines = times(lines, key, *values);
  if (!o.kv_heads.empty()) lines = times(lines, "kv_heads", o.kv_heads);
  if (!o.operands.empty()) lines = times(lines, "memory", o.operands);
  for (const problem_line& line : lines) parse_problem(line);  // all of it is understood before anything runs
  return lines;
}

std::vector<int32_t> thread_counts(const bench_options& o) {
  std::vector<int32_t> counts;
  for (const std::string& text : split(o.threads, ',')) {
    const int64_t count = parse_count(text);
    if (count < 0 || count > 4096) throw std::runtime_error(fmt::format("--threads {}: 0 to 4096 is wanted", text));
    counts.push_back(count == 0 ? core_count() : static_cast<int32_t>(count));
  }
  return counts;
}

class bench_output {
 public:
  bench_output(const bench_options& options) : options_(options) {}

  void machine(const cqsa_context* context) {
    if (begun_) return;
    begun_ = true;
    if (options_.json_lines)
      print(machine_json(context));
    else
      fmt::print("{}", machine_text(context));
  }

  // A table for each count of threads. flops: of the peak, 0 when it was not measured.
  void begin(int32_t threads, double flops) {
    if (flops > 0) peak(threads, flops);
    if (!options_.json_lines) fmt::print("\n{}", kHeader);
    std::fflush(stdout);
  }

  // peak: FLOP/s of the machine, 0 when it was not measured.
  void cell(const trial_report& trial, int32_t threads, double peak) {
    failures_ += !trial.pass();
    if (options_.json_lines)
      cell_json(trial, threads, peak);
    else
      cell_text(trial, threads, peak);
    if (!trial.pass() && !options_.json_lines)
      fmt::print("  FAIL: {}\n  reproduce: {}\n", trial.failure, reproducer(trial.line, options_.backend, threads));
    std::fflush(stdout);
  }

  int status() const { return failures_ == 0 ? kExitOk : kExitCheckFailed; }

 private:
  static constexpr const char* kHeader =
      "type       D  batch  heads    seqlen  causal        schedule   operands     budget      peak memory  threads         time   GFLOP/s   of peak   max abs error\n";

  static void print(const nlohmann::ordered_json& json) {
    fmt::print("{}\n", json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
  }

  void peak(int32_t threads, double flops) const {
    if (options_.json_lines)
      print({{"record", "peak"}, {"threads", threads}, {"isa", fma_peak_isa()}, {"gflops", flops * 1e-9}});
    else
      fmt::print("FMA peak of {} threads, {}: {:.1f} GFLOP/s\n", threads, fma_peak_isa(), flops * 1e-9);
  }

  static std::string operands_of(const trial_report& trial) {
    const std::string* memory = trial.line.find("memory");
    return memory ? *memory : memory_choice{}.name;
  }

  void cell_json(const trial_report& trial, int32_t threads, double peak) const {
    nlohmann::ordered_json json = trial.json();
    json["record"] = "bench";
    json["threads"] = threads;
    json["operands"] = operands_of(trial);
    for (const char* key : {"dtype", "causal"}) json[key] = *trial.line.find(key);
    const problem_spec spec = parse_problem(trial.line);
    json.update({{"batch", spec.params.batch}, {"heads", spec.params.num_heads}, {"kv_heads", spec.params.num_kv_heads},
                 {"head_dim", spec.params.head_dim}, {"seqlen", spec.params.seqlen_q}});
    if (peak > 0 && trial.seconds > 0) json["share_of_peak"] = trial.rate() / peak;
    if (!trial.pass()) json["reproduce"] = reproducer(trial.line, options_.backend, threads);
    print(json);
  }

  void cell_text(const trial_report& trial, int32_t threads, double peak) const {
    const auto key = [&](const char* name) { return *trial.line.find(name); };
    const problem_spec spec = parse_problem(trial.line);
    const std::string heads = spec.params.num_heads == spec.params.num_kv_heads
                                  ? key("heads")
                                  : fmt::format("{}/{}", spec.params.num_heads, spec.params.num_kv_heads);
    const bool timed = trial.seconds > 0;
    fmt::print("{:<6} {:>5} {:>6} {:>6} {:>9}  {:<12}  {:<9}  {:<11}  {:<10} {:>12} {:>8} {:>12} {:>9} {:>9}   {:.1e}\n", key("dtype"),
               key("head_dim"), key("batch"), heads, key("seqlen"), key("causal"), trial.schedule, operands_of(trial), key("budget"), bytes_text(static_cast<double>(trial.peak)),
               threads, timed ? seconds_text(trial.seconds) : "-", timed ? fmt::format("{:.1f}", trial.rate() * 1e-9) : "-",
               timed && peak > 0 ? fmt::format("{:.1f} %", 100 * trial.rate() / peak) : "-", trial.check.max_abs);
  }

  const bench_options& options_;
  bool begun_ = false;
  int failures_ = 0;
};

// Operands once for all thread counts; the best run of several counts, once the result was checked.
int run_bench(const bench_options& options) {
  const grid cells = cells_of(options);
  const std::vector<int32_t> threads = thread_counts(options);
  if (options.runs < 1) throw std::runtime_error("--runs: a number of at least 1 is wanted");
  catch_signals();
  const timing speed{options.runs, 0};
  bench_output output(options);
  for (const int32_t count : threads) {
    const context_ptr context = make_context(options.backend, count);
    if (options.peak && !is_host_backend(cqsa_context_backend(context.get())))
      throw std::runtime_error("--peak measures this CPU; it has no meaning for another backend");
    output.machine(context.get());
    const double peak = options.peak ? fma_peak(count, kPeakSeconds) : 0;
    output.begin(count, peak);
    for (const problem_line& cell : cells) {
      problem_trials trials(context.get(), cell, count);
      output.cell(trials.run(trials.spec().memories[0], trials.spec().schedules[0], trials.spec().budgets[0], &speed), count, peak);
    }
  }
  return output.status();
}

}  // namespace

void add_bench(CLI::App& app, int& status) {
  const auto options = std::make_shared<bench_options>();
  CLI::App& group = *app.add_subcommand("bench", "Time the library on a grid of problems; every result is checked");
  group.require_subcommand(1);
  CLI::App& command = *group.add_subcommand("attention", "Time attention. Options take lists: --seqlen 1K,4K --dtype f32,bf16");
  command.add_option("--seqlen", options->seqlen, "tokens; default 1024,4096")->type_name("LIST");
  command.add_option("--heads", options->heads, "query heads; default 8")->type_name("LIST");
  command.add_option("--kv-heads", options->kv_heads, "key heads; default: as --heads")->type_name("LIST");
  command.add_option("--head-dim", options->head_dim, "channels; default 64,128")->type_name("LIST");
  command.add_option("--dtype", options->dtype, "f32, f16, bf16, f64; default f32,bf16")->type_name("LIST");
  command.add_option("--causal", options->causal, "none (default), top_left, bottom_right")->type_name("LIST");
  command.add_option("--batch", options->batch, "sequences; default 1")->type_name("LIST");
  command.add_option("--memory", options->memory, "budgets: none (default), least, half, or sizes as 64MiB")->type_name("LIST");
  command.add_option("--operands", options->operands, "where they are: pageable (default), pinned, device, kv_pinned, kv_pageable")->type_name("LIST");
  command.add_option("--schedule", options->schedule, "auto (default), direct, stream, cqs, cqs:7:1")->type_name("LIST");
  command.add_option("--threads", options->threads, "host threads; default 0: one per core")->type_name("LIST");
  command.add_option("--backend", options->backend, "auto, cpu, cuda or hip")->type_name("NAME");
  command.add_option("--runs", options->runs, "the best of so many counts; default 5")->type_name("N");
  command.add_flag("--peak", options->peak, "measure the FMA peak of the CPU first, and give rates as a share of it");
  command.add_flag("--json-lines", options->json_lines, "print JSON lines instead of a table; benchmarks/plot.py reads them");
  command.callback([options, &status] { status = run_bench(*options); });

  const auto fp8 = std::make_shared<fp8_bench_options>();
  CLI::App& second = *group.add_subcommand("fp8", "Time FP8: quantization beside copies of as many bytes, and products. Options take lists");
  second.add_option("--rows", fp8->rows, "of the matrices that are quantized; default 4096")->type_name("LIST");
  second.add_option("--cols", fp8->columns, "likewise; default 4096")->type_name("LIST");
  second.add_option("--dtype", fp8->dtype, "f32, f16, bf16; default bf16")->type_name("LIST");
  second.add_option("--size", fp8->sizes, "m = n = k of the products; default 1024; 0: none")->type_name("LIST");
  second.add_option("--threads", fp8->threads, "host threads; default 0: one per core")->type_name("N");
  second.add_option("--backend", fp8->backend, "auto, cpu, cuda or hip")->type_name("NAME");
  second.add_option("--runs", fp8->runs, "the median of so many series; default 9")->type_name("N");
  second.add_flag("--json-lines", fp8->json_lines, "print JSON lines instead of a table");
  second.callback([fp8, &status] { status = run_fp8_bench(*fp8); });
}

}  // namespace tool
