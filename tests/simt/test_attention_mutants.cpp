// SPDX-License-Identifier: Apache-2.0
// The tests of the portable kernels bite: each deliberate mistake in them (CQSA_MUTANT) and each meeting place of their threads
// that is left out gives a failure in one of a few small problems.
#include "small_checks.h"

#include <csignal>
#include <cstdio>

#include <sys/wait.h>
#include <unistd.h>

using namespace cqsa::simt;

namespace {

// The same in a process of its own, which a mutant may crash.
bool fails_apart(const std::vector<check_function>& checks) {
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    std::freopen("/dev/null", "w", stderr);
    std::signal(SIGSEGV, SIG_DFL), std::signal(SIGABRT, SIG_DFL), std::signal(SIGFPE, SIG_DFL);  // not Catch's report
    _exit(first_mistake(checks).empty() ? 0 : 1);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace

TEST_CASE("simt attention: every mutant is noticed") {
  const std::vector<check_function> checks = small_checks();
  REQUIRE(first_mistake(checks) == "");
  for (int mutant = 1; mutant <= 4; ++mutant) {
    INFO("CQSA_MUTANT(" << mutant << ")");
    cqsa_simt_mutant = mutant;
    CHECK(fails_apart(checks));
    cqsa_simt_mutant = 0;
  }
}

TEST_CASE("simt attention: every meeting place is needed") {
  const std::vector<check_function> checks = small_checks();
  record_sites(true);
  REQUIRE(first_mistake(checks) == "");
  const std::vector<call_site> sites = recorded_sites();
  record_sites(false);
  CHECK(sites.size() > 5);
  std::string missed;
  int num_missed = 0;
  for (const call_site& site : sites) {
    leave_out(&site);
    if (!fails_apart(checks)) missed += " " + site.what + " at " + site.file + ":" + std::to_string(site.line), ++num_missed;
    leave_out(nullptr);
  }
  WARN(sites.size() << " meeting places, not needed:" << missed);
  // The barrier behind the loop over keys would be needed only if the last tile could be one without keys. The lanes_barrier in
  // softmax_row is for tools: the shuffles before it have every lane meet already.
  CHECK(num_missed <= 2);
}
