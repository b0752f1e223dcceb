// SPDX-License-Identifier: Apache-2.0
// cqsa parity: problems from a file, each run in every way that its line asks for and compared with fp64; timed on request,
// but never without the check.
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "fp8_parity.h"
#include "interrupt.h"
#include "library.h"
#include "machine.h"
#include "mapped_file.h"
#include "options.h"
#include "selected_parity.h"
#include "trial.h"

namespace tool {
namespace {

constexpr std::size_t kLongestFile = 10'000'000;

struct parity_options {
  std::string op = "attention", problems, backend = "auto", report, memory, part;
  std::vector<std::string> lines;
  uint64_t seed = 1;
  int32_t threads = 0;
  bool list = false, speed = false, json = false, quiet = false;
  // attention-selected
  int64_t context = 0, queries = 0, samples = 0;
  std::string kv;
};

std::vector<problem_line> read_problems(const parity_options& options) {
  if (!options.lines.empty()) {
    if (!options.problems.empty()) throw std::runtime_error("--problem or --problems is wanted, not both");
    std::string text;
    for (const std::string& line : options.lines) text += line + "\n";
    return parse_problem_file(text, "--problem");
  }
  const std::string name = options.problems.empty() ? "smoke" : options.problems;
  if (const std::string* text = problem_set(name)) return parse_problem_file(*text, name + ".problems");
  const mapped_file file(name);
  if (file.bytes().size() > kLongestFile) throw std::runtime_error(name + ": is too large for a file of problems");
  return parse_problem_file({reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()}, name);
}

// Lines without a seed get different ones, so that no two problems share their data. --memory replaces what lines say.
std::vector<problem_line> completed(std::vector<problem_line> lines, const parity_options& options) {
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (!lines[i].find("seed")) lines[i].set("seed", std::to_string(options.seed + i));
    if (!options.memory.empty()) lines[i].set("memory", options.memory);
    parse_problem(lines[i]);
  }
  return lines;
}

// "2/3": the second, fifth, eighth .. of the lines, so that each part has its share of what takes long.
std::vector<problem_line> part_of(const std::vector<problem_line>& lines, const std::string& part) {
  if (part.empty()) return lines;
  const std::vector<std::string> numbers = split(part, '/');
  const auto number = [&](std::size_t i) { return i < numbers.size() && numbers[i].size() < 7 ? std::strtol(numbers[i].c_str(), nullptr, 10) : 0; };
  const long first = number(0), parts = number(1);
  if (numbers.size() != 2 || part != fmt::format("{}/{}", first, parts) || first < 1 || first > parts)
    throw std::runtime_error(fmt::format("--part \"{}\": I/N with 1 <= I <= N is wanted", part));
  std::vector<problem_line> chosen;
  for (std::size_t i = static_cast<std::size_t>(first) - 1; i < lines.size(); i += static_cast<std::size_t>(parts)) chosen.push_back(lines[i]);
  return chosen;
}

void list_runs(const std::vector<problem_line>& lines) {
  for (problem_line line : lines) {
    const problem_spec spec = parse_problem(line);
    const bool has_memory = line.find("memory");
    for (const memory_choice& memory : spec.memories)
      for (const schedule_choice& schedule : spec.schedules)
        for (const std::string& budget : spec.budgets) {
          if (has_memory) line.set("memory", memory.name);
          line.set("schedule", schedule.name);
          line.set("budget", budget);
          fmt::print("{}\n", line.text());
        }
  }
}

// What goes to standard output as it comes, and to the report at the end.
class parity_output {
 public:
  parity_output(const parity_options& options, const cqsa_context* context) : options_(options) {
    report_ = fmt::format("cqsa parity --op {} --problems {}{} --backend {} --seed {}\n\n{}\n", options.op,
                          options.lines.empty() ? options.problems.empty() ? "smoke" : options.problems : "(from --problem)",
                          options.part.empty() ? "" : " --part " + options.part,
                          options.backend, options.seed, machine_text(context));
    if (options.json) fmt::print("{}\n", dump(machine_json(context)));
  }

  void add(const trial_report& trial) {
    ++(trial.skipped ? skipped_ : runs_);
    std::string text = trial.text();
    if (!trial.pass()) {
      ++failures_;
      text += "\n     reproduce: " + reproducer(trial.line, options_.backend, options_.threads);
    }
    report_ += text + "\n";
    if (options_.json)
      print_json(trial);
    else if (!options_.quiet || !trial.pass())
      fmt::print("{}\n", text);
    std::fflush(stdout);
  }

