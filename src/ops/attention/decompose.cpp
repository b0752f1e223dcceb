// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/decompose.h"

#include <algorithm>
#include <array>
#include <limits>

namespace cqsa {

namespace {

constexpr int32_t s3[] = {0, 1};
constexpr int32_t s7[] = {0, 1, 3};
constexpr int32_t s13[] = {0, 1, 3, 9};
constexpr int32_t s21[] = {0, 1, 4, 14, 16};
constexpr int32_t s31[] = {0, 1, 3, 8, 12, 18};
constexpr int32_t s57[] = {0, 1, 3, 13, 32, 36, 43, 52};
constexpr int32_t s73[] = {0, 1, 3, 7, 15, 31, 36, 54, 63};
constexpr int32_t s91[] = {0, 20, 28, 37, 60, 70, 73, 84, 85, 89};
constexpr int32_t s133[] = {0, 1, 3, 12, 20, 34, 38, 81, 88, 94, 104, 109};

constexpr quorum_set sets[num_quorum_sets] = {
    {3, 2, s3},   {7, 3, s7},   {13, 4, s13},  {21, 5, s21},    {31, 6, s31},
    {57, 8, s57}, {73, 9, s73}, {91, 10, s91}, {133, 12, s133},
};

constexpr int max_l = 12;

// Cutting a list of p pieces into l disjoint ranges gives a piece for each range and one more for each border between
// pieces that a range spans: l + (p - 1) at most.
constexpr int max_pieces_of(int l, int itr) { return itr * (l - 1) + 1; }
constexpr int max_pieces = max_pieces_of(max_l, cqs_max_itr);
static_assert(max_pieces <= 64, "a set of pieces is a 64-bit mask");

using piece_mask = uint64_t;

// A run of positions that lies in one chunk at every level. slot[level] is the chunk's place in S there; S begins with 0,
// so slot 0 is the task's own chunk.
struct piece {
  int64_t position, length, row;
  uint8_t slot[cqs_max_itr];
};

struct piece_list {
  std::array<piece, max_pieces> at;
  int count = 0;
  int64_t rows = 0;
};

// The borders of the chunks of a list.
class chunking {
 public:
  chunking(int64_t rows, int32_t c, int64_t alignment) : rows_(rows), c_(c), unit_(unit_of(rows, c, alignment)) {
    per_chunk_ = rows / unit_ / c;
    longer_ = rows / unit_ % c;
  }

  int64_t begin(int64_t chunk) const {
    return chunk == c_ ? rows_ : (chunk * per_chunk_ + std::min(chunk, longer_)) * unit_;
  }
  int64_t length(int64_t chunk) const { return begin(chunk + 1) - begin(chunk); }

 private:
  static int64_t unit_of(int64_t rows, int32_t c, int64_t alignment) {
    int64_t unit = std::max<int64_t>(alignment, 1);
    if (rows / unit >= c) return unit;
    unit &= -unit;
    while (unit > 1 && rows / unit < c) unit /= 2;
    return unit;
  }

  int64_t rows_, c_, unit_, per_chunk_, longer_;
};

int64_t chunk_at(const quorum_set& set, int64_t task, int slot) {
  const int64_t chunk = task + set.members[slot];
  return chunk < set.c ? chunk : chunk - set.c;
}

const quorum_set* set_of(const cqs_shape& shape) {
  if (shape.seqlen < 0 || shape.itr < 0 || shape.itr > cqs_max_itr) return nullptr;
  return find_quorum_set(shape.c);
}

// Rows [from, to) of a list, appended to the sub task's list as its chunk in that slot.
void append_rows(const piece_list& parent, int64_t from, int64_t to, int level, int slot, piece_list& child) {
  for (int i = 0; i < parent.count; ++i) {
    const piece& whole = parent.at[i];
    const int64_t lo = std::max(from, whole.row);
    const int64_t hi = std::min(to, whole.row + whole.length);
    if (lo >= hi) continue;
    piece& part = child.at[child.count++];
    part = whole;
    part.position += lo - whole.row;
    part.length = hi - lo;
    part.row = child.rows;
    part.slot[level] = static_cast<uint8_t>(slot);
    child.rows += part.length;
  }
}

void descend(const piece_list& parent, const quorum_set& set, int64_t alignment, int level, int64_t task,
             piece_list& child) {
  const chunking chunks(parent.rows, set.c, alignment);
  child.count = 0;
  child.rows = 0;
  for (int slot = 0; slot < set.l; ++slot) {
    const int64_t chunk = chunk_at(set, task, slot);
    append_rows(parent, chunks.begin(chunk), chunks.begin(chunk + 1), level, slot, child);
  }
}

// The task's list, left in one of two lists that take turns as parent and child.
const piece_list& pieces_of(const cqs_shape& shape, const quorum_set& set, int64_t task, piece_list (&lists)[2]) {
  piece_list& root = lists[0];
  root.at[0] = {0, shape.seqlen, 0, {}};
  root.count = shape.seqlen > 0;
  root.rows = shape.seqlen;

  int64_t sub_tasks = cqs_num_tasks(shape);
  for (int level = 0; level < shape.itr; ++level) {
    sub_tasks /= set.c;
    descend(lists[level % 2], set, shape.alignment, level, task / sub_tasks % set.c, lists[(level + 1) % 2]);
  }
  return lists[shape.itr % 2];
}

bool exists(const cqs_shape& shape, int64_t task) { return task >= 0 && task < cqs_num_tasks(shape); }

// Neighbours in the list are always neighbours in rows.
bool joins(const piece_list& list, int i) {
  return i + 1 < list.count && list.at[i].position + list.at[i].length == list.at[i + 1].position;
}

// For each piece, the pieces that it makes owned pairs with: all but those of its own chunk where that is another task's.
void owned_pairs(const piece_list& list, int itr, std::array<piece_mask, max_pieces>& owned) {
  const piece_mask all = list.count < 64 ? (piece_mask{1} << list.count) - 1 : ~piece_mask{0};
  std::fill_n(owned.begin(), list.count, all);
  for (int level = 0; level < itr; ++level) {
    piece_mask foreign[max_l] = {};
    for (int i = 0; i < list.count; ++i) {
      const int slot = list.at[i].slot[level];
      if (slot != 0) foreign[slot] |= piece_mask{1} << i;
    }
    for (int i = 0; i < list.count; ++i) owned[i] &= ~foreign[list.at[i].slot[level]];
  }
}

// The pieces first..last, which join, against each run of the keys' pieces.
int64_t write_blocks(const piece_list& list, int first, int last, piece_mask keys, cqs_block* out) {
  const piece& q = list.at[first];
  const int64_t q_len = list.at[last].row + list.at[last].length - q.row;
  int64_t count = 0;
  for (int k = 0; k < list.count; ++k) {
    if (!(keys >> k & 1)) continue;
    const piece& begin = list.at[k];
    while (joins(list, k) && keys >> (k + 1) & 1) ++k;
    const int64_t k_len = list.at[k].row + list.at[k].length - begin.row;
    out[count++] = {q.position, q_len, q.row, begin.position, k_len, begin.row};
  }
  return count;
}

// Task lengths of one level take few values: at most l + 1 counts of longer chunks, with or without the tail.
struct lengths {
  std::array<int64_t, 2 * (max_l + 1)> at;
  int count = 0;

