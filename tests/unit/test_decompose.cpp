// SPDX-License-Identifier: Apache-2.0
// src/ops/attention/decompose.h: every pair of the square in exactly one task, against bitmaps where N is small, and by
// areas and single pairs where it is not; lists and ownership against an oracle that materialises them row by row.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include "ops/attention/decompose.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace cqsa;

constexpr int64_t canary = -0x5ca1ab1e;

std::string name_of(const cqs_shape& shape, int64_t task = -1) {
  std::string text = "seqlen " + std::to_string(shape.seqlen) + " c " + std::to_string(shape.c) + " itr " +
                     std::to_string(shape.itr) + " alignment " + std::to_string(shape.alignment);
  return task < 0 ? text : text + " task " + std::to_string(task);
}

// Reads the tasks of one shape into buffers of exactly the promised size, with one element of canary behind.
class reader {
 public:
  explicit reader(const cqs_shape& shape)
      : shape_(shape), max_rows_(cqs_max_rows(shape)), segments_(cqs_max_segments(shape) + 1),
        blocks_(cqs_max_blocks(shape) + 1) {}

  // "" or what is wrong with the task in itself.
  std::string read(int64_t task) {
    segments_.back().position = canary;
    blocks_.back().q_pos = canary;
    num_segments = cqs_task_segments(shape_, task, segments_.data());
    num_blocks = cqs_task_blocks(shape_, task, blocks_.data());
    std::string fault = fault_of_counts();
    if (fault.empty()) fault = fault_of_segments();
    if (fault.empty()) fault = fault_of_blocks();
    return fault.empty() ? fault : name_of(shape_, task) + ": " + fault;
  }

  const cqs_segment& segment(int64_t i) const { return segments_[i]; }
  const cqs_block& block(int64_t i) const { return blocks_[i]; }

  int64_t area() const {
    int64_t sum = 0;
    for (int64_t i = 0; i < num_blocks; ++i) sum += blocks_[i].q_len * blocks_[i].k_len;
    return sum;
  }

  int hits(int64_t q, int64_t k) const {
    int count = 0;
    for (int64_t i = 0; i < num_blocks; ++i) {
      const cqs_block& b = blocks_[i];
      count += q >= b.q_pos && q - b.q_pos < b.q_len && k >= b.k_pos && k - b.k_pos < b.k_len;
    }
    return count;
  }

  int64_t num_segments = 0, num_blocks = 0, rows = 0;

 private:
  std::string fault_of_counts() const {
    if (num_segments < 0 || num_segments >= int64_t(segments_.size())) return "too many segments";
    if (num_blocks < 0 || num_blocks >= int64_t(blocks_.size())) return "too many blocks";
    if (segments_.back().position != canary || blocks_.back().q_pos != canary) return "written past the bound";
    if (num_segments == 0 && num_blocks != 0) return "blocks without segments";
    return "";
  }

  std::string fault_of_segments() {
    rows = 0;
    sorted_.clear();
    for (int64_t i = 0; i < num_segments; ++i) {
      const cqs_segment& s = segments_[i];
      if (s.length <= 0 || s.position < 0 || s.position > shape_.seqlen - s.length) return "segment out of range";
      if (s.row != rows) return "rows not compact";
      if (i > 0 && segments_[i - 1].position + segments_[i - 1].length == s.position) return "segments not joined";
      rows += s.length;
      sorted_.push_back(s);
    }
    if (rows > max_rows_) return "too many rows";
    std::sort(sorted_.begin(), sorted_.end(), [](auto& a, auto& b) { return a.position < b.position; });
    for (size_t i = 1; i < sorted_.size(); ++i)
      if (sorted_[i].position < sorted_[i - 1].position + sorted_[i - 1].length) return "segments overlap";
    return "";
  }

  bool inside_a_segment(int64_t position, int64_t length, int64_t row) const {
    for (int64_t i = 0; i < num_segments; ++i) {
      const cqs_segment& s = segments_[i];
      if (row >= s.row && row - s.row <= s.length - length) return position - s.position == row - s.row;
    }
    return false;
  }

