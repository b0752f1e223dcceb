// SPDX-License-Identifier: Apache-2.0
// Key-value caches, section 12 of cqsa.h: where the cells are, and who works on which rows.
#include "kv_job.h"

#include "cpu_features.h"
#include "dtype.h"
#include "element.h"

namespace cqsa::cpu {
namespace {

constexpr scalar_ops conversions = {[](uint16_t x) { return f16_to_f32(x); }, [](float x) { return f32_to_f16(x); }};

// A call cut into units of one row of one head each.
struct kv_work {
  const kv_target& target;
  const void* leaf;
  void (*unit)(const kv_work& work, int64_t index, kv_scratch* mem);
  int64_t units, tasks;
};

void run_part(void* data, int64_t index) {
  const kv_work& work = *static_cast<const kv_work*>(data);
  const int64_t each = work.units / work.tasks, more = work.units % work.tasks;
  const int64_t begin = index * each + (index < more ? index : more), end = begin + each + (index < more);
  kv_scratch mem;
  mem.ops = &conversions;
  for (int64_t n = begin; n < end; ++n) work.unit(work, n, &mem);
}

cqsa_status run(kv_work& work, int64_t channels, const cqsa_exec* exec) {
  // Less than this is done before another thread is awake.
  constexpr int64_t few = 32768;
  const bool large = work.units > few / (channels + 16);
  if (large && exec && exec->run && exec->num_workers > 1) {
    work.tasks = exec->num_workers < work.units ? exec->num_workers : work.units;
    return exec->run(exec->user, work.tasks, run_part, &work);
  }
  run_part(&work, 0);
  return CQSA_OK;
}

// Page of row n's cell and its row there; false where there is none.
bool find_cell(const cqsa_kv_leaf& leaf, int64_t n, int64_t* page, int64_t* row) {
  const int64_t cell = index_of(leaf.cells, leaf.cells_dtype, n * leaf.cells_stride);
  if (cell < 0 || cell / leaf.page_size >= leaf.pages) return false;
  *page = index_of(leaf.page_table, CQSA_DTYPE_I32, n * leaf.page_table_stride[0] + cell / leaf.page_size * leaf.page_table_stride[1]);
  *row = cell % leaf.page_size;
  return *page >= 0 && *page < leaf.num_pages;
}

// Units of one row are neighbours: a cache keeps its heads together more often than its rows.
void append_unit(const kv_work& work, int64_t index, kv_scratch* mem) {
  const auto& leaf = *static_cast<const cqsa_kv_leaf*>(work.leaf);
  const int64_t n = index / leaf.num_kv_heads, head = index % leaf.num_kv_heads;
  int64_t page = 0, row = 0;
  if (!find_cell(leaf, n, &page, &row)) return;
  work.target.append(&leaf, element_address(leaf.x, 0, head, n, 0), element_address(leaf.pool, page, head, row, 0),
                     leaf.kv_group ? element_address(leaf.scale, page, head, row, 0) : nullptr, mem);
}

void clear_row(const cqsa_view& x, int64_t head, int64_t n, int64_t channels) {
  for (int64_t c = 0; c < channels; ++c) store_element(x, 0, head, n, c, 0.0);
}

void gather_unit(const kv_work& work, int64_t index, kv_scratch* mem) {
  const auto& leaf = *static_cast<const cqsa_kv_leaf*>(work.leaf);
  const int64_t n = index / leaf.num_kv_heads, head = index % leaf.num_kv_heads;
  int64_t page = 0, row = 0;
  if (!find_cell(leaf, n, &page, &row)) return clear_row(leaf.x, head, n, leaf.head_dim);
  work.target.gather(&leaf, element_address(leaf.pool, page, head, row, 0),
                     leaf.kv_group ? element_address(leaf.scale, page, head, row, 0) : nullptr,
                     element_address(leaf.x, 0, head, n, 0), mem);
}

void rotate_unit(const kv_work& work, int64_t index, kv_scratch* mem) {
  const auto& leaf = *static_cast<const cqsa_hadamard_leaf*>(work.leaf);
  int64_t from = 0, to = 0;
  for (int axis = 2; axis >= 0; --axis) {
    from += index % leaf.shape[axis] * leaf.x_stride[axis];
    to += index % leaf.shape[axis] * leaf.out_stride[axis];
    index /= leaf.shape[axis];
  }
  const auto bytes = [](cqsa_dtype dtype) { return int64_t((dtype >> 8 & 0xff) / 8); };
  work.target.hadamard(&leaf, static_cast<const char*>(leaf.x) + from * bytes(leaf.dtype_x),
                       static_cast<char*>(leaf.out) + to * bytes(leaf.dtype_out), mem);
}

}  // namespace

const kv_target& kv_best() {
#if defined(CQSA_CPU_X86)
  if (this_cpu().avx2) return kv_avx2;
#endif
  return kv_baseline;
}

cqsa_status kv_append_on(const kv_target& target, const cqsa_kv_leaf* leaf, const cqsa_exec* exec) {
  kv_work work{target, leaf, append_unit, leaf->rows * leaf->num_kv_heads, 1};
  return run(work, leaf->head_dim, exec);
}

cqsa_status kv_gather_on(const kv_target& target, const cqsa_kv_leaf* leaf, const cqsa_exec* exec) {
  kv_work work{target, leaf, gather_unit, leaf->rows * leaf->num_kv_heads, 1};
  return run(work, leaf->head_dim, exec);
}

cqsa_status hadamard_on(const kv_target& target, const cqsa_hadamard_leaf* leaf, const cqsa_exec* exec) {
  kv_work work{target, leaf, rotate_unit, leaf->shape[0] * leaf->shape[1] * leaf->shape[2], 1};
  return run(work, leaf->n, exec);
}

cqsa_status kv_append(void*, const cqsa_kv_leaf* leaf, const cqsa_exec* exec, void*) { return kv_append_on(kv_best(), leaf, exec); }
cqsa_status kv_gather(void*, const cqsa_kv_leaf* leaf, const cqsa_exec* exec, void*) { return kv_gather_on(kv_best(), leaf, exec); }
cqsa_status hadamard(void*, const cqsa_hadamard_leaf* leaf, const cqsa_exec* exec, void*) { return hadamard_on(kv_best(), leaf, exec); }

}  // namespace cqsa::cpu
