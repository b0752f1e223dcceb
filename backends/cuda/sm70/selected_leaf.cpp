// SPDX-License-Identifier: Apache-2.0
// Host part of the attention over selected cells on Volta. The kernels are those of the dense attention; a query is a problem of its
// own, its heads are the rows.
#include <cstdio>

#include "attention_params.h"
#include "backends/cuda/tuned.h"
#include "backends/gpu/attention_fill.h"
#include "backends/gpu/selected_fill.h"
#include "sm70_leaf.h"

namespace cqsa::gpu {
namespace {

constexpr int64_t most_ids = int64_t(1) << 31;    // ids are int32: whatever is larger than all of them is as good as this
constexpr int64_t no_limit = int64_t(1) << 60;

const char* why_not(const cqsa_selected_leaf& leaf) {
  if (const char* text = why_no_gpu(leaf)) return text;
  const cqsa_dtype k = leaf.k.dtype, v = leaf.v.dtype;
  const char* text = why_no_sm70(leaf.chip.tier, leaf.precision, leaf.q.dtype, k, v, leaf.head_dim, leaf.head_dim_v);
  if (text) return text;
  return leaf.k.dtype == CQSA_DTYPE_I8 && leaf.kv_group % 32 ? "kv_group is a multiple of 32" : nullptr;
}

cqsa_status probe(const cqsa_selected_leaf* leaf, char* reason, uint64_t size) {
  const char* text = why_not(*leaf);
  if (text && reason && size) std::snprintf(reason, size, "%s", text);
  return text ? CQSA_ERROR_UNSUPPORTED : CQSA_OK;
}

struct variant {
  kernel_id kernel;
  int32_t rows, threads, shared_bytes;
};
template <class Shape> constexpr variant variant_of(kernel_id kernel) { return {kernel, Shape::rows, Shape::threads, Shape::shared_bytes}; }

template <bool Split> variant choose_dim(int64_t dim, kernel_id d64, kernel_id d128, kernel_id d256) {
  if (dim <= 64) return variant_of<sm70_selected<64, Split>>(d64);
  if (dim <= 128) return variant_of<sm70_selected<128, Split>>(d128);
  return variant_of<sm70_selected<256, Split>>(d256);
}

variant choose(const cqsa_selected_leaf& leaf) {
  using id = kernel_id;
  const int64_t dim = larger(leaf.head_dim, leaf.head_dim_v);
  if (leaf.precision == CQSA_PRECISION_SPLIT)
    return choose_dim<true>(dim, id::cqsa_sm70_selected_d64_split, id::cqsa_sm70_selected_d128_split, id::cqsa_sm70_selected_d256_split);
  return choose_dim<false>(dim, id::cqsa_sm70_selected_d64_fast, id::cqsa_sm70_selected_d128_fast, id::cqsa_sm70_selected_d256_fast);
}

void fill_operands(const cqsa_selected_leaf& a, sm70_params* params) {
  attention_params* p = &params->a;
  const int64_t any = 2;
  p->q = plain_view(a.q);
  p->k = view_of(a.k, a.num_pages, a.num_kv_heads, any, a.head_dim, 8);
  p->v = view_of(a.v, a.num_pages, a.num_kv_heads, any, a.head_dim_v, 8);
  p->k_scale = plain_view(a.k_scale);
  p->v_scale = plain_view(a.v_scale);
  p->out = view_of(a.out, 1, a.num_heads, any, a.head_dim_v, 2);
  p->lse = plain_view(a.lse);
  p->page_table = reinterpret_cast<const char*>(a.page_table);
  params->cells = reinterpret_cast<const char*>(a.cells);
  params->counts = reinterpret_cast<const char*>(a.counts);
  for (int i = 0; i < 2; ++i) {
    p->page_table_stride[i] = a.page_table_stride[i];
    params->cells_stride[i] = a.cells_stride[i];
  }
  params->counts_stride = a.counts_stride;
}

void fill_numbers(const cqsa_selected_leaf& a, int32_t rows, sm70_params* params) {
  attention_params* p = &params->a;
  params->capacity = smaller(a.capacity, most_ids);
  params->pages = smaller(a.pages, most_ids);
  p->page_size = a.page_size;
  p->num_pages = a.num_pages;
  p->batch = 1;
  p->num_heads = a.num_heads;
  p->num_kv_heads = a.num_kv_heads;
  p->q_tiles = a.total_q;
  p->head_dim = int32_t(a.head_dim);
  p->head_dim_v = int32_t(a.head_dim_v);
  p->scale_k = p->scale_v = a.k.dtype == CQSA_DTYPE_I8 ? CQSA_SCALE_GROUP : CQSA_SCALE_NONE;
  p->kv_group = int32_t(a.kv_group);
  p->softmax_scale = float(a.softmax_scale);
  p->left = p->right = no_limit;
  const int64_t group = a.num_heads / a.num_kv_heads;
  p->heads_packed = int32_t(smaller(group, rows));
  p->head_groups = int32_t(divide_up(group, p->heads_packed));
}

uint64_t workspace(const cqsa_selected_leaf*, int64_t) { return 0; }

cqsa_status launch_leaf(void* device, const cqsa_selected_leaf* leaf, void*, uint64_t, const cqsa_exec*, void* stream) {
  const cqsa_selected_leaf& a = *leaf;
  if (a.total_q < 1 || a.num_heads < 1 || a.num_kv_heads < 1) return CQSA_OK;
  const variant v = choose(a);
  sm70_params p{};
  fill_operands(a, &p);
  fill_numbers(a, v.rows, &p);
  const int64_t units = a.total_q * a.num_kv_heads * p.a.head_groups;
  cqsa_status status = CQSA_OK;
  for (p.a.first_unit = 0; status == CQSA_OK && p.a.first_unit < units; p.a.first_unit += most_units) {
    const uint32_t blocks = uint32_t(smaller(units - p.a.first_unit, most_units));
    status = launch(device, v.kernel, {{blocks, 1, 1}, uint32_t(v.threads), uint32_t(v.shared_bytes)}, &p, sizeof p, stream);
  }
  return status;
}

}  // namespace

extern const cqsa_selected_impl sm70_selected_impl = {
    "cuda_sm70_selected", "Volta, f16 q (or f32 where FAST or SPLIT is asked), f16 or int8 k and v, head_dim to 256", probe, workspace, launch_leaf};

}  // namespace cqsa::gpu
