// SPDX-License-Identifier: Apache-2.0
// Host part of the sm_75 attention: what it takes, which kernel, and its launches.
#include "attention_shape.h"
#include "backends/cuda/tuned.h"
#include "backends/gpu/attention_fill.h"

#include <cstdio>

namespace cqsa::gpu {
namespace {

using sm75::tile_shape;

constexpr int64_t most_keys = int64_t(1) << 30;  // kernels count keys and queries of a range in 32 bits

bool is_code(cqsa_dtype t) { return t == CQSA_DTYPE_I8 || t == CQSA_DTYPE_E4M3FN || t == CQSA_DTYPE_E5M2; }

struct variant {
  kernel_id kernel;
  int32_t rows, keys, threads, shared_bytes, blocks;
};
template <int D, bool General> constexpr variant variant_of(kernel_id kernel) {
  using shape = tile_shape<D, D, General>;
  return {kernel, shape::rows, shape::keys, shape::threads, shape::shared_bytes, shape::blocks};
}

variant choose(const cqsa_attention_leaf& a, bool plain) {
  using id = kernel_id;
  const int64_t d = larger(a.head_dim, a.head_dim_v);
  if (d <= 64)
    return plain ? variant_of<64, false>(id::cqsa_sm75_attention_f16_d64_plain)
                 : variant_of<64, true>(id::cqsa_sm75_attention_f16_d64_general);
  if (d <= 128)
    return plain ? variant_of<128, false>(id::cqsa_sm75_attention_f16_d128_plain)
                 : variant_of<128, true>(id::cqsa_sm75_attention_f16_d128_general);
  return variant_of<256, false>(id::cqsa_sm75_attention_f16_d256_plain);
}

const char* why_not_types(const cqsa_attention_leaf& a) {
  if (a.q.dtype != CQSA_DTYPE_F16) return "q must be f16: the matrix units of sm_75 have no bf16";
  if ((a.k.dtype != CQSA_DTYPE_F16 && !is_code(a.k.dtype)) || (a.v.dtype != CQSA_DTYPE_F16 && !is_code(a.v.dtype)))
    return "k and v must be f16, int8, e4m3fn or e5m2";
  if ((a.scale_k != CQSA_SCALE_NONE && !is_code(a.k.dtype)) || (a.scale_v != CQSA_SCALE_NONE && !is_code(a.v.dtype)))
    return "only 8-bit k and v have scales here";
  if ((a.scale_k == CQSA_SCALE_GROUP || a.scale_v == CQSA_SCALE_GROUP) && a.kv_group % 32 != 0) return "kv_group is a multiple of 32";
  if (a.precision != CQSA_PRECISION_DEFAULT && a.precision != CQSA_PRECISION_FAST) return "p is rounded to 16 bits here";
  return nullptr;
}

// Whether sizes and types are those of the plain kernels; addresses and strides decide at launch.
bool may_be_plain(const cqsa_attention_leaf& a) {
  if (a.batch_invariant) return false;  // the other kernels take every stride, so that bits do not depend on which it is
  if (a.mask.data || a.bias.data || a.slopes.data || a.softcap > 0 || !(a.softmax_scale >= 1e-30 && a.softmax_scale <= 1e30) || a.page_table) return false;
  return a.k.dtype == a.q.dtype && a.v.dtype == a.q.dtype;
}

const char* why_not(const cqsa_attention_leaf& a) {
  if (a.chip.tier != 75) return "the device is not sm_75, or this build has no code for it";
  if (const char* text = why_no_gpu(a)) return text;
  if (a.head_dim > 256 || a.head_dim_v > 256) return "head_dim and head_dim_v are at most 256";
  if (const char* text = why_not_types(a)) return text;
  // The general kernel of 256 channels would need more registers than there are.
  if (larger(a.head_dim, a.head_dim_v) > 128 && !may_be_plain(a))
    return "above 128 channels only plain f16 without pages, masks, bias, ALiBi or softcap";
  return a.seqlen_k > most_keys || a.seqlen_q > most_keys ? "sequences have at most 2^30 tokens" : nullptr;
}

cqsa_status probe(const cqsa_attention_leaf* leaf, char* reason, uint64_t size) {
  const char* text = why_not(*leaf);
  if (text && reason && size) std::snprintf(reason, size, "%s", text);
  return text ? CQSA_ERROR_UNSUPPORTED : CQSA_OK;
}

int32_t tiles(const cqsa_attention_leaf* leaf, cqsa_leaf_tile* out, int32_t capacity) {
  const variant v = choose(*leaf, may_be_plain(*leaf));
  if (capacity > 0) *out = {v.rows, v.keys, 1.0, double(v.blocks)};
  return capacity > 0;
}

uint64_t workspace(const cqsa_attention_leaf* leaf, int64_t) { return list_bytes(*leaf); }

cqsa_status launch_leaf(void* device, const cqsa_attention_leaf* leaf, void* memory, uint64_t bytes, const cqsa_exec* exec, void* stream) {
  const cqsa_attention_leaf& a = *leaf;
  if (a.batch < 1 || a.num_heads < 1 || a.num_kv_heads < 1) return CQSA_OK;
  attention_params p{};
  fill_params(a, &p, 8);  // rows in chunks of eight channels
  const bool plain = may_be_plain(a) && p.q.quads && p.k.quads && p.v.quads;
  if (!plain && larger(a.head_dim, a.head_dim_v) > 128) return portable_attention.launch(device, leaf, memory, bytes, exec, stream);
  const variant v = choose(a, plain);
  int64_t units = 0;
  const cqsa_status status = fill_tiles(device, a, {v.rows}, memory, bytes, stream, &p, &units);
  if (status != CQSA_OK) return status;
  return launch_tiles(device, a, {v.kernel, v.threads, v.shared_bytes}, &p, sizeof p, &p, units, stream);
}

}  // namespace

extern const cqsa_attention_impl sm75_attention = {
    "cuda_sm75", "compute capability 7.5; f16 q, head_dim up to 256", probe, tiles, workspace, launch_leaf, nullptr};

}  // namespace cqsa::gpu
