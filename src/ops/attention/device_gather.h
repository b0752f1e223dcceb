// SPDX-License-Identifier: Apache-2.0
// Moves tiles of a strided, varlen or paged host operand into compact memory and back: the host half of a transfer.
#pragma once
#include <algorithm>

#include "context.h"
#include "error.h"
#include "ops/attention/decompose.h"

namespace cqsa {

// Where the rows (or the columns) of a tile lie in their operand. At most one of pages and segments is set.
struct index_map {
  int64_t first = 0;               // index of the tile's first row
  const int32_t* pages = nullptr;  // page ids of the sequence; the rows then live in pages, and a page moves along axis 0
  int64_t page_stride = 0;         // elements from one page id to the next
  int64_t page_size = 0;
  const cqs_segment* segments = nullptr;  // a CQS task: the rows of its segments, ascending in segment.row
  int64_t num_segments = 0;
};

// The address range of memory mappings.
struct mapped_range {
  uintptr_t begin = 0, end = 0;
  bool is_private = false;  // one of them is; the others are shared
  int file = -1;            // the file of the only mapping, open for reading; -1: not to be had
  uint64_t offset = 0;      // .. where it is mapped at begin
};

// A tile of a host operand: extent[0..2] lines of extent[3] elements. In compact memory the lines lie one after the other.
struct host_tile {
  char* data = nullptr;
  int64_t element = 0;  // bytes
  int64_t stride[4] = {};
  int64_t extent[4] = {};
  index_map rows, columns;
  bool pinned = false;  // the operand is page-locked: the device can copy from and to it directly
  mapped_range mapping;  // .. is in mapped files, whose resident pages count; empty: it is not

  int64_t lines() const { return extent[0] * extent[1] * extent[2]; }
  int64_t line_bytes() const { return extent[3] * element; }
};

// Lines [begin, end) of the tile between its operand and compact memory (where line `begin` is at compact). Keys of a hidden
// page are gathered as zeros.
void gather_piece(const host_tile& tile, int64_t begin, int64_t end, char* compact);
void scatter_piece(const host_tile& tile, int64_t begin, int64_t end, const char* compact);

// Lines from `line` on that lie one after the other in the operand as they do in compact memory, and where the first of them is.
// 0 lines: no such order. Keys of a hidden page are a run of their own, at nullptr.
struct line_run {
  char* data;
  int64_t lines;
};
line_run contiguous_lines(const host_tile& tile, int64_t line);

// Lines from `line` on that are tile.stride[2] apart, and where the first of them begins (column 0). Hidden ones are at nullptr.
struct row_run {
  char* data;
  int64_t lines;
};
row_run rows_from(const host_tile& tile, int64_t line);

// Whether the tile's runs are long enough to be copied one by one, without staging.
bool goes_directly(const host_tile& tile);

// Position in the sequence of a row of a task, and how many rows from it on are consecutive.
struct segment_run {
  int64_t position, length;
};
segment_run run_of_row(const cqs_segment* segments, int64_t num_segments, int64_t row);

// body(begin, end) over parts of [0, count), on several threads when `bytes` is worth it.
template <class F>
cqsa_status for_ranges(const cqsa_context& context, int64_t count, int64_t bytes, F& body) {
  constexpr int64_t bytes_per_thread = 128 << 10;  // below this a second thread costs more than it brings
  const int64_t parts = std::min({int64_t{context.num_threads}, bytes / bytes_per_thread, count});
  if (parts <= 1) {
    body(0, count);
    return CQSA_OK;
  }
  struct job {
    F& body;
    int64_t count, parts;
  } work{body, count, parts};
  const auto task = [](void* data, int64_t index) {
    const job& w = *static_cast<job*>(data);
    w.body(w.count * index / w.parts, w.count * (index + 1) / w.parts);
  };
  return run_tasks(context, parts, task, &work);
}

}  // namespace cqsa
