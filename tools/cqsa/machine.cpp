// SPDX-License-Identifier: Apache-2.0
#include "machine.h"

#include <cstdlib>
#include <ctime>
#include <fstream>

#include <fmt/format.h>
#include <sched.h>
#include <sys/utsname.h>

#include "library.h"

namespace tool {
namespace {

// Processes that wanted a core in the last minute: what a figure from a busy machine must be read with.
double load_average() {
  double load = 0;
  return ::getloadavg(&load, 1) == 1 ? load : 0;
}

}  // namespace

std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  return "";
}

int core_count() {
  cpu_set_t cores;
  return ::sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

std::string utc_time() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

nlohmann::ordered_json machine_json(const cqsa_context* context) {
  utsname system{};
  ::uname(&system);
  const char* backend = cqsa_context_backend(context);
  cqsa_backend_info info = CQSA_BACKEND_INFO_INIT;
  require(cqsa_backend_query(backend, nullptr, &info));
  return {{"record", "machine"},
          {"date", utc_time()},
          {"cpu", cpu_name()},
          {"cores", core_count()},
          {"load", load_average()},
          {"system", fmt::format("{} {} {}", system.sysname, system.release, system.machine)},
          {"cqsa", cqsa_version_string()},
          {"build", nlohmann::ordered_json::parse(cqsa_build_info())},
          {"backend", backend},
          {"device", info.device}};
}

std::string machine_text(const cqsa_context* context) {
  const nlohmann::ordered_json m = machine_json(context);
  const auto text = [&](const char* key) { return m.at(key).get<std::string>(); };
  return fmt::format("date     {}\ncpu      {}, {} cores, load {:.1f}\nsystem   {}\ncqsa     {}\nbuild    {}\nbackend  {}, device {}\n", text("date"),
                     text("cpu"), m.at("cores").get<int>(), m.at("load").get<double>(), text("system"), text("cqsa"), m.at("build").dump(), text("backend"),
                     text("device"));
}

}  // namespace tool
