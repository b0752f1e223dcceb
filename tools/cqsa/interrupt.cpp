// SPDX-License-Identifier: Apache-2.0
#include "interrupt.h"

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include <unistd.h>

namespace tool {
namespace {

int32_t flag = 0;

// Plain memory, because a signal handler may not allocate.
constexpr std::size_t kPathSize = 4096;
char crash_files[4][kPathSize];
std::atomic<int> crash_count{0};

void remove_crash_files() {
  const int count = crash_count.load();
  for (int i = 0; i < count; ++i) ::unlink(crash_files[i]);
}

void on_stop(int) {
  // A second signal does not wait for the next tile.
  if (__atomic_exchange_n(&flag, 1, __ATOMIC_RELAXED) == 0) return;
  remove_crash_files();
  ::_exit(130);
}

void on_bus_error(int) {
  constexpr char line[] = "cqsa: a mapped file became shorter, or its disk failed, while it was in use\n";
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line, sizeof line - 1);
  remove_crash_files();
  ::_exit(1);
}

void handle(int signal, void (*handler)(int)) {
  struct sigaction action = {};
  // A signal that the parent had ignored (nohup) stays ignored.
  if (::sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN) return;
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  ::sigaction(signal, &action, nullptr);
}

}  // namespace

void catch_signals() {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) handle(signal, on_stop);
  handle(SIGBUS, on_bus_error);
  // A file that may not grow further is then an error that names the file.
  ::signal(SIGXFSZ, SIG_IGN);
}

const int32_t* interrupt_flag() { return &flag; }
bool interrupted() { return __atomic_load_n(&flag, __ATOMIC_RELAXED) != 0; }

void remove_on_crash(const std::string& path) {
  const int slot = crash_count.load();
  if (slot >= 4 || path.size() >= kPathSize) return;
  std::memcpy(crash_files[slot], path.c_str(), path.size() + 1);
  crash_count.store(slot + 1);
}

void forget_crash_files() { crash_count.store(0); }

}  // namespace tool
