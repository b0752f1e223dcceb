// SPDX-License-Identifier: Apache-2.0
// Host part of the portable attention over selected cells. No vendor's name here; the plugin supplies launch() (port.h).
#include "selected_fill.h"

#include <cstdio>

#include "attention_fill.h"

namespace cqsa::gpu {

const char* why_no_gpu(const cqsa_selected_leaf& leaf) {
  const cqsa_dtype kv = leaf.k.dtype;
  if (!is_float(leaf.q.dtype) || (!is_float(kv) && kv != CQSA_DTYPE_I8) || kv != leaf.v.dtype)
    return "q must be f32, f16 or bf16, and k and v both one of these or int8";
  if (!is_float(leaf.out.dtype)) return "out must be f32, f16 or bf16";
  if (leaf.head_dim < 1 || leaf.head_dim > 576 || leaf.head_dim_v < 1 || leaf.head_dim_v > 512)
    return "head_dim is 1..576 and head_dim_v 1..512";
  if (kv == CQSA_DTYPE_I8 && (leaf.kv_group < 4 || leaf.kv_group % 4 || leaf.kv_group > 1024)) return "kv_group is 32, 64 or 128";
  if (leaf.num_heads > INT32_MAX) return "num_heads is below 2^31";
  return why_no_fast(leaf.chip, leaf.precision, leaf.q.dtype);
}

namespace {

constexpr int64_t most_ids = int64_t(1) << 31;  // ids are int32: whatever is larger than all of them is as good as this

gpu_view pool_view(const cqsa_selected_leaf& a, const cqsa_view& x, int64_t channels, int64_t run) {
  return view_of(x, a.num_pages, a.num_kv_heads, a.page_size, channels, run);
}

}  // namespace

void fill_params(const cqsa_selected_leaf& a, int64_t run, selected_params* p) {
  p->q = view_of(a.q, 1, a.num_heads, a.total_q, a.head_dim);
  p->k = pool_view(a, a.k, a.head_dim, run);
  p->v = pool_view(a, a.v, a.head_dim_v, run);
  p->k_scale = plain_view(a.k_scale);
  p->v_scale = plain_view(a.v_scale);
  p->out = view_of(a.out, 1, a.num_heads, a.total_q, a.head_dim_v);
  p->lse = plain_view(a.lse);
  p->page_table = reinterpret_cast<const char*>(a.page_table);
  p->cells = reinterpret_cast<const char*>(a.cells);
  p->counts = reinterpret_cast<const char*>(a.counts);
  for (int i = 0; i < 2; ++i) {
    p->page_table_stride[i] = a.page_table_stride[i];
    p->cells_stride[i] = a.cells_stride[i];
  }
  p->counts_stride = a.counts_stride;
  p->page_size = smaller(a.page_size, most_ids);
  p->num_pages = smaller(a.num_pages, most_ids);
  p->pages = smaller(a.pages, most_ids);
  p->capacity = smaller(a.capacity, most_ids - 1);
  p->total_q = a.total_q;
  p->num_heads = int32_t(a.num_heads);
  p->num_kv_heads = int32_t(a.num_kv_heads);
  p->group_heads = int32_t(a.num_heads / a.num_kv_heads);
  p->parts = int32_t(divide_up(p->group_heads, 16));
  p->head_dim = int32_t(a.head_dim);
  p->head_dim_v = int32_t(a.head_dim_v);
  p->q_pitch = selected_q_pitch(p->head_dim);
  p->kv_group = a.k.dtype == CQSA_DTYPE_I8 ? int32_t(a.kv_group) : 0;
  p->softmax_scale = float(a.softmax_scale);
}

cqsa_status launch_units(void* device, kernel_id kernel, uint32_t threads, uint32_t shared_bytes, selected_params* p, void* stream) {
  const int64_t units = p->total_q * p->num_kv_heads * p->parts;
  cqsa_status status = CQSA_OK;
  for (p->first_unit = 0; status == CQSA_OK && p->first_unit < units; p->first_unit += most_units) {
    const uint32_t blocks = uint32_t(smaller(units - p->first_unit, most_units));
    status = launch(device, kernel, {{blocks, 1, 1}, threads, shared_bytes}, p, sizeof *p, stream);
  }
  return status;
}

namespace {

struct variant {
  kernel_id kernel;
  int32_t fixed_bytes;
};
variant choose(int64_t head_dim_v) {
  if (head_dim_v <= 64) return {kernel_id::cqsa_selected_d64, selected_shape<64>::fixed_bytes};
  if (head_dim_v <= 128) return {kernel_id::cqsa_selected_d128, selected_shape<128>::fixed_bytes};
  if (head_dim_v <= 256) return {kernel_id::cqsa_selected_d256, selected_shape<256>::fixed_bytes};
  return {kernel_id::cqsa_selected_d512, selected_shape<512>::fixed_bytes};
}

cqsa_status probe(const cqsa_selected_leaf* leaf, char* reason, uint64_t size) {
  const char* text = why_no_gpu(*leaf);
  if (text && reason && size) std::snprintf(reason, size, "%s", text);
  return text ? CQSA_ERROR_UNSUPPORTED : CQSA_OK;
}

uint64_t workspace(const cqsa_selected_leaf*, int64_t) { return 0; }

cqsa_status launch_leaf(void* device, const cqsa_selected_leaf* leaf, void*, uint64_t, const cqsa_exec*, void* stream) {
  return launch_portable(device, *leaf, stream);
}

}  // namespace

cqsa_status launch_portable(void* device, const cqsa_selected_leaf& leaf, void* stream) {
  static_assert(sizeof(selected_params) <= most_params_bytes);
  if (leaf.total_q < 1 || leaf.num_heads < 1 || leaf.num_kv_heads < 1) return CQSA_OK;
  selected_params p{};
  fill_params(leaf, 4, &p);
  const variant v = choose(leaf.head_dim_v);
  const uint32_t bytes = uint32_t(v.fixed_bytes) + 4 * 16 * uint32_t(p.q_pitch);
  return launch_units(device, v.kernel, 256, bytes, &p, stream);
}

extern const cqsa_selected_impl portable_selected = {"gpu_portable_selected", "any GPU", probe, workspace, launch_leaf};

}  // namespace cqsa::gpu
