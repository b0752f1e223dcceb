// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/mapped_piece.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#ifndef MADV_POPULATE_READ  // Linux 5.14; an older one refuses, and the pages come one fault after the other
#define MADV_POPULATE_READ 22
#endif

namespace cqsa {
namespace {

struct span {
  uintptr_t low, high;  // [low, high)
};

// Of one line of the tile: bytes relative to its first element.
struct line_span {
  int64_t low = 0, high = 0;
  explicit line_span(const host_tile& tile) {
    const int64_t first = tile.columns.segments ? 0 : tile.columns.first;
    int64_t last = first + tile.extent[3] - 1;
    if (tile.columns.segments) {
      const cqs_segment& s = tile.columns.segments[tile.columns.num_segments - 1];
      last = s.position + s.length - 1;
    }
    const int64_t step = tile.stride[3] * tile.element;
    low = std::min(first * step, last * step);
    high = std::max(first * step, last * step) + tile.element;
  }
};

// Calls visit(span) for each run of lines that are evenly spaced, until it returns false.
template <class F>
void for_spans(const host_tile& tile, int64_t begin, int64_t end, F&& visit) {
  const line_span line_of(tile);
  for (int64_t line = begin; line < end;) {
    const row_run run = rows_from(tile, line);
    const int64_t count = std::min(run.lines, end - line);
    line += count;
    if (!run.data) continue;
    const int64_t reach = (count - 1) * tile.stride[2] * tile.element;
    const auto at = reinterpret_cast<uintptr_t>(run.data);
    const span s{at + static_cast<uintptr_t>(line_of.low + std::min<int64_t>(0, reach)),
                 at + static_cast<uintptr_t>(line_of.high + std::max<int64_t>(0, reach))};
    if (!visit(s, count)) return;
  }
}

uint64_t in_grains(uint64_t bytes) { return (bytes + page_grain - 1) / page_grain * page_grain + page_grain; }

// Where a file system keeps a file in large folios, a page that is written brings its whole folio with it (Linux 6.16 on ext4).
constexpr uint64_t largest_folio = uint64_t{2} << 20;

// Rounded outward, but never out of the mapping: what else is in those pages is in the file too, and comes back when it is touched.
void advise(const host_tile& tile, const span& s, int advice, uint64_t grain) {
  const uintptr_t from = std::max(s.low / grain * grain, tile.mapping.begin);
  const uintptr_t to = std::min((s.high + grain - 1) / grain * grain, tile.mapping.end);
  // A refusal costs memory or time, never a result.
  if (from < to) ::madvise(reinterpret_cast<void*>(from), to - from, advice);
}

bool read_fully(int file, uint64_t at, char* to, uint64_t bytes) {
  while (bytes > 0) {
    const ssize_t count = ::pread(file, to, bytes, static_cast<off_t>(at));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    at += static_cast<uint64_t>(count), to += count, bytes -= static_cast<uint64_t>(count);
  }
  return true;
}

}  // namespace

// What a page costs beside its copy decides here: mapping and unmapping it takes locks of the process and interrupts every core
// that runs one of its threads, so that a dozen of them get in each other's way, and rates differ from run to run.
bool read_lines(const host_tile& tile, int64_t begin, int64_t end, char* compact) {
  constexpr int64_t shortest = 64 << 10;  // below it the system call costs more than it saves
  if (tile.mapping.file < 0) return false;
  const int64_t line_bytes = tile.line_bytes();
  for (int64_t line = begin; line < end;) {
    const line_run run = contiguous_lines(tile, line);
    const int64_t lines = std::min(run.lines, end - line), bytes = lines * line_bytes;
    if (lines == 0 || (run.data && bytes < shortest && lines < end - begin)) return false;
    char* const to = compact + (line - begin) * line_bytes;
    const uint64_t at = tile.mapping.offset + (reinterpret_cast<uintptr_t>(run.data) - tile.mapping.begin);
    if (!run.data) std::memset(to, 0, static_cast<size_t>(bytes));
    else if (!read_fully(tile.mapping.file, at, to, static_cast<uint64_t>(bytes))) return false;
    line += lines;
  }
  return true;
}

uint64_t touched_bytes(const host_tile& tile, int64_t begin, int64_t end) {
  uint64_t bytes = 0;
  for_spans(tile, begin, end, [&](const span& s, int64_t) {
    bytes += in_grains(s.high - s.low);
    return true;
  });
  return bytes;
}

int64_t lines_within(const host_tile& tile, int64_t begin, int64_t end, uint64_t limit) {
  const int64_t row = std::abs(tile.stride[2]) * tile.element;
  int64_t lines = 0;
  uint64_t bytes = 0;
  for_spans(tile, begin, end, [&](const span& s, int64_t count) {
    const uint64_t more = in_grains(s.high - s.low);
    if (bytes + more <= limit) {
      bytes += more;
      lines += count;
      return true;
    }
    // A part of the run may still fit.
    const uint64_t one = in_grains(s.high - s.low - static_cast<uint64_t>((count - 1) * row));
    if (bytes + one > limit) return false;
    const int64_t more_rows = row ? static_cast<int64_t>((limit - bytes - one) / static_cast<uint64_t>(row)) : count;
    lines += std::min(count, 1 + more_rows);
    return false;
  });
  return std::min(std::max<int64_t>(lines, 1), end - begin);
}

void want_lines(const host_tile& tile, int64_t begin, int64_t end) {
  for_spans(tile, begin, end, [&](const span& s, int64_t) {
    // A run whose rows are far apart is left to faults: most of what is between them is not wanted.
    const uint64_t bytes = s.high - s.low, wanted = static_cast<uint64_t>((end - begin) * tile.line_bytes());
    if (bytes >= page_grain && bytes <= 2 * wanted) advise(tile, s, MADV_POPULATE_READ, page_grain);
    return true;
  });
}

void drop_lines(const host_tile& tile, int64_t begin, int64_t end, bool written) {
  for_spans(tile, begin, end, [&](const span& s, int64_t) {
    advise(tile, s, MADV_DONTNEED, written ? largest_folio : page_grain);
    return true;
  });
}

}  // namespace cqsa