  void add(const stage_seconds& seconds) { seconds_.add(seconds); }

  int finish(std::size_t problems) {
    const double all = std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count();
    const std::string summary = fmt::format("{} problems, {} runs, {} skipped, {} failures: {}", problems, runs_, skipped_, failures_,
                                            failures_ ? "FAIL" : "PASS");
    const std::string times = fmt::format("{:.1f} s: operands {:.1f}, fp64 {:.1f}, runs {:.1f}, checks {:.1f}", all, seconds_.operands,
                                          seconds_.reference, seconds_.runs, seconds_.checks);
    report_ += "\n" + summary + "\n" + times + "\n";
    if (options_.json)
      fmt::print("{}\n", dump({{"record", "summary"}, {"problems", problems}, {"runs", runs_}, {"skipped", skipped_},
                               {"failures", failures_}, {"pass", failures_ == 0},
                               {"seconds", {{"all", all}, {"operands", seconds_.operands}, {"fp64", seconds_.reference},
                                            {"runs", seconds_.runs}, {"checks", seconds_.checks}}}}));
    else
      fmt::print("{}{}\n", options_.quiet ? times + "\n" : "", summary);
    if (!options_.report.empty()) write_report();
    return failures_ == 0 ? kExitOk : kExitCheckFailed;
  }

 private:
  static std::string dump(const nlohmann::ordered_json& json) {
    return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  }
  void print_json(const trial_report& trial) const {
    nlohmann::ordered_json json = trial.json();
    if (!trial.pass()) json["reproduce"] = reproducer(trial.line, options_.backend, options_.threads);
    fmt::print("{}\n", dump(json));
  }
  void write_report() const {
    std::ofstream file(options_.report);
    file << report_ << std::flush;
    if (!file) throw std::runtime_error(fmt::format("{}: {}", options_.report, std::strerror(errno)));
  }

  const parity_options& options_;
  std::string report_;
  int64_t runs_ = 0, skipped_ = 0, failures_ = 0;
  stage_seconds seconds_;
  std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
};

trial_report failed(const problem_line& line, const std::string& why) {
  trial_report report;
  report.line = line;
  report.failure = why;
  return report;
}

// Operands that the library does not take, and a problem that no schedule takes, fail their line.
void run_problem(cqsa_context* context, const problem_line& line, const parity_options& options, parity_output& output) {
  const timing speed;
  std::unique_ptr<problem_trials> trials;
  try {
    trials = std::make_unique<problem_trials>(context, line, options.threads);
  } catch (const interrupted_error&) {
    throw;
  } catch (const std::exception& error) {
    return output.add(failed(line, error.what()));
  }
  bool ran = false;
  for (const memory_choice& memory : trials->spec().memories)
    for (const schedule_choice& schedule : trials->spec().schedules)
      for (const std::string& budget : trials->spec().budgets) {
        const trial_report report = trials->run(memory, schedule, budget, options.speed ? &speed : nullptr);
        ran |= !report.skipped;
        output.add(report);
      }
  output.add(trials->seconds());
  if (!ran && trials->computes_f64()) output.add(failed(line, "the backend has no schedule for this problem"));
}

// An option that the operation does not have is refused, never dropped.
void refuse(bool given, const char* option, const std::string& op) {
  if (given) throw std::runtime_error(fmt::format("{} is nothing that --op {} has", option, op));
}

int run_selected(const parity_options& options) {
  refuse(!options.problems.empty(), "--problems", options.op);
  refuse(!options.lines.empty(), "--problem", options.op);
  refuse(!options.memory.empty(), "--memory", options.op);
  refuse(options.list, "--list", options.op);
  refuse(!options.part.empty(), "--part", options.op);
  selected_options selected;
  if (options.context != 0) selected.contexts = {options.context};
  selected.queries = options.queries;
  if (options.samples != 0) selected.samples = options.samples;
  if (!options.kv.empty()) selected.kv = options.kv;
  selected.backend = options.backend, selected.report = options.report;
  selected.seed = options.seed, selected.threads = options.threads;
  selected.json = options.json, selected.quiet = options.quiet;
  return run_selected_parity(selected);
}

int run_fp8(const parity_options& options) {
  refuse(options.context != 0, "a context", options.op);
  refuse(options.queries != 0, "--queries", options.op);
  refuse(options.samples != 0, "--samples", options.op);
  refuse(!options.kv.empty(), "--kv", options.op);
  refuse(!options.memory.empty(), "--memory", options.op);
  refuse(!options.part.empty(), "--part", options.op);
  refuse(options.speed, "--speed", options.op);
  if (!options.lines.empty() && !options.problems.empty()) throw std::runtime_error("--problem or --problems is wanted, not both");
  fp8_parity_options fp8;
  fp8.op = options.op, fp8.backend = options.backend, fp8.report = options.report, fp8.lines = options.lines;
  if (!options.problems.empty()) fp8.set = options.problems;
  fp8.seed = options.seed, fp8.threads = options.threads;
  fp8.list = options.list, fp8.json = options.json, fp8.quiet = options.quiet;
  return run_fp8_parity(fp8);
}

int run_parity(const parity_options& options) {
  if (options.op == "attention-selected") return run_selected(options);
  if (options.op == "fp8-quantize" || options.op == "fp8-gemm") return run_fp8(options);
  if (options.op != "attention")
    throw std::runtime_error(fmt::format("--op \"{}\": attention, attention-selected, fp8-quantize or fp8-gemm is wanted", options.op));
  refuse(options.context != 0, "a context", options.op);
  refuse(options.queries != 0, "--queries", options.op);
  refuse(options.samples != 0, "--samples", options.op);
  refuse(!options.kv.empty(), "--kv", options.op);
  const std::vector<problem_line> lines = part_of(completed(read_problems(options), options), options.part);
  if (options.list) {
    list_runs(lines);
    return kExitOk;
  }
  catch_signals();
  const context_ptr context = make_context(options.backend, options.threads);
  parity_output output(options, context.get());
  for (const problem_line& line : lines) run_problem(context.get(), line, options, output);
  return output.finish(lines.size());
}

}  // namespace

