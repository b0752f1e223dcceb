// SPDX-License-Identifier: Apache-2.0
// Everything of the CPU's attention over selected cells that is not arithmetic: what it accepts, its scratch, and units for workers.
#include "cpu_features.h"
#include "selected_job.h"

#include "dtype.h"

#include <atomic>
#include <cstdio>

namespace cqsa::cpu {
namespace {

// Heads of a unit: more of them, and their sums no longer fit into a core's caches.
constexpr int64_t most_rows = 64;

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

int64_t rows_of(const cqsa_selected_leaf& leaf) { return smaller(most_rows, leaf.num_heads / leaf.num_kv_heads); }

// Units of one query and key head.
int64_t parts_of(const cqsa_selected_leaf& leaf) {
  const int64_t rows = rows_of(leaf);
  return (leaf.num_heads / leaf.num_kv_heads + rows - 1) / rows;
}

bool is_float(cqsa_dtype t) { return t == CQSA_DTYPE_F32 || t == CQSA_DTYPE_F16 || t == CQSA_DTYPE_BF16; }

cqsa_status decline(char* reason, uint64_t size, const char* text) {
  if (reason && size) std::snprintf(reason, size, "%s", text);
  return CQSA_ERROR_UNSUPPORTED;
}

// Hands out pieces of memory from `base`, or only counts their bytes (base NULL).
struct carver {
  char* base;
  uint64_t used = 0;
  template <class T> void take(T*& pointer, int64_t count) {
    if (base) pointer = reinterpret_cast<T*>(base + used);
    used += uint64_t(round_up(count * int64_t(sizeof(T)), 64));
  }
};

// The scratch of one worker; returns its bytes.
uint64_t carve(const cqsa_selected_leaf& leaf, char* base, selected_scratch* out) {
  const int64_t rows = rows_of(leaf), widest = larger(leaf.head_dim, leaf.head_dim_v);
  const int64_t groups = leaf.kv_group > 0 ? (widest + leaf.kv_group - 1) / leaf.kv_group : 0;
  // A line more than whole vectors: columns of such rows are spread over more cache sets.
  out->ldk = round_up(leaf.head_dim, 16) + 16;
  out->ldv = round_up(leaf.head_dim_v, 16) + 16;
  carver from{base};
  from.take(out->q, rows * out->ldk);
  from.take(out->tile, selected_tile * larger(out->ldk, out->ldv));
  from.take(out->s, rows * selected_tile);
  from.take(out->acc, rows * out->ldv);
  from.take(out->m, rows);
  from.take(out->l, rows);
  from.take(out->alpha, rows);
  from.take(out->scales, selected_tile * groups);
  from.take(out->codes, selected_tile * groups);
  from.take(out->line, widest);
  from.take(out->raw, widest * int64_t(sizeof(float)));
  return from.used;
}

struct job {
  const selected_target& target;
  const cqsa_selected_leaf& leaf;
  char* workspace;
  uint64_t bytes_each;
  int64_t units;
  std::atomic<int64_t> next{0};
};

constexpr scalar_ops conversions = {[](uint16_t x) { return f16_to_f32(x); }, [](float x) { return f32_to_f16(x); }};

// The parts of a query and key head stand together, and so do the queries: neighbours select nearly the same cells.
selected_unit make_unit(const cqsa_selected_leaf& leaf, int64_t n) {
  const int64_t parts = parts_of(leaf), rows = rows_of(leaf), group = leaf.num_heads / leaf.num_kv_heads;
  const int64_t part = n % parts, query = n / parts % leaf.total_q, kv_head = n / parts / leaf.total_q;
  return {query, kv_head, kv_head * group + part * rows, smaller(rows, group - part * rows)};
}

void work(void* data, int64_t index) {
  job& j = *static_cast<job*>(data);
  selected_scratch mem{};
  carve(j.leaf, j.workspace + uint64_t(index) * j.bytes_each, &mem);
  for (int64_t n; (n = j.next.fetch_add(1, std::memory_order_relaxed)) < j.units;) {
    const selected_unit unit = make_unit(j.leaf, n);
    j.target.run_unit(&j.leaf, &unit, &mem, &conversions);
  }
}

// Below this, waking another thread costs more than it brings.
bool tiny(const cqsa_selected_leaf& a) {
  const double cells = double(smaller(a.capacity, a.num_pages * larger(1, smaller(a.page_size, INT32_MAX)))) + 1;
  return double(a.total_q) * double(a.num_heads) * cells * double(2 * (a.head_dim + a.head_dim_v)) < 1e6;
}

uint64_t workspace_for(const cqsa_selected_leaf* leaf, int64_t workers) {
  selected_scratch unused{};
  return carve(*leaf, nullptr, &unused) * uint64_t(larger(workers, 1));
}

cqsa_status launch_on(const selected_target& target, const cqsa_selected_leaf* leaf, void* workspace, uint64_t bytes,
                      const cqsa_exec* exec) {
  const uint64_t each = workspace_for(leaf, 1);
  int64_t workers = exec && exec->run ? larger(exec->num_workers, 1) : 1;
  if (bytes < each * uint64_t(workers))
    return fail(CQSA_ERROR_WORKSPACE, "the workspace of the attention over selected cells is too small");
  job j{target, *leaf, static_cast<char*>(workspace), each, leaf->total_q * leaf->num_kv_heads * parts_of(*leaf)};
  workers = tiny(*leaf) ? 1 : smaller(workers, j.units);
  if (workers > 1) return exec->run(exec->user, workers, work, &j);
  work(&j, 0);
  return CQSA_OK;
}

cqsa_status probe_leaf(const cqsa_selected_leaf* leaf, char* reason, uint64_t size) {
  const cqsa_dtype k = leaf->k.dtype;
  if (!is_float(leaf->q.dtype) || !is_float(leaf->out.dtype)) return decline(reason, size, "q and out must be f32, f16 or bf16");
  if (leaf->v.dtype != k || (!is_float(k) && (k != CQSA_DTYPE_I8 || leaf->kv_group < 1)))
    return decline(reason, size, "k and v must be f32, f16, bf16 or int8");
  if (leaf->head_dim < 1 || leaf->head_dim > 576 || leaf->head_dim_v < 1 || leaf->head_dim_v > 512)
    return decline(reason, size, "head_dim is 1..576 and head_dim_v 1..512");
  return CQSA_OK;
}

template <const selected_target& target>
cqsa_status launch(void*, const cqsa_selected_leaf* leaf, void* workspace, uint64_t bytes, const cqsa_exec* exec, void*) {
  return launch_on(target, leaf, workspace, bytes, exec);
}

#if defined(CQSA_CPU_X86)
cqsa_status probe_avx2(const cqsa_selected_leaf* leaf, char* reason, uint64_t size) {
  if (!this_cpu().avx2) return decline(reason, size, "this CPU lacks AVX2, FMA, F16C or BMI2");
  return probe_leaf(leaf, reason, size);
}
cqsa_status probe_avx512(const cqsa_selected_leaf* leaf, char* reason, uint64_t size) {
  if (!this_cpu().avx512) return decline(reason, size, "this CPU lacks AVX-512 F/BW/DQ/VL");
  return probe_leaf(leaf, reason, size);
}
#endif

}  // namespace

const cqsa_selected_impl* selected_impls(int32_t* count) {
  static const cqsa_selected_impl list[] = {
#if defined(CQSA_CPU_X86)
      {"cpu_avx512", "x86 with AVX-512 F, BW, DQ, VL", probe_avx512, workspace_for, launch<selected_avx512>},
      {"cpu_avx2", "x86 with AVX2, FMA, F16C, BMI2", probe_avx2, workspace_for, launch<selected_avx2>},
#endif
      {"cpu_baseline", "any CPU", probe_leaf, workspace_for, launch<selected_baseline>},
      selected_reference_impl,
  };
  *count = int32_t(sizeof list / sizeof *list);
  return list;
}

}  // namespace cqsa::cpu