  std::string fault_of_blocks() const {
    for (int64_t i = 0; i < num_blocks; ++i) {
      const cqs_block& b = blocks_[i];
      if (b.q_len <= 0 || b.k_len <= 0) return "empty block";
      if (!inside_a_segment(b.k_pos, b.k_len, b.k_row)) return "key range not in a segment";
      if (i > 0 && blocks_[i - 1].q_row == b.q_row) {
        const cqs_block& before = blocks_[i - 1];
        if (b.q_pos != before.q_pos || b.q_len != before.q_len) return "query ranges neither equal nor disjoint";
        if (b.k_row < before.k_row + before.k_len) return "key ranges not ascending";
        if (b.k_row == before.k_row + before.k_len && b.k_pos == before.k_pos + before.k_len) return "blocks not joined";
      } else {
        if (i > 0 && b.q_row < blocks_[i - 1].q_row + blocks_[i - 1].q_len) return "query ranges not ascending";
        if (!inside_a_segment(b.q_pos, b.q_len, b.q_row)) return "query range not in a segment";
      }
    }
    return "";
  }

  cqs_shape shape_;
  int64_t max_rows_;
  std::vector<cqs_segment> segments_;
  std::vector<cqs_block> blocks_;
  std::vector<cqs_segment> sorted_;
};

// The oracle: rows one by one, each with the answer, for every level, to "which chunk, and is it the task's own".
struct oracle_row {
  int64_t position;
  std::vector<int64_t> chunk;
};

std::vector<int64_t> oracle_chunk_lengths(int64_t rows, int64_t c, int64_t alignment) {
  int64_t unit = alignment;
  if (rows < c * unit) {
    unit = 1;
    while (alignment % (2 * unit) == 0 && rows >= c * 2 * unit) unit *= 2;
  }
  std::vector<int64_t> lengths(c);
  int64_t left = rows;
  for (int64_t turn = 0; left >= unit; ++turn, left -= unit) lengths[turn % c] += unit;
  lengths[c - 1] += left;
  return lengths;
}

std::vector<int64_t> oracle_digits(const cqs_shape& shape, int64_t task) {
  std::vector<int64_t> digits;
  for (int level = 0; level < shape.itr; ++level, task /= shape.c) digits.insert(digits.begin(), task % shape.c);
  return digits;
}

std::vector<oracle_row> oracle_list(const cqs_shape& shape, int64_t task) {
  const quorum_set& set = *find_quorum_set(shape.c);
  std::vector<oracle_row> list(shape.seqlen);
  for (int64_t i = 0; i < shape.seqlen; ++i) list[i].position = i;
  for (int64_t digit : oracle_digits(shape, task)) {
    std::vector<std::vector<oracle_row>> chunks;
    size_t next = 0;
    for (int64_t length : oracle_chunk_lengths(list.size(), shape.c, shape.alignment)) {
      chunks.emplace_back(list.begin() + next, list.begin() + next + length);
      for (oracle_row& row : chunks.back()) row.chunk.push_back(chunks.size() - 1);
      next += length;
    }
    list.clear();
    for (int m = 0; m < set.l; ++m) {
      const auto& chunk = chunks[(digit + set.members[m]) % shape.c];
      list.insert(list.end(), chunk.begin(), chunk.end());
    }
  }
  return list;
}

bool oracle_owns(const std::vector<int64_t>& digits, const oracle_row& q, const oracle_row& k) {
  for (size_t level = 0; level < digits.size(); ++level)
    if (q.chunk[level] == k.chunk[level] && q.chunk[level] != digits[level]) return false;
  return true;
}

// The task that owns a pair: the search goes down the levels, trying all c sub tasks.
int64_t oracle_owner(const cqs_shape& shape, int64_t q, int64_t k) {
  int64_t owner = 0;
  for (int level = 1; level <= shape.itr; ++level) {
    cqs_shape prefix = shape;
    prefix.itr = level;
    int64_t found = -1;
    for (int64_t task = owner * shape.c; task < (owner + 1) * shape.c && found < 0; ++task) {
      const oracle_row* q_row = nullptr;
      const oracle_row* k_row = nullptr;
      const auto list = oracle_list(prefix, task);
      for (const oracle_row& row : list) {
        if (row.position == q) q_row = &row;
        if (row.position == k) k_row = &row;
      }
      if (q_row && k_row && oracle_owns(oracle_digits(prefix, task), *q_row, *k_row)) found = task;
    }
    if (found < 0) return -1;
    owner = found;
  }
  return owner;
}

