// SPDX-License-Identifier: Apache-2.0
// Host part of key-value caches and rotations.
#include "kv.h"

#include "attention_fill.h"
#include "kv_params.h"
#include "port.h"

namespace cqsa::gpu {

namespace {

constexpr int32_t threads = 256;
constexpr int32_t values_shift = 11;  // 2048 values in shared memory at once, or a row that is longer
constexpr float half_root = 0.70710678118654752f;

// A length that is a power of two, how many rows of it are taken together, and the factor of the rotation.
struct rotation {
  int32_t n_shift = 0, rows_shift = 0;
  float factor = 1;

  explicit rotation(int64_t n) {
    while (int64_t(1) << n_shift < n) ++n_shift;
    rows_shift = n_shift < values_shift ? values_shift - n_shift : 0;
    for (int32_t i = 0; i < n_shift / 2; ++i) factor *= 0.5f;
    if (n_shift % 2) factor *= half_root;
  }
  uint32_t shared_bytes() const { return uint32_t(padded_floats(int64_t(1) << (n_shift + rows_shift)) * int64_t(sizeof(float))); }
};

// `units` of work, `each` for a block at a time; enough blocks to fill the device go round.
launch_shape shape_of(const device_facts& facts, int64_t units, int64_t each, uint32_t shared_bytes) {
  const int64_t most = larger(facts.compute_units, 1) * 8;
  return {{uint32_t(smaller(divide_up(units, each), most)), 1, 1}, uint32_t(threads), shared_bytes};
}

kv_params params_of(const cqsa_kv_leaf& a) {
  kv_params p{};
  const bool blocks = a.format == CQSA_KV_FORMAT_Q4_0;
  p.x = view_of(a.x, 1, a.num_kv_heads, a.rows, a.head_dim);
  p.pool = blocks ? plain_view(a.pool) : view_of(a.pool, a.num_pages, a.num_kv_heads, a.page_size, a.head_dim);
  p.scale = plain_view(a.scale);
  p.page_table = reinterpret_cast<const char*>(a.page_table);
  p.cells = static_cast<const char*>(a.cells);
  p.page_table_stride[0] = a.page_table_stride[0], p.page_table_stride[1] = a.page_table_stride[1];
  p.cells_stride = a.cells_stride;
  p.rows = a.rows, p.heads = a.num_kv_heads, p.head_dim = a.head_dim;
  p.num_pages = a.num_pages, p.page_size = a.page_size, p.pages = a.pages;
  p.cells_bytes = a.cells_dtype == CQSA_DTYPE_I64 ? 8 : 4;
  p.group = int32_t(a.kv_group);
  p.blocks = blocks;
  return p;
}

}  // namespace

cqsa_status portable_kv_append(void* device, const cqsa_kv_leaf* leaf, const cqsa_exec*, void* stream) {
  kv_params p = params_of(*leaf);
  const device_facts& facts = facts_of(device);
  const int64_t units = p.rows * p.heads;
  if (units < 1 || p.head_dim < 1) return CQSA_OK;
  if (!p.blocks) {
    const launch_shape shape = shape_of(facts, units, threads / facts.lanes, 0);
    return launch(device, kernel_id::cqsa_kv_append, shape, &p, sizeof p, stream);
  }
  const rotation turn(p.head_dim);
  p.rows_shift = turn.rows_shift, p.n_shift = turn.n_shift, p.factor = turn.factor;
  const launch_shape shape = shape_of(facts, units, int64_t(1) << turn.rows_shift, turn.shared_bytes());
  return launch(device, kernel_id::cqsa_kv_append_q4, shape, &p, sizeof p, stream);
}

cqsa_status portable_kv_gather(void* device, const cqsa_kv_leaf* leaf, const cqsa_exec*, void* stream) {
  const kv_params p = params_of(*leaf);
  const device_facts& facts = facts_of(device);
  const int64_t units = p.rows * p.heads;
  if (units < 1 || p.head_dim < 1) return CQSA_OK;
  return launch(device, kernel_id::cqsa_kv_gather, shape_of(facts, units, threads / facts.lanes, 0), &p, sizeof p, stream);
}

cqsa_status portable_hadamard(void* device, const cqsa_hadamard_leaf* leaf, const cqsa_exec*, void* stream) {
  const cqsa_hadamard_leaf& a = *leaf;
  const rotation turn(a.n);
  hadamard_params p{};
  const cqsa_view x{const_cast<void*>(a.x), a.dtype_x, 0, {a.x_stride[0], a.x_stride[1], a.x_stride[2], a.x_stride[3]}};
  const cqsa_view out{a.out, a.dtype_out, 0, {a.out_stride[0], a.out_stride[1], a.out_stride[2], a.out_stride[3]}};
  p.x = view_of(x, a.shape[0], a.shape[1], a.shape[2], a.n);
  p.out = view_of(out, a.shape[0], a.shape[1], a.shape[2], a.n);
  p.rows = 1;
  for (int i = 0; i < 3; ++i) p.shape[i] = a.shape[i], p.rows *= a.shape[i];
  p.rows_shift = turn.rows_shift, p.n_shift = turn.n_shift, p.factor = turn.factor;
  if (p.rows < 1) return CQSA_OK;
  const launch_shape shape = shape_of(facts_of(device), p.rows, int64_t(1) << turn.rows_shift, turn.shared_bytes());
  return launch(device, kernel_id::cqsa_hadamard, shape, &p, sizeof p, stream);
}

}  // namespace cqsa::gpu
