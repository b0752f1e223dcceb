// SPDX-License-Identifier: Apache-2.0
// The portable kernels under TSan, which sees each GPU thread as a thread: two accesses to the same memory, one of them a write,
// without a barrier or an operation of all lanes between them, are a race, whatever the values and the schedule. Only kernels are
// instrumented (CMakeLists.txt).
#include "apart.h"
#include "small_checks.h"

using namespace cqsa::simt;

namespace {
int num_reports = 0;
}
// TSan calls it for every report.
extern "C" __attribute__((visibility("default"))) void __tsan_on_report(void*) { ++num_reports; }

namespace {

// Whether a process of its own finds a race, or a mistake, in one of the checks.
bool race_apart(const std::vector<check_function>& checks) {
  return fails_apart([&] {
    bool found = false;
    for (const check_function& check : checks) found = found || !check(32, 1).empty() || num_reports > 0;
    return found;
  });
}

}  // namespace

TEST_CASE("simt races: none in the portable attention, and each barrier left out makes one") {
  workers = 1;
  const std::vector<check_function> checks = small_checks();
  record_sites(true);
  for (const check_function& check : checks)
    for (const int lanes : {32, 64}) CHECK(check(lanes, 1) == "");
  REQUIRE(num_reports == 0);
  const std::vector<call_site> sites = recorded_sites();
  record_sites(false);
  std::string missed;
  int num_barriers = 0, num_missed = 0;
  for (const call_site& site : sites) {
    if (site.what != "barrier") continue;
    ++num_barriers;
    leave_out(&site);
    if (!race_apart(checks)) missed += " " + site.file + ":" + std::to_string(site.line), ++num_missed;
    leave_out(nullptr);
  }
  WARN(num_barriers << " barriers, not needed:" << missed);
  CHECK(num_barriers > 5);
  CHECK(num_missed <= 1);  // as in test_attention_mutants.cpp
}
