// SPDX-License-Identifier: Apache-2.0
#include "simt_port.h"

#include "simt_runtime.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace cqsa::simt {
namespace {
thread_local char error_text[1024];
}
const char* last_error() { return error_text; }
}  // namespace cqsa::simt

namespace cqsa::gpu {
namespace {
constexpr const char* kernel_names[] = {
#define CQSA_GPU_KERNEL_NAME(name, threads, tier) #name,
    CQSA_ALL_KERNELS(CQSA_GPU_KERNEL_NAME)
#undef CQSA_GPU_KERNEL_NAME
};
}  // namespace

cqsa_status fail(cqsa_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(simt::error_text, sizeof simt::error_text, format, arguments);
  va_end(arguments);
  return status;
}

const device_facts& facts_of(void* device) { return static_cast<simt::device*>(device)->facts; }

cqsa_status launch(void* device, kernel_id kernel, const launch_shape& shape, const void* params, size_t params_bytes, void*) {
  auto& d = *static_cast<simt::device*>(device);
  const char* name = kernel_names[int32_t(kernel)];
  if (params_bytes > most_params_bytes) return fail(CQSA_ERROR_INTERNAL, "%s: %zu bytes of parameters", name, params_bytes);
  if (shape.shared_bytes > uint32_t(d.facts.shared_bytes)) return fail(CQSA_ERROR_INTERNAL, "%s: %u bytes of shared memory", name, shape.shared_bytes);
  // What CUDA refuses: an empty grid, and more than 65535 blocks beside the first axis.
  if (!shape.grid[0] || !shape.grid[1] || !shape.grid[2] || shape.grid[0] > 0x7fffffff || shape.grid[1] > 65535 || shape.grid[2] > 65535)
    return fail(CQSA_ERROR_INTERNAL, "%s: a grid of %u x %u x %u", name, shape.grid[0], shape.grid[1], shape.grid[2]);
  simt::run_shape s;
  for (int i = 0; i < 3; ++i) s.grid[i] = shape.grid[i];
  s.threads = int(shape.threads), s.shared_bytes = shape.shared_bytes;
  ++d.launches;
  d.seed = d.seed * 6364136223846793005ull + 1442695040888963407ull;
  const std::string error = simt::run(name, d.facts.lanes, s, params, params_bytes, d.seed >> 16, d.workers);
  return error.empty() ? CQSA_OK : fail(CQSA_ERROR_RUNTIME, "%s: %s", name, error.c_str());
}

cqsa_status upload(void*, void* to, const void* from, uint64_t bytes, void*) {
  if (bytes) std::memcpy(to, from, bytes);
  return CQSA_OK;
}

}  // namespace cqsa::gpu
