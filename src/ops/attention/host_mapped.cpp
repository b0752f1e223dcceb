// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/host_mapped.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "ops/attention/mapped_piece.h"
#include "tensor.h"
#include "workspace.h"

namespace cqsa {

namespace {

constexpr uint64_t grain = page_grain;

// A mapped operand as seen from a leaf; `whole` are its sizes in the problem, heads those of the leaf.
struct part {
  const char* name;
  cqsa_view view;
  int64_t heads, channels;
  bool by_key;  // its rows are keys
  bool plane;   // its columns are keys
  int64_t whole[4];
};

struct extent {
  int64_t low, high;  // bytes relative to the first element, [low, high)
};

int64_t reach(int64_t count, int64_t stride, int64_t bytes) { return (count - 1) * std::abs(stride) * bytes; }

extent extent_of(const cqsa_view& view, const int64_t begin[4], const int64_t count[4]) {
  const int64_t bytes = dtype_bytes(view.dtype);
  extent e{0, bytes};
  for (int axis = 0; axis < 4; ++axis) {
    const int64_t step = view.stride[axis] * bytes;
    const int64_t first = begin[axis] * step, last = (begin[axis] + count[axis] - 1) * step;
    e.low += std::min(first, last);
    e.high += std::max(first, last);
  }
  return e;
}

uint64_t in_grains(int64_t bytes) { return (static_cast<uint64_t>(bytes) + grain - 1) / grain * grain + grain; }

bool is_empty(const part& x) { return x.whole[0] == 0 || x.whole[1] == 0 || x.whole[2] == 0 || x.whole[3] == 0; }

uint64_t all_of(const part& x) {
  if (is_empty(x)) return 0;
  const int64_t zero[4] = {};
  const extent e = extent_of(x.view, zero, x.whole);
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  return (static_cast<uint64_t>(e.high - e.low) + page - 1) / page * page + page;
}

// Rows that stand apart are counted row by row, heads that are interleaved together: whichever is least bounds the pages.
struct shape_in_memory {
  int64_t row, column, line, whole;  // bytes from first to last of a row, a column, a head, all heads
  shape_in_memory(const part& x, int64_t rows, int64_t columns) {
    const int64_t bytes = dtype_bytes(x.view.dtype);
    row = bytes + reach(columns, x.view.stride[3], bytes);
    column = bytes + reach(rows, x.view.stride[2], bytes);
    line = row + column - bytes;
    whole = line + reach(x.heads, x.view.stride[1], bytes);
  }
  bool heads_together(int64_t heads) const { return in_grains(whole) <= arena::times(static_cast<uint64_t>(heads), in_grains(line)); }
};

uint64_t resident_of(const part& x, int64_t q_len, int64_t k_len) {
  const int64_t rows = x.by_key ? k_len : q_len, columns = x.plane ? k_len : x.channels;
  if (is_empty(x) || rows <= 0 || columns <= 0 || x.heads <= 0) return 0;
  const shape_in_memory shape(x, rows, columns);
  const auto times = [](int64_t count, uint64_t bytes) { return arena::times(static_cast<uint64_t>(count), bytes); };
  const uint64_t bound = std::min({in_grains(shape.whole), times(x.heads, in_grains(shape.line)),
                                   times(x.heads, times(rows, in_grains(shape.row))),
                                   times(x.heads, times(columns, in_grains(shape.column)))});
  return std::min(bound, all_of(x));
}

int64_t scale_columns(int32_t kind, int64_t channels, int64_t group) {
  return kind == CQSA_SCALE_GROUP ? (channels + group - 1) / group : 1;
}

// Calls visit(index, part) for every mapped operand of the leaf whose size grows with the sequences. An operand has the same
// index every time.
template <class F>
void for_parts(const attention_problem& problem, const cqsa_attention_leaf& leaf, F visit) {
  const auto& p = problem.p;
  const bool q = p.memory_q == CQSA_MEMORY_MAPPED, kv = p.memory_kv == CQSA_MEMORY_MAPPED, out = p.memory_out == CQSA_MEMORY_MAPPED;
  const int64_t items = problem.varlen() ? 1 : p.batch;
  const int64_t q_rows = problem.varlen() ? p.total_q : p.seqlen_q, k_rows = problem.varlen() ? p.total_k : p.seqlen_k;
  const auto rows = [&](int index, bool mapped, const char* name, const cqsa_view& view, int64_t channels) {
    if (mapped && view.data)
      visit(index, part{name, view, leaf.num_heads, channels, false, false, {items, p.num_heads, q_rows, channels}});
  };
  const auto plane = [&](int index, const char* name, const cqsa_view& view) {
    if (q && view.data)
      visit(index, part{name, view, leaf.num_heads, 0, false, true, {p.batch, p.num_heads, p.seqlen_q, p.seqlen_k}});
  };
  const auto keys = [&](int index, const char* name, const cqsa_view& view, int64_t channels) {
    if (kv && view.data)
      visit(index, part{name, view, leaf.num_kv_heads, channels, true, false, {items, p.num_kv_heads, k_rows, channels}});
  };
  const auto long_scale = [](int32_t kind) { return kind == CQSA_SCALE_TOKEN || kind == CQSA_SCALE_GROUP; };
  rows(0, q, "q", leaf.q, p.head_dim);
  plane(1, "mask", leaf.mask);
  plane(2, "bias", leaf.bias);
  keys(3, "k", leaf.k, p.head_dim);
  keys(4, "v", leaf.v, p.head_dim_v);
  if (long_scale(p.scale_k)) keys(5, "k_scale", leaf.k_scale, scale_columns(p.scale_k, p.head_dim, p.kv_group));
  if (long_scale(p.scale_v)) keys(6, "v_scale", leaf.v_scale, scale_columns(p.scale_v, p.head_dim_v, p.kv_group));
  rows(7, out, "out", leaf.out, p.head_dim_v);
  rows(8, out, "lse", leaf.lse, 1);
}

// ---- which mapping ----------------------------------------------------------------------------------------------------------

struct file_closer {
  FILE* file;
  ~file_closer() {
    if (file) std::fclose(file);
  }
};

// Finds [begin, end) in the process's mappings: all of it in mappings of files that are shared, or (unless `shared`) private
// and read-only. Then range_out spans those mappings. false: it is not so, or cannot be known. Whether private pages were changed
// is another question: find_changes.
bool find_mapping(uintptr_t begin, uintptr_t end, bool shared, mapped_range& range_out) {
  const file_closer maps{std::fopen("/proc/self/maps", "re")};
  if (!maps.file) return false;
  char line[256];
  bool at_start = true;
  uintptr_t next = begin;
  range_out = {};
  while (std::fgets(line, sizeof line, maps.file)) {
    const bool begins = at_start;
    at_start = std::strchr(line, '\n') != nullptr;  // a long path comes in several pieces
    unsigned long from, to, offset, inode;
    unsigned major, minor;
    char mode[5];
    if (!begins || std::sscanf(line, "%lx-%lx %4s %lx %x:%x %lu", &from, &to, mode, &offset, &major, &minor, &inode) != 7) continue;
    if (to <= next) continue;
    if (from > next || inode == 0 || !(mode[3] == 's' || (!shared && mode[1] != 'w'))) return false;
    if (next == begin) range_out.begin = from;
    range_out.end = next = to;
    range_out.is_private |= mode[3] != 's';
    if (next >= end) return true;
  }
  return false;
}

// Opens the file at the path of a line of /proc/self/maps if it is the one that is mapped: it may have been removed, or another one
// been put in its place.
int open_mapped(const char* path, unsigned major, unsigned minor, unsigned long inode) {
  const int file = ::open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  struct stat found;
  if (file < 0) return -1;
  if (::fstat(file, &found) == 0 && S_ISREG(found.st_mode) && found.st_ino == inode && found.st_dev == makedev(major, minor)) return file;
  ::close(file);
  return -1;
}

// The file of the range, when one mapping spans it. Others stay without.
void open_file(mapped_range& range) {
  const file_closer maps{std::fopen("/proc/self/maps", "re")};
  char line[4096 + 256];
  while (maps.file && std::fgets(line, sizeof line, maps.file)) {
    unsigned long from, to, offset, inode;
    unsigned major, minor;
    int at = 0;
    if (std::sscanf(line, "%lx-%lx %*4s %lx %x:%x %lu %n", &from, &to, &offset, &major, &minor, &inode, &at) != 6 || at == 0) continue;
    if (from != range.begin || to != range.end) continue;
    line[std::strcspn(line, "\n")] = '\0';
    range.file = open_mapped(line + at, major, minor, inode);
    range.offset = offset;
    return;
  }
}

bool find_mapping(const part& x, bool shared, mapped_range& range_out) {
  const int64_t zero[4] = {};
  const extent e = extent_of(x.view, zero, x.whole);
  const auto first = reinterpret_cast<uintptr_t>(x.view.data);
  return find_mapping(first + static_cast<uintptr_t>(e.low), first + static_cast<uintptr_t>(e.high), shared, range_out);
}

struct changes {
  uint64_t bytes = 0;
  bool known = true;
};

// Pages of private mappings that no file has: written once (maybe before the mapping was made read-only), by now in memory or
// swapped out. To let them go is to lose them. Fills changes_out[i] for each range that is private, with one read of
// /proc/self/smaps: the kernel walks the page tables, but reads nothing of the files.
void find_changes(const mapped_range (&ranges)[most_mapped_parts], changes (&changes_out)[most_mapped_parts]) {
  for (int i = 0; i < most_mapped_parts; ++i) changes_out[i] = {0, !ranges[i].is_private};
  if (std::none_of(ranges, ranges + most_mapped_parts, [](const mapped_range& r) { return r.is_private; })) return;
  const file_closer smaps{std::fopen("/proc/self/smaps", "re")};
  if (!smaps.file) return;
  uint64_t counted[most_mapped_parts] = {};  // bytes of the range in mappings for which the kernel says what was changed
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  uintptr_t from = 0, to = 0;  // the mapping whose fields follow
  const auto for_inside = [&](auto visit) {
    for (int i = 0; i < most_mapped_parts; ++i)
      if (ranges[i].is_private && from < ranges[i].end && to > ranges[i].begin) visit(i);
  };
  char line[256];
  bool at_start = true;
  while (std::fgets(line, sizeof line, smaps.file)) {
    const bool begins = at_start;
    at_start = std::strchr(line, '\n') != nullptr;
    unsigned long low, high;
    unsigned long long kib;
    char mode[5], name[32];
    if (!begins) continue;
    if (std::sscanf(line, "%lx-%lx %4s", &low, &high, mode) == 3) {
      from = low, to = high;
      if (mode[3] != 's') continue;
      for_inside([&](int i) { counted[i] += to - from; });
      from = to = 0;
    }
    if (std::sscanf(line, "%31[^:]: %llu kB", name, &kib) != 2) continue;
    const auto is = [&](const char* field) { return std::strcmp(name, field) == 0; };
    if (is("KernelPageSize") && kib << 10 != page) from = to = 0;  // huge pages of hugetlbfs: the kernel does not say
    if (is("Anonymous")) for_inside([&](int i) { counted[i] += to - from; });
    // Pages of zeros that KSM merged are in neither of the other counts.
    if (is("Anonymous") || is("Swap") || is("KSM")) for_inside([&](int i) { changes_out[i].bytes += kib << 10; });
  }
  for (int i = 0; i < most_mapped_parts; ++i)
    if (ranges[i].is_private) changes_out[i].known = counted[i] >= ranges[i].end - ranges[i].begin;
}

}  // namespace

uint64_t resident_bytes(const attention_problem& problem, const cqsa_attention_leaf& leaf, int64_t q_len, int64_t k_len) {
  uint64_t bytes = 0;
  for_parts(problem, leaf, [&](int, const part& x) { bytes += resident_of(x, q_len, k_len); });
  return bytes;
}

uint64_t resident_bytes_of_all(const attention_problem& problem, const cqsa_attention_leaf& whole) {
  uint64_t bytes = 0;
  for_parts(problem, whole, [&](int, const part& x) { bytes += all_of(x); });
  return bytes;
}

cqsa_status mapped_pages::find(const cqsa_attention_leaf& whole) {
  cqsa_status status = CQSA_OK;
  for_parts(problem_, whole, [&](int index, const part& x) {
    if (status != CQSA_OK || is_empty(x) || find_mapping(x, false, found_[index])) return;
    status = fail(CQSA_ERROR_INVALID_ARGUMENT,
                  "args->%s is at %p, which is not in a mapping of a file that is shared or read-only (by /proc/self/maps), but "
                  "params say CQSA_MEMORY_MAPPED; CQSA_MEMORY_HOST takes any memory",
                  x.name, x.view.data);
  });
  CQSA_TRY(status);
  changes changed[most_mapped_parts];
  find_changes(found_, changed);
  for_parts(problem_, whole, [&](int index, const part& x) {
    const auto& [bytes, known] = changed[index];
    if (status != CQSA_OK || (known && bytes == 0)) return;
    char what[96] = "whose changed pages cannot be told from the file's";
    if (known) std::snprintf(what, sizeof what, "of which %" PRIu64 " bytes were changed or are swapped out", bytes);
    status = fail(CQSA_ERROR_INVALID_ARGUMENT,
                  "args->%s is at %p in a private mapping %s (by /proc/self/smaps), but CQSA_MEMORY_MAPPED lets pages go, which "
                  "would lose changes: it wants a mapping that is shared or was never written; CQSA_MEMORY_HOST takes any memory",
                  x.name, x.view.data, what);
  });
  return status;
}

void mapped_pages::open_files() {
  for (mapped_range& range : found_)
    if (range.end && range.file < 0) open_file(range);
}

mapped_pages::~mapped_pages() {
  for (const mapped_range& range : found_)
    if (range.file >= 0) ::close(range.file);
}

mapped_range mapped_pages::range_of(const void* address) const {
  const auto at = reinterpret_cast<uintptr_t>(address);
  for (const mapped_range& range : found_)
    if (at >= range.begin && at < range.end) return range;
  return {};
}

// Rounded outward: what else is in those pages is in the file too, and comes back when it is touched.
template <class F>
void mapped_pages::for_ranges(const cqsa_attention_leaf& leaf, const mapped_block& b, bool by_key, F act) const {
  for_parts(problem_, leaf, [&](int index, const part& x) {
    const int64_t rows = x.by_key ? b.k_len : b.q_len, columns = x.plane ? b.k_len : x.channels;
    if ((x.by_key || x.plane) != by_key || is_empty(x) || rows <= 0 || columns <= 0) return;
    const bool together = shape_in_memory(x, rows, columns).heads_together(x.heads);
    for (int64_t head = 0; head < (together ? 1 : x.heads); ++head) {
      const int64_t begin[4] = {0, head, x.by_key ? b.k_begin : b.q_begin, x.plane ? b.k_begin : 0};
      const int64_t count[4] = {1, together ? x.heads : 1, rows, columns};
      const extent e = extent_of(x.view, begin, count);
      const auto data = reinterpret_cast<uintptr_t>(x.view.data);
      const uintptr_t low = (data + static_cast<uintptr_t>(e.low)) / grain * grain;
      const uintptr_t high = (data + static_cast<uintptr_t>(e.high) + grain - 1) / grain * grain;
      const uintptr_t from = std::max(low, found_[index].begin), to = std::min(high, found_[index].end);
      if (from < to) act(reinterpret_cast<void*>(from), to - from);
    }
  });
}

namespace {
// A refusal costs memory or time, never a result; so it is not an error.
void drop(void* from, size_t bytes) { ::madvise(from, bytes, MADV_DONTNEED); }
void want(void* from, size_t bytes) { ::madvise(from, bytes, MADV_WILLNEED); }
}  // namespace

void mapped_pages::drop_keys(const cqsa_attention_leaf& leaf, const mapped_block& b) const { for_ranges(leaf, b, true, drop); }
void mapped_pages::drop_rows(const cqsa_attention_leaf& leaf, const mapped_block& b) const { for_ranges(leaf, b, false, drop); }
void mapped_pages::want_keys(const cqsa_attention_leaf& leaf, const mapped_block& b) const { for_ranges(leaf, b, true, want); }

cqsa_status find_shared_outputs(const attention_problem& problem, const cqsa_attention_leaf& whole, mapped_range ranges_out[2]) {
  attention_problem outputs = problem;
  outputs.p.memory_q = outputs.p.memory_kv = CQSA_MEMORY_HOST;
  outputs.p.memory_out = CQSA_MEMORY_MAPPED;
  cqsa_status status = CQSA_OK;
  for_parts(outputs, whole, [&](int index, const part& x) {
    mapped_range mapping;
    if (status != CQSA_OK || is_empty(x)) return;
    if (!find_mapping(x, true, mapping)) {
      status = fail(CQSA_ERROR_INVALID_ARGUMENT,
                    "args->checkpoint is given, but args->%s is at %p, which is not in a shared mapping of a file (by "
                    "/proc/self/maps): what is finished would be lost with the process",
                    x.name, x.view.data);
      return;
    }
    const int64_t zero[4] = {};
    const extent e = extent_of(x.view, zero, x.whole);
    const auto data = reinterpret_cast<uintptr_t>(x.view.data);
    ranges_out[index - 7] = {data + static_cast<uintptr_t>(e.low), data + static_cast<uintptr_t>(e.high)};
  });
  return status;
}

}  // namespace cqsa
