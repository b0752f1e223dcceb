// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/device_gather.h"

#include <algorithm>
#include <cstring>

namespace cqsa {
namespace {

struct source_run {
  int64_t offset;  // elements from the operand's base
  int64_t length;  // lines (or columns) that follow at the same stride
  bool hidden;
};

source_run run_at(const index_map& map, int64_t index, int64_t stride, int64_t page_move) {
  if (map.segments) {
    const segment_run run = run_of_row(map.segments, map.num_segments, map.first + index);
    return {run.position * stride, run.length, false};
  }
  const int64_t position = map.first + index;
  if (!map.pages) return {position * stride, INT64_MAX, false};
  const int64_t inside = position % map.page_size;
  const int64_t page = map.pages[position / map.page_size * map.page_stride];
  return {page * page_move + inside * stride, map.page_size - inside, page < 0};
}

enum class direction { gather, scatter };

template <direction way>
void move_bytes(char* operand, char* compact, int64_t bytes) {
  if constexpr (way == direction::gather)
    std::memcpy(compact, operand, static_cast<size_t>(bytes));
  else
    std::memcpy(operand, compact, static_cast<size_t>(bytes));
}

// `count` elements, `stride` bytes apart in the operand. The size is a constant inside so that memcpy becomes one move.
template <direction way, int64_t size>
void move_strided(char* operand, char* compact, int64_t count, int64_t stride) {
  for (int64_t i = 0; i < count; ++i) move_bytes<way>(operand + i * stride, compact + i * size, size);
}

template <direction way>
void move_elements(char* operand, char* compact, int64_t count, int64_t stride, int64_t size) {
  if (stride == 1 || count == 1) return move_bytes<way>(operand, compact, count * size);
  switch (size) {
    case 1: return move_strided<way, 1>(operand, compact, count, stride);
    case 2: return move_strided<way, 2>(operand, compact, count, stride * 2);
    case 4: return move_strided<way, 4>(operand, compact, count, stride * 4);
    default: return move_strided<way, 8>(operand, compact, count, stride * 8);
  }
}

template <direction way>
void move_columns(const host_tile& tile, char* line, char* compact) {
  for (int64_t column = 0; column < tile.extent[3];) {
    const source_run run = run_at(tile.columns, column, tile.stride[3], 0);
    const int64_t count = std::min(run.length, tile.extent[3] - column);
    move_elements<way>(line + run.offset * tile.element, compact + column * tile.element, count, tile.stride[3],
                       tile.element);
    column += count;
  }
}

// `count` lines that are tile.stride[2] apart in the operand.
template <direction way>
void move_run(const host_tile& tile, char* operand, char* compact, int64_t count) {
  const int64_t columns = tile.extent[3];
  const bool plain = !tile.columns.segments;
  char* first = operand + (plain ? tile.columns.first * tile.stride[3] * tile.element : 0);
  if (plain && columns == 1) return move_elements<way>(first, compact, count, tile.stride[2], tile.element);
  if (plain && tile.stride[3] == 1 && tile.stride[2] == columns)
    return move_bytes<way>(first, compact, count * tile.line_bytes());
  for (int64_t i = 0; i < count; ++i) {
    char* line = i * tile.stride[2] * tile.element + (plain ? first : operand);
    char* to = compact + i * tile.line_bytes();
    if (plain)
      move_elements<way>(line, to, columns, tile.stride[3], tile.element);
    else
      move_columns<way>(tile, line, to);
  }
}

template <direction way>
void move_lines(const host_tile& tile, int64_t begin, int64_t end, char* compact) {
  for (int64_t line = begin; line < end;) {
    const row_run run = rows_from(tile, line);
    const int64_t count = std::min(run.lines, end - line);
    if (run.data)
      move_run<way>(tile, run.data, compact, count);
    else
      std::memset(compact, 0, static_cast<size_t>(count * tile.line_bytes()));
    compact += count * tile.line_bytes();
    line += count;
  }
}

}  // namespace

void gather_piece(const host_tile& tile, int64_t begin, int64_t end, char* compact) {
  move_lines<direction::gather>(tile, begin, end, compact);
}

void scatter_piece(const host_tile& tile, int64_t begin, int64_t end, const char* compact) {
  move_lines<direction::scatter>(tile, begin, end, const_cast<char*>(compact));
}

row_run rows_from(const host_tile& tile, int64_t line) {
  const int64_t row = line % tile.extent[2];
  const int64_t head = line / tile.extent[2] % tile.extent[1], item = line / tile.extent[2] / tile.extent[1];
  const source_run run = run_at(tile.rows, row, tile.stride[2], tile.stride[0]);
  const int64_t lines = std::min(run.length, tile.extent[2] - row);
  if (run.hidden) return {nullptr, lines};
  const int64_t axis0 = tile.rows.pages ? 0 : item * tile.stride[0];
  return {tile.data + (axis0 + head * tile.stride[1] + run.offset) * tile.element, lines};
}

line_run contiguous_lines(const host_tile& tile, int64_t line) {
  const bool plain = !tile.columns.segments && (tile.stride[3] == 1 || tile.extent[3] == 1);
  if (!plain || (tile.stride[2] != tile.extent[3] && tile.extent[2] > 1)) return {nullptr, 0};
  const row_run run = rows_from(tile, line);
  return {run.data ? run.data + tile.columns.first * tile.stride[3] * tile.element : nullptr, run.lines};
}

bool goes_directly(const host_tile& tile) {
  constexpr int64_t shortest = 64 << 10;  // below it the cost of a copy call exceeds that of a pass through the cache
  return tile.pinned && tile.lines() > 0 && contiguous_lines(tile, 0).lines * tile.line_bytes() >= shortest;
}

segment_run run_of_row(const cqs_segment* segments, int64_t num_segments, int64_t row) {
  const cqs_segment* after = std::upper_bound(segments, segments + num_segments, row,
                                              [](int64_t r, const cqs_segment& s) { return r < s.row; });
  const cqs_segment& s = after[-1];
  return {s.position + (row - s.row), s.length - (row - s.row)};
}

}  // namespace cqsa
