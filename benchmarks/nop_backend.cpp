// SPDX-License-Identifier: Apache-2.0
// libcqsa_nop.so: another backend whose attention does nothing, so that a run of it is its transfers alone. CQSA_NOP_OF names the
// backend ("cuda"), whose plugin lies beside this one.
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "backends/cqsa_backend.h"

namespace {

constexpr int most_impls = 16;
cqsa_backend_v1 backend;
cqsa_attention_impl impls[most_impls];

cqsa_status launch_nothing(void*, const cqsa_attention_leaf*, void*, uint64_t, const cqsa_exec*, void*) { return CQSA_OK; }

std::string beside(const char* name) {
  Dl_info self{};
  dladdr(reinterpret_cast<const void*>(&launch_nothing), &self);
  const std::string path = self.dli_fname ? self.dli_fname : "";
  return path.substr(0, path.find_last_of('/') + 1) + "libcqsa_" + name + ".so";
}

}  // namespace

extern "C" __attribute__((visibility("default"))) cqsa_status cqsa_backend_entry_v1(const cqsa_host_v1* host, const cqsa_backend_v1** out) {
  const char* const of = std::getenv("CQSA_NOP_OF");
  void* const library = dlopen(beside(of ? of : "cuda").c_str(), RTLD_NOW | RTLD_LOCAL);
  const auto entry = library ? reinterpret_cast<cqsa_backend_entry_fn>(dlsym(library, CQSA_BACKEND_ENTRY)) : nullptr;
  const cqsa_backend_v1* real = nullptr;
  if (!entry) return CQSA_ERROR_BACKEND_LOAD_FAILED;
  if (const cqsa_status status = entry(host, &real); status != CQSA_OK) return status;
  backend = *real;
  backend.name = "nop";
  backend.num_attention = std::min<int32_t>(real->num_attention, most_impls);
  std::copy_n(real->attention, backend.num_attention, impls);
  for (cqsa_attention_impl& impl : impls) impl.launch = launch_nothing;
  backend.attention = impls;
  *out = &backend;
  return CQSA_OK;
}
