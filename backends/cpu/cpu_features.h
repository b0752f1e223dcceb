// SPDX-License-Identifier: Apache-2.0
// What this CPU can do and its operating system lets it do.
#pragma once

namespace cqsa::cpu {

struct features {
  bool avx2, avx512, avx512_bf16, avx512_vnni;
  bool amx;  // the instructions; whether this process may use them is another question
};
const features& this_cpu();

// Asks Linux, once, to let this process use the tile registers: 8 KiB more for each thread that does. Called when AMX is about
// to be chosen, never at load. The permission is the process's: threads of before and after have it, and so do children.
bool may_use_tiles();

}  // namespace cqsa::cpu
