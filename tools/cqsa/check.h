// SPDX-License-Identifier: Apache-2.0
// The check of --check: sampled rows, computed again in the most obvious way, in more precision. Shares no code with the
// library.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "cqsa.h"

namespace tool {

struct check_report {
  int64_t rows = 0;
  // Against the exact rows (fp64; long double for f64 operands). relative_rms = rms(error) / rms(exact).
  double max_abs = 0, relative_rms = 0, cosine = 1;
  // The same for the naive rows: logits, softmax and sums in f32 (as cqsa.h promises for every type), weights and result
  // rounded to the types of q and out.
  double naive_max_abs = 0, naive_relative_rms = 0;
  // 2 x naive, and 2 ulp of the output type at the largest result; relative: and 1 ulp at 1.
  double allowed_max_abs = 0, allowed_relative_rms = 0;
  bool has_lse = false;
  double lse_max_abs = 0, lse_allowed = 0;
  bool pass = false;
};

// params as completed by cqsa_attention_params_of(); args with operands and results in host memory, strides not NULL.
// rows: how many, spread over batch, heads and sequence. now_and_then is called every some hundred keys, from any thread.
// Throws interrupted_error.
check_report check_rows(const cqsa_attention_params& params, const cqsa_attention_args& args, int64_t rows, uint64_t seed,
                        int threads, const std::function<void()>& now_and_then);

// The exact and the naive rows, computed once, for several results of the same operands.
class row_reference {
 public:
  // As for check_rows(); rows 0: all of them. params and the operands in args must outlive it.
  row_reference(const cqsa_attention_params& params, const cqsa_attention_args& args, int64_t rows, uint64_t seed, int threads);
  ~row_reference();
  row_reference(const row_reference&) = delete;
  row_reference& operator=(const row_reference&) = delete;

  // Of the results now in the memory of args. tolerance: factor on all that is allowed.
  check_report compare(double tolerance = 1) const;

 private:
  struct contents;
  std::unique_ptr<contents> contents_;
};

// Which rows of k and v, in the order of k's axes but the last, any query may see.
std::vector<bool> seen_keys(const cqsa_attention_params& params, const cqsa_attention_args& args);

// Pairs of query and key that segments, causality and window leave; masks and absent pages count as there.
double visible_pairs(const cqsa_attention_params& params, const cqsa_attention_args& args);

}  // namespace tool
