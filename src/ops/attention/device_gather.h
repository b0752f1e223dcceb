// SPDX-License-Identifier: Apache-2.0
// Moves tiles of a strided, varlen or paged host operand into compact memory and back: the host half of a transfer.
#pragma once
#include "context.h"
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

// A tile of a host operand: extent[0..2] lines of extent[3] elements. In compact memory the lines lie one after the other.
struct host_tile {
  char* data = nullptr;
  int64_t element = 0;  // bytes
  int64_t stride[4] = {};
  int64_t extent[4] = {};
  index_map rows, columns;

  int64_t lines() const { return extent[0] * extent[1] * extent[2]; }
  int64_t line_bytes() const { return extent[3] * element; }
};

// Lines [begin, end) of the tile between its operand and compact memory (where line `begin` is at compact). Keys of a hidden
// page are gathered as zeros. Large moves are spread over the context's threads.
void gather_lines(const cqsa_context& context, const host_tile& tile, int64_t begin, int64_t end, char* compact);
void scatter_lines(const cqsa_context& context, const host_tile& tile, int64_t begin, int64_t end, const char* compact);

// Position in the sequence of a row of a task, and how many rows from it on are consecutive.
struct segment_run {
  int64_t position, length;
};
segment_run run_of_row(const cqs_segment* segments, int64_t num_segments, int64_t row);

}  // namespace cqsa
