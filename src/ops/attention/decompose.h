// SPDX-License-Identifier: Apache-2.0
// Cyclic quorum sets: the sequence is cut into c chunks; task i takes the chunks {(i + s) mod c : s in S}, S a perfect
// difference set, so every ordered pair of different chunks meets in exactly one task, and the diagonal pair of chunk i is
// task i's. Depth itr re-applies this to a task's own list of rows (its length is the new N).
//
// Chunks: with U = N / alignment whole units, the first U % c chunks have one unit more than the others, and the tail of
// N % alignment rows goes to the last chunk. Where U < c the alignment gives way: the largest power of two that divides it
// and still leaves c whole units takes its place, and 1 if there is none (N < c: N chunks of one row, the others empty). The
// rule is applied afresh at every depth, in rows of that depth's list.
// Lists: a task's chunks in the order of S, so its own chunk i first, wrapping past chunk c-1 to 0.
// Task numbers: the digits to base c are the numbers at each level, most significant first; sub tasks of one task are
// neighbours.
// Ownership: a pair inside one chunk of a level belongs to the task of the chunk's number there; a deep task owns a pair
// if it does so at every level.
//
// Everything about a task follows from its number, on the stack. A shape whose c is not registered, whose itr is not
// within 0..cqs_max_itr or whose seqlen is negative has no segments, blocks or rows; nor has a task that does not exist.
#pragma once
#include <cstdint>

namespace cqsa {

struct quorum_set {
  int32_t c;               // chunks = tasks per level = l*l - l + 1
  int32_t l;               // chunks in a task
  const int32_t* members;  // S, ascending, contains 0
};

inline constexpr int num_quorum_sets = 9;
inline constexpr int cqs_max_itr = 3;
const quorum_set& quorum_set_at(int index);      // ascending c: 3 7 13 21 31 57 73 91 133
const quorum_set* find_quorum_set(int32_t c);    // nullptr when c is not registered

// A run of consecutive positions of the sequence, as part of a task's list of rows.
struct cqs_segment {
  int64_t position;  // first position in the sequence
  int64_t length;
  int64_t row;       // where the run begins in the task's own compact list of rows
};

// A rectangle of work: runs of consecutive positions that are runs of the task's rows too, each inside one segment.
struct cqs_block {
  int64_t q_pos, q_len, q_row;
  int64_t k_pos, k_len, k_row;
};

struct cqs_shape {
  int64_t seqlen;     // N = seqlen_q = seqlen_k
  int32_t c, itr;     // itr 0: one task, the whole square
  int64_t alignment;  // chunk borders are multiples of it where N allows (the rule is above); 1 or less: none
};

// c^itr. Saturates at INT64_MAX. 0 for a c below 1 or a negative itr.
int64_t cqs_num_tasks(const cqs_shape& shape);
// Upper bounds over all tasks, cheap to compute, for sizing buffers: segments, blocks, rows.
int64_t cqs_max_segments(const cqs_shape& shape);  // itr * (l - 1) + 1, but no more than N
int64_t cqs_max_blocks(const cqs_shape& shape);    // c at depth 1, below (itr * (l - 1) + 1)^2 deeper
int64_t cqs_max_rows(const cqs_shape& shape);      // the exact maximum

// The segments of one task, adjacent runs joined where the list stays in order; returns how many (<= cqs_max_segments).
// Rows are numbered compactly from 0 in list order. 0 segments: an empty task.
int64_t cqs_task_segments(const cqs_shape& shape, int64_t task, cqs_segment* segments_out);

// The blocks of one task: all (q, k) pairs of its list that this task owns at every level (foreign diagonal pairs removed),
// as rectangles; what could be joined is. Blocks with the same query range stand next to each other; query ranges are equal
// or disjoint and ascend in row, as do the key ranges of one query range. Returns how many (<= cqs_max_blocks); 0 also for a
// task that has rows but owns no pair of them (a list shorter than c was cut). Over all tasks of a shape the blocks tile the
// whole N x N square exactly once.
int64_t cqs_task_blocks(const cqs_shape& shape, int64_t task, cqs_block* blocks_out);

}  // namespace cqsa
