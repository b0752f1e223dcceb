// SPDX-License-Identifier: Apache-2.0
// Host part of the portable attention: which instantiation, and its launches. No vendor's name here; the plugin supplies launch()
// and upload() (port.h).
#include "attention_fill.h"

#include <cstdio>

namespace cqsa::gpu {
namespace {

cqsa_status probe(const cqsa_attention_leaf* leaf, char* reason, uint64_t size) {
  const char* text = why_no_gpu(*leaf);
  if (text && reason && size) std::snprintf(reason, size, "%s", text);
  return text ? CQSA_ERROR_UNSUPPORTED : CQSA_OK;
}

// ------------------------------------------------------------------------------------------------------- instantiations

struct variant {
  kernel_id kernel;
  int32_t rows, keys, shared_bytes;
};
template <int Dv> constexpr variant variant_of(kernel_id kernel) {
  using shape = attention_shape<Dv>;
  return {kernel, shape::rows, shape::keys, shape::shared_bytes};
}

variant choose(const cqsa_attention_leaf& leaf) {
  if (leaf.head_dim_v <= 64) return variant_of<64>(kernel_id::cqsa_attention_d64);
  if (leaf.head_dim_v <= 128) return variant_of<128>(kernel_id::cqsa_attention_d128);
  if (leaf.head_dim_v <= 256) return variant_of<256>(kernel_id::cqsa_attention_d256);
  return variant_of<512>(kernel_id::cqsa_attention_d512);
}

// The tile is a property of the kernel: nothing to choose from.
int32_t tiles(const cqsa_attention_leaf* leaf, cqsa_leaf_tile* out, int32_t capacity) {
  const variant v = choose(*leaf);
  if (capacity > 0) *out = {v.rows, v.keys, 1.0, 2.0};
  return capacity > 0;
}

uint64_t workspace(const cqsa_attention_leaf* leaf, int64_t) { return list_bytes(*leaf); }

cqsa_status launch_leaf(void* device, const cqsa_attention_leaf* leaf, void* memory, uint64_t bytes, const cqsa_exec*, void* stream) {
  static_assert(sizeof(attention_params) <= most_params_bytes);
  const cqsa_attention_leaf& a = *leaf;
  if (a.batch < 1 || a.num_heads < 1 || a.num_kv_heads < 1) return CQSA_OK;
  const variant v = choose(a);
  attention_params p{};
  int64_t units = 0;
  fill_params(a, &p);
  const cqsa_status status = fill_tiles(device, a, {v.rows}, memory, bytes, stream, &p, &units);
  if (status != CQSA_OK) return status;
  return launch_tiles(device, a, {v.kernel, 256, v.shared_bytes}, &p, sizeof p, &p, units, stream);
}

}  // namespace

extern const cqsa_attention_impl portable_attention = {"gpu_portable", "any GPU", probe, tiles, workspace, launch_leaf, nullptr};

}  // namespace cqsa::gpu
