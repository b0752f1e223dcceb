// SPDX-License-Identifier: Apache-2.0
// Host part of the portable gather.
#include "gather.h"
#include "gather_params.h"

#include <memory>
#include <new>

namespace cqsa::gpu {
namespace {

bool multiple(int64_t x, int64_t of) { return x % of == 0; }

// Sixteen bytes at a time where every row is a run that begins at a multiple of sixteen.
void choose_unit(const gather_leaf& leaf, gather_params* p) {
  const int64_t bytes = (leaf.from.dtype >> 8 & 0xff) / 8, per = 16 / bytes;
  const int64_t items = leaf.page_table ? leaf.num_pages : leaf.batch;
  const int64_t* stride = leaf.from.stride;
  const bool runs = stride[3] == 1 && multiple(leaf.channels, per) && multiple(stride[2], per) && (leaf.heads == 1 || multiple(stride[1], per)) &&
                    (items <= 1 || multiple(stride[0], per));
  const bool aligned = multiple(int64_t(reinterpret_cast<uintptr_t>(leaf.from.data)), 16) && multiple(int64_t(reinterpret_cast<uintptr_t>(leaf.to)), 16);
  const int64_t unit = runs && aligned ? per : 1;
  p->bytes = int32_t(bytes * unit);
  p->units = int32_t(leaf.channels / unit);
  for (int i = 0; i < 3; ++i) p->stride[i] = stride[i] / unit;
  p->stride[3] = unit > 1 ? 1 : stride[3];
  // The stride of an axis with one entry need not be a multiple, and is not used.
  if (leaf.heads == 1) p->stride[1] = 0;
  if (items <= 1) p->stride[0] = 0;
  while ((1 << p->width_shift) < p->units && p->width_shift < 5) ++p->width_shift;
}

cqsa_status place_runs(void* device, const gather_leaf& leaf, void* workspace, uint64_t bytes, void* stream, gather_params* p) {
  const uint64_t wanted = gather_workspace(leaf);
  if (!workspace || bytes < wanted)
    return fail(CQSA_ERROR_WORKSPACE, "the workspace of cqsa_gather has %llu bytes, wanted %llu", (unsigned long long)bytes, (unsigned long long)wanted);
  std::unique_ptr<placed_run[]> list(new (std::nothrow) placed_run[size_t(leaf.num_runs)]);
  if (!list) return fail(CQSA_ERROR_OUT_OF_HOST_MEMORY, "no host memory for a list of %lld runs", (long long)leaf.num_runs);
  int64_t first = 0, count = 0;
  for (int64_t i = 0; i < leaf.num_runs; ++i) {
    if (leaf.runs[i].count < 1) continue;  // two runs that begin at the same place could not be told apart
    list[size_t(count++)] = {leaf.runs[i].row, first};
    first += leaf.runs[i].count;
  }
  if (first != leaf.rows) return fail(CQSA_ERROR_INTERNAL, "runs of %lld rows for %lld", (long long)first, (long long)leaf.rows);
  p->runs = static_cast<const placed_run*>(workspace);
  p->num_runs = count;
  return upload(device, workspace, list.get(), uint64_t(count) * sizeof(placed_run), stream);
}

}  // namespace

uint64_t gather_workspace(const gather_leaf& leaf) {
  return leaf.runs ? (uint64_t(leaf.num_runs) * sizeof(placed_run) + 63) / 64 * 64 : 0;
}

cqsa_status portable_gather(void* device, const gather_leaf& leaf, void* workspace, uint64_t bytes, void* stream) {
  if (leaf.batch < 1 || leaf.heads < 1 || leaf.rows < 1 || leaf.channels < 1) return CQSA_OK;
  gather_params p{};
  p.from = static_cast<const char*>(leaf.from.data);
  p.to = static_cast<char*>(leaf.to);
  p.batch = leaf.batch, p.heads = leaf.heads, p.rows = leaf.rows;
  p.first_row = leaf.first_row;
  p.page_table = reinterpret_cast<const char*>(leaf.page_table);
  p.page_table_stride[0] = leaf.page_table_stride[0], p.page_table_stride[1] = leaf.page_table_stride[1];
  p.page_size = leaf.page_size, p.num_pages = leaf.num_pages;
  choose_unit(leaf, &p);
  if (leaf.runs) {
    const cqsa_status status = place_runs(device, leaf, workspace, bytes, stream, &p);
    if (status != CQSA_OK) return status;
  }
  const int64_t each = 256 >> p.width_shift, wanted = (p.batch * p.heads * p.rows + each - 1) / each;
  const int64_t units = facts_of(device).compute_units, most = (units > 0 ? units : 1) * 32;
  const uint32_t blocks = uint32_t(wanted < most ? wanted : most);  // they go round
  return launch(device, kernel_id::cqsa_gather, {{blocks, 1, 1}, 256, 0}, &p, sizeof p, stream);
}

}  // namespace cqsa::gpu