std::string fault_against_oracle(const cqs_shape& shape, int64_t task) {
  reader r(shape);
  const std::string fault = r.read(task);
  if (!fault.empty()) return fault;
  const auto list = oracle_list(shape, task);
  const int64_t rows = list.size();
  if (r.rows != rows) return name_of(shape, task) + ": list length";
  for (int64_t i = 0; i < r.num_segments; ++i)
    for (int64_t j = 0; j < r.segment(i).length; ++j)
      if (list[r.segment(i).row + j].position != r.segment(i).position + j) return name_of(shape, task) + ": list";

  std::vector<uint8_t> hit(rows * rows);
  for (int64_t i = 0; i < r.num_blocks; ++i)
    for (int64_t q = 0; q < r.block(i).q_len; ++q)
      for (int64_t k = 0; k < r.block(i).k_len; ++k) ++hit[(r.block(i).q_row + q) * rows + r.block(i).k_row + k];
  const auto digits = oracle_digits(shape, task);
  for (int64_t q = 0; q < rows; ++q)
    for (int64_t k = 0; k < rows; ++k)
      if (hit[q * rows + k] != oracle_owns(digits, list[q], list[k])) return name_of(shape, task) + ": ownership";
  return "";
}

// Reads all tasks; "" if each is in order, every pair is hit once and the longest list is as long as promised.
std::string fault_of_cover(const cqs_shape& shape) {
  const int64_t n = shape.seqlen;
  std::vector<uint8_t> hit(n * n);
  reader r(shape);
  int64_t area = 0, longest = 0;
  for (int64_t task = 0; task < cqs_num_tasks(shape); ++task) {
    const std::string fault = r.read(task);
    if (!fault.empty()) return fault;
    area += r.area();
    if (area > n * n) return name_of(shape, task) + ": pairs owned twice";
    longest = std::max(longest, r.rows);
    for (int64_t i = 0; i < r.num_blocks; ++i) {
      const cqs_block& b = r.block(i);
      for (int64_t q = b.q_pos; q < b.q_pos + b.q_len; ++q)
        std::fill_n(hit.begin() + q * n + b.k_pos, b.k_len, uint8_t{1});
    }
  }
  // As many as there are and all hit: each exactly once.
  if (area != n * n || std::count(hit.begin(), hit.end(), 1) != n * n) return name_of(shape) + ": not covered";
  if (longest != cqs_max_rows(shape)) return name_of(shape) + ": longest list";
  return "";
}

struct pair_probe {
  int64_t q, k;
  int hits = 0;
};

// The same for N beyond bitmaps: areas add up to N * N, and probed pairs are hit once.
std::string fault_of_large_cover(const cqs_shape& shape, std::mt19937_64& random) {
  std::vector<pair_probe> probes;
  std::uniform_int_distribution<int64_t> position(0, shape.seqlen - 1);
  for (int i = 0; i < 12; ++i) probes.push_back({position(random), position(random)});
  for (int i = 0; i < 4; ++i) probes.push_back({probes[i].q, std::min(probes[i].q + i, shape.seqlen - 1)});
  reader r(shape);
  int64_t area = 0, longest = 0;
  for (int64_t task = 0; task < cqs_num_tasks(shape); ++task) {
    const std::string fault = r.read(task);
    if (!fault.empty()) return fault;
    area += r.area();
    longest = std::max(longest, r.rows);
    for (pair_probe& probe : probes) probe.hits += r.hits(probe.q, probe.k);
  }
  if (area != shape.seqlen * shape.seqlen) return name_of(shape) + ": area";
  for (const pair_probe& probe : probes)
    if (probe.hits != 1) return name_of(shape) + ": a pair is hit " + std::to_string(probe.hits) + " times";
  return longest == cqs_max_rows(shape) ? "" : name_of(shape) + ": longest list";
}

int64_t power(int64_t base, int exponent) {
  int64_t result = 1;
  while (exponent-- > 0) result *= base;
  return result;
}

}  // namespace

