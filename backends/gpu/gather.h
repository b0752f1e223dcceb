// SPDX-License-Identifier: Apache-2.0
// Rows of a strided, segmented or paged view to compact rows, for kernels that want them so. Bytes are copied as they are.
#pragma once

#include "port.h"

namespace cqsa::gpu {

// Rows row, row + 1, .. of the view.
struct gather_run {
  int64_t row, count;
};

// to[b, h, n, :] = from[b, h, row(n), :] for n in [0, rows), to compact. row(n) is
//   - with runs: the n-th of their rows, one run after the other (host memory, read before the call returns; counts add up to rows),
//   - with a page table: row (first_row + n) % page_size of page page_table[b, (first_row + n) / page_size]. The table is device
//     memory that nobody has looked at: pages outside [0, num_pages) give zeros,
//   - otherwise first_row + n.
struct gather_leaf {
  cqsa_view from;  // axes batch (paged: page), head, row, channel
  void* to;
  int64_t batch, heads, rows, channels;
  int64_t first_row;
  const gather_run* runs;
  int64_t num_runs;
  const int32_t* page_table;
  int64_t page_table_stride[2];
  int64_t page_size, num_pages;
};

// Bytes of device memory that a call needs: none without runs. It may be reused once the work on the stream is done.
uint64_t gather_workspace(const gather_leaf& leaf);
cqsa_status portable_gather(void* device, const gather_leaf& leaf, void* workspace, uint64_t workspace_bytes, void* stream);

}  // namespace cqsa::gpu
