// SPDX-License-Identifier: Apache-2.0
// cqsa bench fp8: quantizations beside copies that move as many bytes, and products; each kind is checked by a problem of `cqsa parity` first.
#pragma once
#include <string>

namespace tool {

struct fp8_bench_options {
  std::string rows = "4096", columns = "4096", dtype = "bf16", sizes = "1024", threads = "0", backend = "auto";
  int runs = 9;
  bool json_lines = false;
};

int run_fp8_bench(const fp8_bench_options& options);

}  // namespace tool
