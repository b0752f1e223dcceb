// SPDX-License-Identifier: Apache-2.0
// Finds backends by name: the CPU one linked in, others as plugins loaded once and, when ready, never unloaded.
#pragma once
#include <string>

#include "backends/cqsa_backend.h"

namespace cqsa {

struct backend_lookup {
  const cqsa_backend_v1* backend = nullptr;  // set when the backend is ready
  int32_t state = CQSA_BACKEND_NOT_FOUND;    // CQSA_BACKEND_*
  std::string reason;
};

// Thread-safe. `path` may be nullptr. Results are cached per (name, path).
backend_lookup find_backend(const char* name, const char* path);

cqsa_status status_of_state(int32_t backend_state);

extern const char* const backend_names[];  // "cpu", "cuda", "hip", nullptr

const char* build_id();

}  // namespace cqsa
