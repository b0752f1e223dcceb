// SPDX-License-Identifier: Apache-2.0
#include "fp8_parity.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "interrupt.h"
#include "library.h"
#include "machine.h"
#include "options.h"

namespace tool {
namespace {

// What goes to standard output as it comes, and to the report at the end.
class fp8_output {
 public:
  fp8_output(const fp8_parity_options& options, const cqsa_context* context) : options_(options) {
    report_ = fmt::format("cqsa parity --op {} --problems {} --backend {} --seed {}\n\n{}\n", options.op,
                          options.lines.empty() ? options.set : "(from --problem)", options.backend, options.seed, machine_text(context));
    if (options.json) print(machine_json(context));
  }

  void add(const fp8_line& line, const fp8_verdict& verdict) {
    const bool right = verdict.failure.empty();
    ++runs_;
    failures_ += !right;
    std::string text = fmt::format("{}  {}", right ? "ok  " : "FAIL", line.text());
    if (!verdict.implementation.empty()) text += fmt::format("  [{}, error {:.1e}]", verdict.implementation, verdict.error);
    if (!right) text += fmt::format("\n     {}\n     reproduce: {}", verdict.failure, reproducer(line));
    report_ += text + "\n";
    if (options_.json)
      print_json(line, verdict);
    else if (!options_.quiet || !right)
      fmt::print("{}\n", text);
    std::fflush(stdout);
  }

  int finish() {
    const std::string summary = fmt::format("{} problems, {} failures: {}", runs_, failures_, failures_ ? "FAIL" : "PASS");
    report_ += "\n" + summary + "\n";
    if (options_.json)
      print({{"record", "summary"}, {"problems", runs_}, {"failures", failures_}, {"pass", failures_ == 0}});
    else
      fmt::print("{}\n", summary);
    if (!options_.report.empty()) write_report();
    return failures_ == 0 ? kExitOk : kExitCheckFailed;
  }

 private:
  static void print(const nlohmann::ordered_json& json) {
    fmt::print("{}\n", json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
  }
  std::string reproducer(const fp8_line& line) const {
    std::string text = fmt::format("cqsa parity --op {} --problem '{}'", options_.op, line.text());
    if (options_.backend != "auto") text += " --backend " + options_.backend;
    if (options_.threads > 0) text += fmt::format(" --threads {}", options_.threads);
    return text;
  }
  void print_json(const fp8_line& line, const fp8_verdict& verdict) const {
    nlohmann::ordered_json json = {{"record", "trial"}, {"problem", line.text()}, {"pass", verdict.failure.empty()}};
    if (!verdict.implementation.empty()) json.update({{"implementation", verdict.implementation}, {"error", verdict.error}});
    if (!verdict.failure.empty()) json.update({{"failure", verdict.failure}, {"reproduce", reproducer(line)}});
    print(json);
  }
  void write_report() const {
    std::ofstream file(options_.report);
    file << report_ << std::flush;
    if (!file) throw std::runtime_error(fmt::format("{}: {}", options_.report, std::strerror(errno)));
  }

  const fp8_parity_options& options_;
  std::string report_;
  int64_t runs_ = 0, failures_ = 0;
};

fp8_verdict tried(cqsa_context* context, device_memory* device, const fp8_parity_options& options, const fp8_line& line) {
  try {
    return options.op == "fp8-gemm" ? check_fp8_gemm(context, device, line, options.threads) : check_fp8_quantize(context, device, line);
  } catch (const library_error& error) {
    return {fmt::format("the library refused it: {}", error.what()), 0, ""};
  }
}

}  // namespace

int run_fp8_parity(const fp8_parity_options& options) {
  const fp8_line::pairs& keys = options.op == "fp8-gemm" ? kFp8GemmKeys : kFp8QuantizeKeys;
  std::vector<fp8_line> lines;
  for (const std::string& text : options.lines.empty() ? fp8_lines(options.op, options.set) : options.lines) {
    lines.emplace_back(keys, text);
    if (lines.back()["seed"].empty()) lines.back().set("seed", std::to_string(options.seed + lines.size() - 1));
  }
  if (options.list) {
    for (const fp8_line& line : lines) fmt::print("{}\n", line.text());
    return kExitOk;
  }
  catch_signals();
  const context_ptr context = make_context(options.backend, options.threads);
  const std::string backend = cqsa_context_backend(context.get());
  const std::unique_ptr<device_memory> device = is_host_backend(backend) ? nullptr : open_device_memory(backend);
  fp8_output output(options, context.get());
  for (const fp8_line& line : lines) {
    output.add(line, tried(context.get(), device.get(), options, line));
    if (interrupted()) throw interrupted_error();
  }
  return output.finish();
}

}  // namespace tool
