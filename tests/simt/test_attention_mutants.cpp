// SPDX-License-Identifier: Apache-2.0
// The tests of the portable kernels bite: each deliberate mistake in them (CQSA_MUTANT) and each meeting place of their threads
// that is left out gives a failure in one of a few small problems.
#include "apart.h"
#include "small_checks.h"

using namespace cqsa::simt;

namespace {

bool any_fails(const std::vector<check_function>& checks) {
  return fails_apart([&] { return !first_mistake(checks).empty(); });
}

}  // namespace

TEST_CASE("simt attention: every mutant is noticed") {
  const std::vector<check_function> checks = small_checks();
  REQUIRE(first_mistake(checks) == "");
  for (int mutant = 1; mutant <= 4; ++mutant) {
    INFO("CQSA_MUTANT(" << mutant << ")");
    cqsa_simt_mutant = mutant;
    CHECK(any_fails(checks));
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
    if (!any_fails(checks)) missed += " " + site.what + " at " + site.file + ":" + std::to_string(site.line), ++num_missed;
    leave_out(nullptr);
  }
  WARN(sites.size() << " meeting places, not needed:" << missed);
  // The barrier behind the loop over keys would be needed only if the last tile could be one without keys. The lanes_barrier in
  // softmax_row is for tools: the shuffles before it have every lane meet already.
  CHECK(num_missed <= 2);
}