TEST_CASE("quorum sets are perfect difference sets", "[decompose]") {
  int32_t previous = 0;
  for (int index = 0; index < num_quorum_sets; ++index) {
    const quorum_set& set = quorum_set_at(index);
    INFO("c " << set.c);
    REQUIRE(set.c > previous);
    REQUIRE(set.c == set.l * set.l - set.l + 1);
    REQUIRE(find_quorum_set(set.c) == &set);
    REQUIRE(set.members[0] == 0);
    REQUIRE(std::is_sorted(set.members, set.members + set.l));
    REQUIRE(set.members[set.l - 1] < set.c);
    std::vector<int> differences(set.c);
    for (int i = 0; i < set.l; ++i)
      for (int j = 0; j < set.l; ++j) ++differences[(set.members[i] - set.members[j] + set.c) % set.c];
    REQUIRE(differences[0] == set.l);
    REQUIRE(std::count(differences.begin() + 1, differences.end(), 1) == set.c - 1);
    previous = set.c;
  }
  for (int32_t c : {-3, 0, 1, 2, 4, 43, 111, 134}) REQUIRE(find_quorum_set(c) == nullptr);
}

TEST_CASE("number of tasks", "[decompose]") {
  REQUIRE(cqs_num_tasks({100, 7, 0, 1}) == 1);
  REQUIRE(cqs_num_tasks({100, 7, 1, 1}) == 7);
  REQUIRE(cqs_num_tasks({0, 133, 3, 1}) == 2352637);
  REQUIRE(cqs_num_tasks({0, 3, 39, 1}) == 4052555153018976267);
  REQUIRE(cqs_num_tasks({0, 3, 40, 1}) == std::numeric_limits<int64_t>::max());
  REQUIRE(cqs_num_tasks({0, 133, 1000, 1}) == std::numeric_limits<int64_t>::max());
  REQUIRE(cqs_num_tasks({0, 1, 2147483647, 1}) == 1);
  REQUIRE(cqs_num_tasks({100, 0, 1, 1}) == 0);
  REQUIRE(cqs_num_tasks({100, 7, -1, 1}) == 0);
}

TEST_CASE("shapes and tasks that do not exist are empty", "[decompose]") {
  cqs_segment segments[64];
  cqs_block blocks[64];
  for (const cqs_shape& shape : {cqs_shape{100, 5, 1, 1}, {100, 7, -1, 1}, {100, 7, 4, 1}, {-1, 7, 1, 1}, {0, 7, 1, 1}}) {
    INFO(name_of(shape));
    REQUIRE(cqs_max_segments(shape) == 0);
    REQUIRE(cqs_max_blocks(shape) == 0);
    REQUIRE(cqs_max_rows(shape) == 0);
    REQUIRE(cqs_task_segments(shape, 0, segments) == 0);
    REQUIRE(cqs_task_blocks(shape, 0, blocks) == 0);
  }
  for (int64_t task : {int64_t{-1}, int64_t{7}, std::numeric_limits<int64_t>::max()}) {
    REQUIRE(cqs_task_segments({100, 7, 1, 1}, task, segments) == 0);
    REQUIRE(cqs_task_blocks({100, 7, 1, 1}, task, blocks) == 0);
  }
}

TEST_CASE("a small task, spelled out", "[decompose]") {
  // Chunks of 3, 3, 2, 2, 2, 2, 2; task 5 takes 5, 6 and 1, and owns 5 x 5 but neither 6 x 6 nor 1 x 1.
  const cqs_shape shape{16, 7, 1, 1};
  reader r(shape);
  REQUIRE(r.read(5) == "");
  REQUIRE(r.num_segments == 2);
  REQUIRE((r.segment(0).position == 12 && r.segment(0).length == 4 && r.segment(0).row == 0));
  REQUIRE((r.segment(1).position == 3 && r.segment(1).length == 3 && r.segment(1).row == 4));
  const int64_t expected[][6] = {{12, 2, 0, 12, 4, 0}, {12, 2, 0, 3, 3, 4}, {14, 2, 2, 12, 2, 0},
                                 {14, 2, 2, 3, 3, 4},  {3, 3, 4, 12, 4, 0}};
  REQUIRE(r.num_blocks == 5);
  for (int i = 0; i < 5; ++i) {
    const cqs_block& b = r.block(i);
    const int64_t got[] = {b.q_pos, b.q_len, b.q_row, b.k_pos, b.k_len, b.k_row};
    REQUIRE(std::equal(got, got + 6, expected[i]));
  }
}