  void add(int64_t length) {
    if (std::find(at.begin(), at.begin() + count, length) == at.begin() + count) at[count++] = length;
  }
};

int64_t max_rows_of(const quorum_set& set, int64_t rows, int itr, int64_t alignment) {
  if (itr == 0 || rows == 0) return rows;
  const chunking chunks(rows, set.c, alignment);
  lengths seen;
  for (int64_t task = 0; task < set.c; ++task) {
    int64_t length = 0;
    for (int slot = 0; slot < set.l; ++slot) length += chunks.length(chunk_at(set, task, slot));
    seen.add(length);
  }
  int64_t longest = 0;
  // Not only of the longest: a shorter list may fall back to a smaller alignment or not, so the maximum is not monotonic.
  for (int i = 0; i < seen.count; ++i) longest = std::max(longest, max_rows_of(set, seen.at[i], itr - 1, alignment));
  return longest;
}

}  // namespace

const quorum_set& quorum_set_at(int index) { return sets[index]; }

const quorum_set* find_quorum_set(int32_t c) {
  for (const quorum_set& set : sets)
    if (set.c == c) return &set;
  return nullptr;
}

int64_t cqs_num_tasks(const cqs_shape& shape) {
  constexpr int64_t limit = std::numeric_limits<int64_t>::max();
  if (shape.c < 1 || shape.itr < 0) return 0;
  if (shape.c == 1) return 1;
  int64_t tasks = 1;
  for (int32_t level = 0; level < shape.itr; ++level) {
    if (tasks > limit / shape.c) return limit;
    tasks *= shape.c;
  }
  return tasks;
}

int64_t cqs_max_segments(const cqs_shape& shape) {
  const quorum_set* set = set_of(shape);
  if (!set) return 0;
  return std::min<int64_t>(shape.seqlen, max_pieces_of(set->l, shape.itr));
}

int64_t cqs_max_blocks(const cqs_shape& shape) {
  const quorum_set* set = set_of(shape);
  if (!set) return 0;
  // Each of the l - 1 foreign chunks of the last level takes away at least the pair of a piece with itself; where one is
  // empty there is a piece less, which takes away more.
  const int64_t pieces = max_pieces_of(set->l, shape.itr);
  const int64_t blocks = pieces * pieces - (shape.itr > 0 ? set->l - 1 : 0);
  return shape.seqlen < pieces ? std::min(blocks, shape.seqlen * shape.seqlen) : blocks;
}

int64_t cqs_max_rows(const cqs_shape& shape) {
  const quorum_set* set = set_of(shape);
  return set ? max_rows_of(*set, shape.seqlen, shape.itr, shape.alignment) : 0;
}

int64_t cqs_task_segments(const cqs_shape& shape, int64_t task, cqs_segment* segments_out) {
  const quorum_set* set = set_of(shape);
  if (!set || !exists(shape, task)) return 0;
  piece_list lists[2];
  const piece_list& list = pieces_of(shape, *set, task, lists);
  int64_t count = 0;
  for (int i = 0; i < list.count; ++i) {
    const piece& begin = list.at[i];
    while (joins(list, i)) ++i;
    segments_out[count++] = {begin.position, list.at[i].row + list.at[i].length - begin.row, begin.row};
  }
  return count;
}

int64_t cqs_task_blocks(const cqs_shape& shape, int64_t task, cqs_block* blocks_out) {
  const quorum_set* set = set_of(shape);
  if (!set || !exists(shape, task)) return 0;
  piece_list lists[2];
  const piece_list& list = pieces_of(shape, *set, task, lists);
  std::array<piece_mask, max_pieces> owned;
  owned_pairs(list, shape.itr, owned);

  int64_t count = 0;
  for (int first = 0; first < list.count; ++first) {
    int last = first;
    while (joins(list, last) && owned[last + 1] == owned[first]) ++last;
    count += write_blocks(list, first, last, owned[first], blocks_out + count);
    first = last;
  }
  return count;
}

}  // namespace cqsa
