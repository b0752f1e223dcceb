// SPDX-License-Identifier: Apache-2.0
// Sampled queries of attention over selected cells, computed again in the most obvious way: in f64, and as the plainest code for f32
// and for 16-bit products would. Shares no code with the library.
#pragma once
#include <cstdint>
#include <vector>

#include "selected_data.h"

namespace tool {

struct selected_rows {
  std::vector<double> out, lse;  // [sample][head][channel], [sample][head]
};

struct selected_reference {
  std::vector<int64_t> queries;  // the sampled ones
  selected_rows exact;
  selected_rows naive_f32;   // logits, softmax and sums in f32
  selected_rows naive_fast;  // .. with q and the probabilities rounded to f16

  selected_reference(const selected_data& data, int64_t samples, int threads);
};

}  // namespace tool
