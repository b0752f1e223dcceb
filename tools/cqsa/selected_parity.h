// SPDX-License-Identifier: Apache-2.0
// cqsa parity --op attention-selected: attention over selected cells at every precision that the backend has, against fp64 on sampled
// queries and against the f32 precision on all of them; timed where it is right.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace tool {

struct selected_options {
  std::vector<int64_t> contexts;  // empty: 1500, 2100, 8192, 32768, 131072
  int64_t queries = 0;            // 0: 2048, and 256 on a backend that computes in host memory
  int64_t samples = 16;
  std::string kv = "f16,int8";
  std::string backend = "auto", report;
  uint64_t seed = 1;
  int32_t threads = 0;
  bool json = false, quiet = false;
};

int run_selected_parity(const selected_options& options);

}  // namespace tool