void add_parity(CLI::App& app, int& status) {
  const auto options = std::make_shared<parity_options>();
  CLI::App& command = *app.add_subcommand("parity", "Compare the library with fp64 on files of problems, and time it");
  command.add_option("--op", options->op, "the operation: attention (default), attention-selected, fp8-quantize, fp8-gemm")->type_name("NAME");
  command.add_option("context", options->context, "attention-selected: cells of the context; default: 1500, 2100, 8192, 32768, 131072")->check(CLI::PositiveNumber);
  command.add_option("queries,--queries", options->queries, "attention-selected: how many queries; default: 2048, on the CPU 256")->check(CLI::PositiveNumber);
  command.add_option("--samples", options->samples, "attention-selected: queries that are compared with fp64; default: 16")->check(CLI::PositiveNumber);
  command.add_option("--kv", options->kv, "attention-selected: f16, int8 or f16,int8 (default)")->type_name("LIST");
  command.add_option("--problems", options->problems, "smoke (default), ci, gpu, all, or a file with a problem on each line")->type_name("SET");
  command.add_option("--problem", options->lines, "one problem: 'key=value key=value ..'; may be given again")->type_name("LINE");
  command.add_option("--part", options->part, "only every Nth line, from the Ith on; all N parts together are the set")->type_name("I/N");
  command.add_option("--backend", options->backend, "auto, cpu, cuda, hip or the name of a plugin")->type_name("NAME");
  command.add_option("--memory", options->memory, "where operands are: pageable, pinned, device, kv_pinned, kv_pageable, all, all_kv")->type_name("LIST");
  command.add_option("--threads", options->threads, "host threads; default: one per core")->check(CLI::NonNegativeNumber);
  command.add_option("--seed", options->seed, "seed of the first problem that has none; the next ones follow on")->type_name("N");
  command.add_option("--report", options->report, "also write all results, with versions and machine, as text")->type_name("FILE");
  command.add_flag("--list", options->list, "print one line for each run, and run nothing");
  command.add_flag("--speed", options->speed, "also time every run that is right");
  command.add_flag("--json", options->json, "print JSON lines: machine, trials, summary");
  command.add_flag("--quiet", options->quiet, "print failures, where the time went, and the summary only");
  command.callback([options, &status] { status = run_parity(*options); });
}

}  // namespace tool
