// SPDX-License-Identifier: Apache-2.0
// cqsa: the command line of libcqsa. It uses the public C API only.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "cqsa.h"
#include "interrupt.h"
#include "options.h"

namespace tool {
namespace {

// `--check 128` as `--check=128`: for the parser an option with an optional value would also swallow a file name.
std::vector<std::string> arguments(int argc, char** argv) {
  std::vector<std::string> out;
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    const bool digits = !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
    if (digits && !out.empty() && out.back() == "--check")
      out.back() += "=" + text;
    else
      out.push_back(text);
  }
  std::reverse(out.begin(), out.end());  // as the parser wants them
  return out;
}

// Messages of others may have several lines; ours have one.
int report(std::string message, int status) {
  while (!message.empty() && (message.back() == '\n' || message.back() == ' ')) message.pop_back();
  std::replace(message.begin(), message.end(), '\n', ' ');
  fmt::print(stderr, "cqsa: {}\n", message);
  return status;
}

// Asked first: the parser would look for a known command behind an unknown one.
bool is_command(const std::string& word) {
  return word == "doctor" || word == "plan" || word == "attention" || word == "bench" || word == "parity" || word == "quantize";
}

int run(int argc, char** argv) {
  CLI::App app("Exact attention under any memory budget", "cqsa");
  app.set_version_flag("--version", fmt::format("cqsa {}", cqsa_version_string()));
  app.require_subcommand(1);
  if (argc > 1 && argv[1][0] != '-' && !is_command(argv[1]))
    return report(fmt::format("unknown command '{}', wanted doctor, plan, attention, quantize, bench or parity", argv[1]), kExitError);
  if (argc > 2 && std::string(argv[1]) == "bench" && argv[2][0] != '-' && argv[2] != std::string("attention") && argv[2] != std::string("fp8"))
    return report(fmt::format("bench cannot time '{}', wanted attention or fp8", argv[2]), kExitError);
  int status = kExitOk;
  add_doctor(app, status);
  add_plan(app, status);
  add_attention(app, status);
  add_quantize(app, status);
  add_bench(app, status);
  add_parity(app, status);
  try {
    app.parse(arguments(argc, argv));
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    return report(error.what(), kExitError);
  }
  return status;
}

}  // namespace
}  // namespace tool

int main(int argc, char** argv) {
  try {
    const int status = tool::run(argc, argv);
    if (std::fflush(stdout) != 0 || std::ferror(stdout)) return tool::report("standard output could not be written", tool::kExitError);
    return status;
  } catch (const tool::interrupted_error& error) {
    return tool::report(error.what(), tool::kExitInterrupted);
  } catch (const std::exception& error) {
    return tool::report(error.what(), tool::kExitError);
  }
}
