// SPDX-License-Identifier: Apache-2.0
// Host part of the dense attention on Volta: which problems its kernels take, and their launches.
#include <cstdio>

#include "attention_params.h"
#include "backends/cuda/tuned.h"
#include "backends/gpu/attention_fill.h"
#include "sm70_leaf.h"

namespace cqsa::gpu {

const char* why_no_sm70(int32_t tier, int32_t precision, cqsa_dtype q, cqsa_dtype k, cqsa_dtype v, int64_t head_dim, int64_t head_dim_v) {
  if (tier != 70) return "the device has no sm_70 code";
  if (precision == CQSA_PRECISION_F32) return "sm_70's matrix unit takes f16 operands, f32 products are computed by gpu_portable";
  if (q == CQSA_DTYPE_BF16) return "bf16 does not fit f16, it is computed in f32 by gpu_portable";
  if (q != CQSA_DTYPE_F16 && q != CQSA_DTYPE_F32) return "q must be f16 or f32";
  if (q == CQSA_DTYPE_F32 && precision == CQSA_PRECISION_DEFAULT) return "f32 is computed in f32 unless precision is FAST or SPLIT";
  const bool known = (k == CQSA_DTYPE_F16 || k == CQSA_DTYPE_I8) && (v == CQSA_DTYPE_F16 || v == CQSA_DTYPE_I8);
  if (!known) return "k and v must be f16 or int8";
  return head_dim > 256 || head_dim_v > 256 ? "head_dim and head_dim_v are at most 256" : nullptr;
}

namespace {

const char* why_not(const cqsa_attention_leaf& leaf) {
  if (const char* text = why_no_gpu(leaf)) return text;
  const cqsa_dtype k = leaf.k.dtype, v = leaf.v.dtype;
  const char* text = why_no_sm70(leaf.chip.tier, leaf.precision, leaf.q.dtype, k, v, leaf.head_dim, leaf.head_dim_v);
  if (text) return text;
  const bool grouped = leaf.scale_k == CQSA_SCALE_GROUP || leaf.scale_v == CQSA_SCALE_GROUP;
  if (grouped && leaf.kv_group % 32) return "kv_group is a multiple of 32";
  const bool plain_k = k == CQSA_DTYPE_I8 || leaf.scale_k == CQSA_SCALE_NONE, plain_v = v == CQSA_DTYPE_I8 || leaf.scale_v == CQSA_SCALE_NONE;
  return plain_k && plain_v ? nullptr : "f16 keys and values have no scales";
}

cqsa_status probe(const cqsa_attention_leaf* leaf, char* reason, uint64_t size) {
  const char* text = why_not(*leaf);
  if (text && reason && size) std::snprintf(reason, size, "%s", text);
  return text ? CQSA_ERROR_UNSUPPORTED : CQSA_OK;
}

struct variant {
  kernel_id kernel;
  int32_t rows, keys, threads, shared_bytes, blocks_per_unit;
};
template <class Shape> constexpr variant variant_of(kernel_id kernel) {
  return {kernel, Shape::rows, Shape::keys, Shape::threads, Shape::shared_bytes, Shape::threads > 128 ? 1 : 2};
}

template <bool Split> variant choose_dim(int64_t dim, kernel_id d64, kernel_id d128, kernel_id d256) {
  if (dim <= 64) return variant_of<sm70_dense<64, Split>>(d64);
  if (dim <= 128) return variant_of<sm70_dense<128, Split>>(d128);
  return variant_of<sm70_dense<256, Split>>(d256);
}

variant choose(const cqsa_attention_leaf& leaf) {
  using id = kernel_id;
  const int64_t dim = larger(leaf.head_dim, leaf.head_dim_v);
  if (leaf.precision == CQSA_PRECISION_SPLIT)
    return choose_dim<true>(dim, id::cqsa_sm70_attention_d64_split, id::cqsa_sm70_attention_d128_split, id::cqsa_sm70_attention_d256_split);
  return choose_dim<false>(dim, id::cqsa_sm70_attention_d64_fast, id::cqsa_sm70_attention_d128_fast, id::cqsa_sm70_attention_d256_fast);
}

// The tile is a property of the kernel: nothing to choose from.
int32_t tiles(const cqsa_attention_leaf* leaf, cqsa_leaf_tile* out, int32_t capacity) {
  const variant v = choose(*leaf);
  if (capacity > 0) *out = {v.rows, v.keys, 1.0, double(v.blocks_per_unit)};
  return capacity > 0;
}

uint64_t workspace(const cqsa_attention_leaf* leaf, int64_t) { return list_bytes(*leaf); }

// A kernel reads and writes more at once than the portable ones.
void fill_views(const cqsa_attention_leaf& a, attention_params* p) {
  const int64_t items = a.page_table ? a.num_pages : a.batch, any = 2;
  p->k = view_of(a.k, items, a.num_kv_heads, any, a.head_dim, 8);
  p->v = view_of(a.v, items, a.num_kv_heads, any, a.head_dim_v, 8);
  p->out = view_of(a.out, a.batch, a.num_heads, any, a.head_dim_v, 2);
}

cqsa_status launch_leaf(void* device, const cqsa_attention_leaf* leaf, void* memory, uint64_t bytes, const cqsa_exec*, void* stream) {
  static_assert(sizeof(sm70_params) <= most_params_bytes);
  const cqsa_attention_leaf& a = *leaf;
  if (a.batch < 1 || a.num_heads < 1 || a.num_kv_heads < 1) return CQSA_OK;
  const variant v = choose(a);
  sm70_params p{};
  int64_t units = 0;
  fill_params(a, &p.a);
  fill_views(a, &p.a);
  const cqsa_status status = fill_tiles(device, a, {v.rows}, memory, bytes, stream, &p.a, &units);
  if (status != CQSA_OK) return status;
  return launch_tiles(device, a, {v.kernel, v.threads, v.shared_bytes}, &p, sizeof p, &p.a, units, stream);
}

}  // namespace

extern const cqsa_attention_impl sm70_attention_impl = {
    "cuda_sm70", "Volta, f16 q (or f32 where FAST or SPLIT is asked), f16 or int8 k and v, head_dim to 256", probe, tiles, workspace, launch_leaf, nullptr};

}  // namespace cqsa::gpu
