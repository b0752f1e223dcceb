// SPDX-License-Identifier: Apache-2.0
// cqsa parity --op fp8-quantize and --op fp8-gemm: lines of problems, each run and compared with the model of fp8_model.h bit for bit (quantize),
// or with sums in fp64 of the decoded operands (gemm).
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cqsa.h"
#include "device_memory.h"
#include "fp8_problem.h"

namespace tool {

struct fp8_parity_options {
  std::string op, set = "smoke", backend = "auto", report;
  std::vector<std::string> lines;  // instead of a set
  uint64_t seed = 1;
  int32_t threads = 0;
  bool list = false, json = false, quiet = false;
};

int run_fp8_parity(const fp8_parity_options& options);

// What became of a problem.
struct fp8_verdict {
  std::string failure;  // "": it is right
  double error = 0;     // gemm: relative RMS
  std::string implementation;
};
fp8_verdict check_fp8_quantize(cqsa_context* context, device_memory* device, const fp8_line& line);
fp8_verdict check_fp8_gemm(cqsa_context* context, device_memory* device, const fp8_line& line, int threads);

}  // namespace tool
