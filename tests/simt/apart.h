// SPDX-License-Identifier: Apache-2.0
// A check in a process of its own, which a kernel with a mistake in it may crash.
#pragma once

#include <csignal>
#include <cstdio>
#include <stdexcept>

#include <sys/wait.h>
#include <unistd.h>

namespace cqsa::simt {

// Whether fails() is true there, or the process ends in any other way than by saying no.
template <class F> bool fails_apart(const F& fails) {
  const pid_t child = fork();
  if (child < 0) throw std::runtime_error("fork");
  if (child == 0) {
    if (!std::freopen("/dev/null", "w", stderr)) _exit(2);
    std::signal(SIGSEGV, SIG_DFL), std::signal(SIGABRT, SIG_DFL), std::signal(SIGFPE, SIG_DFL);  // not Catch's report
    _exit(fails() ? 1 : 0);
  }
  int status = 0;
  if (waitpid(child, &status, 0) != child) throw std::runtime_error("waitpid");
  return !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace cqsa::simt
