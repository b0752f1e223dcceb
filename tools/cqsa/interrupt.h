// SPDX-License-Identifier: Apache-2.0
// Ctrl-C and friends: a flag that the library polls; and the one signal that a mapped file can raise.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

namespace tool {

struct interrupted_error : std::runtime_error {
  explicit interrupted_error(const std::string& state = "")
      : std::runtime_error(state.empty() ? "interrupted; no output was written"
                                         : "interrupted; the same command with --resume " + state + " goes on from here") {}
};

// From here on SIGINT, SIGTERM and SIGHUP set the flag instead of ending the process, and SIGBUS (a mapped file shrank while
// it was in use) ends it with one line and without a temporary file left.
void catch_signals();

const int32_t* interrupt_flag();  // for cqsa_attention_args.cancel
bool interrupted();

void remove_on_crash(const std::string& path);  // at most four; more are not remembered
void forget_crash_files();

}  // namespace tool