TEST_CASE("every pair in exactly one task", "[decompose]") {
  for (int index = 0; index < num_quorum_sets; ++index) {
    const quorum_set& set = quorum_set_at(index);
    const int max_itr = set.c <= 31 ? 3 : 2;
    for (int itr = 0; itr <= max_itr; ++itr)
      for (int64_t alignment : {1, 16, 48, 128}) {
        std::vector<int64_t> lengths = {0, 1, 2, set.c - 1, set.c, 211, 401, 2 * set.c + 5, 16 * set.c + 9};
        // Thousands of tasks cost the same whatever N is: fewer shapes there.
        if (power(set.c, itr) < 2000) lengths.insert(lengths.end(), {3, set.c + 1, 97, 128, 293, 400});
        for (int64_t n : lengths)
          if (n <= 1000) REQUIRE(fault_of_cover({n, set.c, itr, alignment}) == "");
      }
  }
}

TEST_CASE("every length up to two hundred", "[decompose]") {
  for (int32_t c : {3, 7, 13})
    for (int itr = 1; itr <= (c == 3 ? 3 : 2); ++itr)
      for (int64_t n = 0; n <= 200; ++n) REQUIRE(fault_of_cover({n, c, itr, n % 2 ? 1 : 4}) == "");
}

TEST_CASE("every pair in exactly one task, long sequences", "[decompose]") {
  const uint64_t seed = 20240607;
  INFO("seed " << seed);
  std::mt19937_64 random(seed);
  for (int index = 0; index < num_quorum_sets; ++index) {
    const quorum_set& set = quorum_set_at(index);
    for (int itr = 1; itr <= (set.c <= 21 ? 3 : 2); ++itr)
      for (const auto& [n, alignment] : {std::pair<int64_t, int64_t>{7919, 16}, {1000003, 128}, {2147483647, 1}})
        REQUIRE(fault_of_large_cover({n, set.c, itr, alignment}, random) == "");
  }
}

TEST_CASE("lists and ownership agree with the row by row oracle", "[decompose]") {
  const uint64_t seed = 7;
  INFO("seed " << seed);
  std::mt19937_64 random(seed);
  for (int index = 0; index < num_quorum_sets; ++index) {
    const int32_t c = quorum_set_at(index).c;
    for (int itr = 0; itr <= cqs_max_itr; ++itr)
      for (int64_t alignment : {1, 6, 16, 128})
        for (int64_t n : {int64_t{1}, int64_t{c}, int64_t{97}, int64_t{911}, int64_t{16 * c + 7}})
          for (int trial = 0; trial < 3; ++trial) {
            const cqs_shape shape{n, c, itr, alignment};
            REQUIRE(fault_against_oracle(shape, int64_t(random() % cqs_num_tasks(shape))) == "");
          }
  }
}

TEST_CASE("the deepest shape: owners by the oracle, parents by their children", "[decompose]") {
  const uint64_t seed = 133;
  INFO("seed " << seed);
  std::mt19937_64 random(seed);
  for (int32_t c : {91, 133}) {
    const cqs_shape small{701, c, 3, 1};
    reader r(small);
    for (int trial = 0; trial < 6; ++trial) {
      const int64_t q = random() % 701, k = trial == 0 ? q : random() % 701;
      const int64_t owner = oracle_owner(small, q, k);
      REQUIRE(owner >= 0);
      REQUIRE(r.read(owner) == "");
      REQUIRE(r.hits(q, k) == 1);
    }
    const cqs_shape deep{3000000019, c, 3, 128};
    cqs_shape parent = deep;
    parent.itr = 2;
    reader child(deep), whole(parent);
    for (int trial = 0; trial < 20; ++trial) {
      const int64_t task = trial == 0 ? cqs_num_tasks(parent) - 1 : int64_t(random() % cqs_num_tasks(parent));
      REQUIRE(whole.read(task) == "");
      int64_t area = 0;
      for (int64_t digit = 0; digit < c; ++digit) {
        REQUIRE(child.read(task * c + digit) == "");
        area += child.area();
      }
      REQUIRE(area == whole.area());
    }
  }
}

