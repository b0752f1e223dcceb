// SPDX-License-Identifier: Apache-2.0
// Host part of the sm_80 attention: what it takes, which kernel, and its launches.
#include "backends/cuda/tuned.h"
#include "backends/gpu/attention_fill.h"
#include "attention_shape.h"

#include <cstdio>

namespace cqsa::gpu {
namespace {

using sm80::tile_shape;

constexpr int64_t most_keys = int64_t(1) << 30;  // kernels count keys and queries of a range in 32 bits

bool is_half(cqsa_dtype t) { return t == CQSA_DTYPE_F16 || t == CQSA_DTYPE_BF16; }
bool is_code(cqsa_dtype t) { return t == CQSA_DTYPE_I8 || t == CQSA_DTYPE_E4M3FN || t == CQSA_DTYPE_E5M2; }

// ------------------------------------------------------------------------------------------------------- instantiations

struct variant {
  kernel_id plain[2], general[2];  // f16, bf16
  int32_t plain_bytes, general_bytes;
  int32_t plain_rows, plain_keys, plain_threads, plain_blocks;
  int32_t general_rows, general_keys, general_threads, general_blocks;
  int64_t d, dv;
};

template <int D, int Dv> constexpr variant variant_of(kernel_id f16, kernel_id bf16, kernel_id f16_general, kernel_id bf16_general) {
  using a = tile_shape<D, Dv, false>;
  using b = tile_shape<D, Dv, true>;
  return {{f16, bf16}, {f16_general, bf16_general}, a::shared_bytes, b::shared_bytes, a::rows,   a::keys, a::threads,
          a::blocks,   b::rows,                     b::keys,         b::threads,      b::blocks, D,       Dv};
}

#define CQSA_SM80_VARIANT(d, dv)                                                                            \
  variant_of<d, dv>(kernel_id::cqsa_sm80_attention_f16_d##d##_plain, kernel_id::cqsa_sm80_attention_bf16_d##d##_plain, \
                    kernel_id::cqsa_sm80_attention_f16_d##d##_general, kernel_id::cqsa_sm80_attention_bf16_d##d##_general)
constexpr variant variants[] = {CQSA_SM80_VARIANT(64, 64), CQSA_SM80_VARIANT(96, 96), CQSA_SM80_VARIANT(128, 128), CQSA_SM80_VARIANT(192, 128),
                                CQSA_SM80_VARIANT(256, 256)};
#undef CQSA_SM80_VARIANT

// The smallest one that holds the sizes; the last one holds all that probe accepts.
const variant& choose(const cqsa_attention_leaf& leaf) {
  for (const variant& v : variants)
    if (leaf.head_dim <= v.d && leaf.head_dim_v <= v.dv) return v;
  return variants[4];
}

// ------------------------------------------------------------------------------------------------------------- accepting

const char* why_not_types(const cqsa_attention_leaf& a) {
  if (!is_half(a.q.dtype)) return "q must be f16 or bf16";
  if ((a.k.dtype != a.q.dtype && !is_code(a.k.dtype)) || (a.v.dtype != a.q.dtype && !is_code(a.v.dtype)))
    return "k and v must have q's type, int8, e4m3fn or e5m2";
  if ((a.scale_k != CQSA_SCALE_NONE && is_half(a.k.dtype)) || (a.scale_v != CQSA_SCALE_NONE && is_half(a.v.dtype)))
    return "only 8-bit k and v have scales here";
  const bool grouped = a.scale_k == CQSA_SCALE_GROUP || a.scale_v == CQSA_SCALE_GROUP;
  if (grouped && a.kv_group % 16 != 0) return "kv_group is a multiple of 16";
  if (a.precision != CQSA_PRECISION_DEFAULT && a.precision != CQSA_PRECISION_FAST) return "p is rounded to 16 bits here";
  return nullptr;
}

const char* why_not(const cqsa_attention_leaf& a) {
  if (a.chip.tier < 80) return "the device has no sm_80 code";
  if (const char* text = why_no_gpu(a)) return text;
  if (a.head_dim > 256 || a.head_dim_v > 256) return "head_dim and head_dim_v are at most 256";
  if (const char* text = why_not_types(a)) return text;
  if (a.seqlen_k > most_keys || a.seqlen_q > most_keys) return "sequences have at most 2^30 tokens";
  if (a.chip.shared_bytes > 0 && a.chip.shared_bytes < choose(a).general_bytes) return "the device has too little shared memory";
  return nullptr;
}

cqsa_status probe(const cqsa_attention_leaf* leaf, char* reason, uint64_t size) {
  const char* text = why_not(*leaf);
  if (text && reason && size) std::snprintf(reason, size, "%s", text);
  return text ? CQSA_ERROR_UNSUPPORTED : CQSA_OK;
}

// Whether sizes and types are those of the plain kernels; addresses and strides decide at launch.
bool may_be_plain(const cqsa_attention_leaf& a) {
  if (a.batch_invariant) return false;  // the other kernels take every stride, so that bits do not depend on which it is
  if (a.mask.data || a.bias.data || a.slopes.data || a.softcap > 0 || !(a.softmax_scale >= 1e-30 && a.softmax_scale <= 1e30) || a.page_table) return false;
  return a.k.dtype == a.q.dtype && a.v.dtype == a.q.dtype && (a.chip.shared_bytes == 0 || a.chip.shared_bytes >= choose(a).plain_bytes);
}

// Of those that registers allow, the blocks on a multiprocessor for which it has the memory: a block costs 1 KiB beside its own, and
// one may have all but that.
double blocks_within(const cqsa_attention_leaf& a, int32_t most, int32_t bytes) {
  if (a.chip.shared_bytes <= 0) return most;
  return double(smaller(most, larger((a.chip.shared_bytes + 1024) / (bytes + 1024), 1)));
}

int32_t tiles(const cqsa_attention_leaf* leaf, cqsa_leaf_tile* out, int32_t capacity) {
  const variant& v = choose(*leaf);
  if (capacity < 1) return 0;
  if (may_be_plain(*leaf)) *out = {v.plain_rows, v.plain_keys, 1.0, blocks_within(*leaf, v.plain_blocks, v.plain_bytes)};
  else *out = {v.general_rows, v.general_keys, 1.0, blocks_within(*leaf, v.general_blocks, v.general_bytes)};
  return 1;
}

uint64_t workspace(const cqsa_attention_leaf* leaf, int64_t) { return list_bytes(*leaf); }

// --------------------------------------------------------------------------------------------------------------- launch

// Fewer rows a block where there would be less than one for each multiprocessor otherwise.
bool wants_small_tiles(void* device, const cqsa_attention_leaf& a, const variant& v) {
  const int64_t rows = a.num_heads * larger(a.seqlen_q, 1) * a.batch;
  return v.general_rows < v.plain_rows && divide_up(rows, v.plain_rows) < facts_of(device).compute_units;
}

cqsa_status launch_leaf(void* device, const cqsa_attention_leaf* leaf, void* memory, uint64_t bytes, const cqsa_exec*, void* stream) {
  const cqsa_attention_leaf& a = *leaf;
  if (a.batch < 1 || a.num_heads < 1 || a.num_kv_heads < 1) return CQSA_OK;
  attention_params p{};
  fill_params(a, &p, 8);  // rows in chunks of eight channels
  const variant& v = choose(a);
  const bool plain = may_be_plain(a) && p.q.quads && p.k.quads && p.v.quads && facts_of(device).shared_bytes >= v.plain_bytes &&
                     !wants_small_tiles(device, a, v);
  const bool bf16 = a.q.dtype == CQSA_DTYPE_BF16;
  const tile_kernel kernel = plain ? tile_kernel{v.plain[bf16], v.plain_threads, v.plain_bytes} : tile_kernel{v.general[bf16], v.general_threads, v.general_bytes};
  int64_t units = 0;
  const cqsa_status status = fill_tiles(device, a, {plain ? v.plain_rows : v.general_rows}, memory, bytes, stream, &p, &units);
  if (status != CQSA_OK) return status;
  return launch_tiles(device, a, kernel, &p, sizeof p, &p, units, stream);
}

}  // namespace

extern const cqsa_attention_impl sm80_attention = {
    "cuda_sm80", "compute capability 8.0 or newer; f16 or bf16 q, head_dim up to 256", probe, tiles, workspace, launch_leaf, nullptr};

}  // namespace cqsa::gpu
