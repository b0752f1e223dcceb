// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cqsa_backend.h"

namespace cqsa::cuda {

// The ordered list of this backend: the first whose probe accepts is taken, the portable one is last.
struct attention_list {
  const cqsa_attention_impl* first;
  int32_t count;
};
attention_list attention_impls();

}  // namespace cqsa::cuda