TEST_CASE("no arithmetic overflows at absurd lengths", "[decompose]") {
  const int64_t most = std::numeric_limits<int64_t>::max();
  for (int32_t c : {3, 57, 133})
    for (int itr = 0; itr <= cqs_max_itr; ++itr)
      for (int64_t alignment : std::initializer_list<int64_t>{-5, 0, 1, 128, int64_t{1} << 50, int64_t{1} << 62, most}) {
        const cqs_shape shape{most, c, itr, alignment};
        reader r(shape);
        for (int64_t task : {int64_t{0}, cqs_num_tasks(shape) / 2, cqs_num_tasks(shape) - 1}) REQUIRE(r.read(task) == "");
      }
}

TEST_CASE("perfect balance at depth 1", "[decompose]") {
  for (int index = 0; index < num_quorum_sets; ++index) {
    const quorum_set& set = quorum_set_at(index);
    const cqs_shape shape{set.c * int64_t{640}, set.c, 1, 128};
    reader r(shape);
    bool all = true;
    for (int64_t task = 0; task < set.c; ++task) {
      REQUIRE(r.read(task) == "");
      all = all && r.area() == shape.seqlen / set.c * shape.seqlen && r.rows == 640 * set.l;
      all = all && r.num_segments <= set.l && r.num_blocks <= set.c;
    }
    REQUIRE(all);
    REQUIRE(cqs_max_segments(shape) == set.l);
    REQUIRE(cqs_max_blocks(shape) == set.c);
  }
}

TEST_CASE("balance at depth 2", "[decompose]") {
  for (const auto& [c, expected] : {std::pair<int32_t, double>{3, 1.33}, {7, 1.29}, {13, 1.23}}) {
    const cqs_shape shape{int64_t{c} * c * 60, c, 2, 1};
    reader r(shape);
    int64_t largest = 0;
    for (int64_t task = 0; task < cqs_num_tasks(shape); ++task) {
      REQUIRE(r.read(task) == "");
      largest = std::max(largest, r.area());
    }
    const double mean = double(shape.seqlen) * double(shape.seqlen) / double(cqs_num_tasks(shape));
    INFO("c " << c << " ratio " << double(largest) / mean);
    REQUIRE(std::abs(double(largest) / mean - expected) < 0.02 * expected);
  }
}

TEST_CASE("lists shrink by l / c at each depth", "[decompose]") {
  for (int index = 0; index < num_quorum_sets; ++index) {
    const quorum_set& set = quorum_set_at(index);
    for (int itr = 0; itr <= cqs_max_itr; ++itr) {
      const cqs_shape shape{power(set.c, itr) * 5, set.c, itr, 1};
      reader r(shape);
      REQUIRE(cqs_max_rows(shape) == power(set.l, itr) * 5);
      REQUIRE(cqs_max_segments(shape) <= itr * (set.l - 1) + 1);
      const int64_t tasks = cqs_num_tasks(shape);
      for (int64_t task = 0; task < tasks; task += std::max<int64_t>(1, tasks / 97)) {
        REQUIRE(r.read(task) == "");
        REQUIRE(r.rows == power(set.l, itr) * 5);
      }
    }
  }
}

TEST_CASE("chunk borders keep to the alignment", "[decompose]") {
  struct sample {
    int64_t seqlen, alignment, kept;
  };
  for (int index = 0; index < num_quorum_sets; ++index) {
    const int64_t c = quorum_set_at(index).c;
    // The last three have fewer than c whole units: 48 = 3 * 16 gives way to 16, 128 to 64, and anything to 1 in the end.
    for (const sample& s : {sample{c * 128, 128, 128}, sample{c * 128 + 77, 128, 128}, sample{c * 300 + 5, 48, 48},
                            sample{c * 48 - 1, 48, 16}, sample{c * 128 - 1, 128, 64}, sample{c - 1, 128, 1}}) {
      const cqs_shape shape{s.seqlen, int32_t(c), 1, s.alignment};
      reader r(shape);
      const auto fits = [&](int64_t position) { return position % s.kept == 0 || position == s.seqlen; };
      bool all = true;
      for (int64_t task = 0; task < c; ++task) {
        REQUIRE(r.read(task) == "");
        for (int64_t i = 0; i < r.num_blocks; ++i) {
          const cqs_block& b = r.block(i);
          all = all && fits(b.q_pos) && fits(b.q_pos + b.q_len) && fits(b.k_pos) && fits(b.k_pos + b.k_len);
        }
      }
      INFO(name_of(shape));
      REQUIRE(all);
    }
  }
}
