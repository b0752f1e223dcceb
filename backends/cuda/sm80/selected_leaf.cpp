// SPDX-License-Identifier: Apache-2.0
// Host part of the sm_80 kernels of selected-cell attention.
#include <cstdio>

#include "backends/cuda/sm80/selected_shape.h"
#include "backends/cuda/tuned.h"
#include "backends/gpu/attention_fill.h"
#include "backends/gpu/selected_fill.h"

namespace cqsa::gpu {
namespace {

struct variant {
  kernel_id kernel;
  int32_t shared_bytes;
};
template <int D, bool Codes, bool Split> constexpr variant variant_of(kernel_id kernel) {
  return {kernel, sm80::selected_tile<D, Codes, Split>::shared_bytes};
}

// [head_dim 64, 128, 256][f16, int8][fast, split]
constexpr variant variants[3][2][2] = {
    {{variant_of<64, false, false>(kernel_id::cqsa_sm80_selected_f16_d64_fast),
      variant_of<64, false, true>(kernel_id::cqsa_sm80_selected_f16_d64_split)},
     {variant_of<64, true, false>(kernel_id::cqsa_sm80_selected_i8_d64_fast),
      variant_of<64, true, true>(kernel_id::cqsa_sm80_selected_i8_d64_split)}},
    {{variant_of<128, false, false>(kernel_id::cqsa_sm80_selected_f16_d128_fast),
      variant_of<128, false, true>(kernel_id::cqsa_sm80_selected_f16_d128_split)},
     {variant_of<128, true, false>(kernel_id::cqsa_sm80_selected_i8_d128_fast),
      variant_of<128, true, true>(kernel_id::cqsa_sm80_selected_i8_d128_split)}},
    {{variant_of<256, false, false>(kernel_id::cqsa_sm80_selected_f16_d256_fast),
      variant_of<256, false, true>(kernel_id::cqsa_sm80_selected_f16_d256_split)},
     {variant_of<256, true, false>(kernel_id::cqsa_sm80_selected_i8_d256_fast),
      variant_of<256, true, true>(kernel_id::cqsa_sm80_selected_i8_d256_split)}},
};

bool is_split(const cqsa_selected_leaf& leaf) { return leaf.precision == CQSA_PRECISION_SPLIT; }

const variant& choose(const cqsa_selected_leaf& leaf) {
  const int64_t dim = larger(leaf.head_dim, leaf.head_dim_v);
  return variants[dim <= 64 ? 0 : dim <= 128 ? 1 : 2][leaf.k.dtype == CQSA_DTYPE_I8][is_split(leaf)];
}

// q in bf16 is right here: a row is multiplied by a power of two that brings its largest element near 2^14, and what is 2^28 times
// smaller than that is nothing to an f32 sum.
const char* why_not(const cqsa_selected_leaf& leaf) {
  if (const char* text = why_no_gpu(leaf)) return text;
  if (leaf.chip.tier < 80) return "the device has no sm_80 code";
  if (leaf.k.dtype != CQSA_DTYPE_F16 && leaf.k.dtype != CQSA_DTYPE_I8) return "k and v must be f16 or int8";
  if (leaf.k.dtype == CQSA_DTYPE_I8 && leaf.kv_group != 64 && leaf.kv_group != 128) return "kv_group must be 64 or 128";
  if (leaf.head_dim > 256 || leaf.head_dim_v > 256) return "head_dim must be 1..256";
  if (leaf.precision == CQSA_PRECISION_F32) return "f32 products were asked for";
  if (leaf.precision == CQSA_PRECISION_DEFAULT && leaf.q.dtype == CQSA_DTYPE_F32)
    return "f32 queries are multiplied in f32 unless asked otherwise";
  return choose(leaf).shared_bytes > leaf.chip.shared_bytes ? "the device has too little shared memory" : nullptr;
}

cqsa_status probe(const cqsa_selected_leaf* leaf, char* reason, uint64_t size) {
  const char* text = why_not(*leaf);
  if (text && reason && size) std::snprintf(reason, size, "%s", text);
  return text ? CQSA_ERROR_UNSUPPORTED : CQSA_OK;
}

uint64_t workspace(const cqsa_selected_leaf*, int64_t) { return 0; }

// All 64-channel groups of a row have a scale of their own, and these can be read at once.
int32_t reads_scales(const cqsa_selected_leaf& a, const cqsa_view& scale, int64_t channels, int64_t groups) {
  if (a.kv_group != 64 || groups < 2 || divide_up(channels, 64) != groups) return 0;
  return has_runs(scale, a.num_pages, a.num_kv_heads, a.page_size, groups, groups);
}

cqsa_status launch_leaf(void* device, const cqsa_selected_leaf* leaf, void*, uint64_t, const cqsa_exec*, void* stream) {
  const cqsa_selected_leaf& a = *leaf;
  if (a.total_q < 1 || a.num_heads < 1 || a.num_kv_heads < 1) return CQSA_OK;
  selected_params p{};
  fill_params(a, a.k.dtype == CQSA_DTYPE_I8 ? 16 : 8, &p);
  const int64_t dim = larger(a.head_dim, a.head_dim_v), groups = dim <= 64 ? 1 : dim <= 128 ? 2 : 4;
  p.k_scale.quads = reads_scales(a, a.k_scale, a.head_dim, groups);
  p.v_scale.quads = reads_scales(a, a.v_scale, a.head_dim_v, groups);
  const variant& v = choose(a);
  return launch_units(device, v.kernel, 128, uint32_t(v.shared_bytes), &p, stream);
}

}  // namespace

extern const cqsa_selected_impl sm80_selected = {"cuda_sm80_selected", "sm_80 or newer, k and v in f16 or int8", probe, workspace,
                                                 launch_leaf};

}  // namespace cqsa::gpu
