// SPDX-License-Identifier: Apache-2.0
// What the host part of the Hopper attention asks for: every tile of queries once, blocks with even work, and boxes of q that its tensor
// has. Its port (backends/gpu/port.h) only takes down what it is asked for.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include "backends/cuda/sm90/attention_shape.h"
#include "backends/cuda/tuned.h"
#include "backends/gpu/port.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace cqsa::gpu {
namespace {

struct asked {
  int launches = 0, other = 0;  // of the Hopper kernels, and of others
  launch_shape shape{};
  sm90::params params{};
  std::vector<tensor_box> boxes;
} seen;
const device_facts facts{32, 132, 232448, 90, 90};

}  // namespace

cqsa_status launch(void*, kernel_id, const launch_shape& shape, const void* params, size_t bytes, void*) {
  if (bytes != sizeof seen.params) return ++seen.other, CQSA_OK;
  ++seen.launches, seen.shape = shape;
  std::memcpy(&seen.params, params, bytes);
  return CQSA_OK;
}
cqsa_status upload(void*, void*, const void*, uint64_t, void*) { return CQSA_OK; }
cqsa_status encode_tensor(void*, const tensor_box& box, tensor_map*) {
  seen.boxes.push_back(box);
  return CQSA_OK;
}
const device_facts& facts_of(void*) { return facts; }
cqsa_status fail(cqsa_status status, const char*, ...) { return status; }

namespace {

alignas(64) char somewhere[64];

struct shape {
  int64_t batch, heads, kv_heads, queries, keys, d;
};
cqsa_attention_leaf leaf_of(const shape& s, int32_t causal) {
  const auto view = [&](int64_t heads, int64_t rows) { return cqsa_view{somewhere, CQSA_DTYPE_BF16, 0, {heads * rows * s.d, rows * s.d, s.d, 1}}; };
  cqsa_attention_leaf a{};
  a.struct_size = sizeof a, a.chip = {90, 132, 232448, 0}, a.causal = causal;
  a.batch = s.batch, a.num_heads = s.heads, a.num_kv_heads = s.kv_heads, a.head_dim = a.head_dim_v = s.d, a.seqlen_q = s.queries, a.seqlen_k = s.keys;
  a.q = a.out = view(s.heads, s.queries), a.k = a.v = view(s.kv_heads, s.keys);
  a.softmax_scale = 1, a.window_left = a.window_right = -1;
  return a;
}
void ask(const cqsa_attention_leaf& a) {
  seen = {};
  REQUIRE(sm90_attention.probe(&a, nullptr, 0) == CQSA_OK);
  REQUIRE(sm90_attention.launch(nullptr, &a, nullptr, 0, nullptr, nullptr) == CQSA_OK);
}

// The part of the time in which blocks work; keys of each tile as in a causal problem with `past` keys in front of the first query.
double share_of_work(int64_t past, int64_t tile_queries) {
  const sm90::unit_order& o = seen.params.order;
  const uint32_t blocks = seen.shape.grid[0];
  std::vector<int> taken(o.units);
  std::vector<double> work(blocks);
  for (uint32_t b = 0; b < blocks; ++b)
    for (uint32_t turn = 0; turn < o.turns; ++turn) {
      sm90::unit_place at;
      if (!find_unit(o, blocks, b, turn, at)) continue;
      REQUIRE((at.tile < o.tiles && at.column < o.units / o.tiles));
      ++taken[at.column * o.tiles + at.tile];
      work[b] += o.longest_first ? double(past + (at.tile + 1) * tile_queries) : 1.0;
    }
  CHECK(std::all_of(taken.begin(), taken.end(), [](int n) { return n == 1; }));
  double sum = 0;
  for (const double w : work) sum += w;
  return sum / blocks / *std::max_element(work.begin(), work.end());
}

constexpr shape shapes[] = {{1, 16, 16, 16384, 16384, 128}, {4, 16, 16, 4096, 4096, 128},   {16, 16, 16, 1024, 1024, 128}, {16, 32, 32, 1024, 1024, 64},
                            {1, 32, 32, 16384, 16384, 64},  {1, 8, 8, 16384, 16384, 256},   {4, 8, 8, 4096, 4096, 256},    {8, 32, 32, 128, 32768, 128},
                            {2, 32, 32, 512, 131072, 128},  {4, 32, 32, 1024, 65536, 128},  {8, 64, 8, 128, 32768, 128},   {1, 32, 32, 4096, 131072, 128},
                            {64, 16, 16, 192, 192, 64},     {32, 32, 32, 256, 256, 128},    {1, 64, 8, 8192, 8192, 128},   {1, 32, 8, 32768, 32768, 128},
                            {3, 5, 5, 700, 900, 96},        {1, 8, 8, 215424, 1048576, 64}, {128, 32, 32, 128, 128, 128}};

TEST_CASE("hopper launch: every tile once, and blocks with even work") {
  for (const shape& s : shapes)
    for (const int32_t causal : {CQSA_CAUSAL_NONE, CQSA_CAUSAL_BOTTOM_RIGHT}) {
      INFO(s.batch << " x " << s.heads << "/" << s.kv_heads << " heads, " << s.queries << " queries, " << s.keys << " keys, head_dim " << s.d);
      ask(leaf_of(s, causal));
      REQUIRE(seen.launches == 1);
      const double share = share_of_work(s.keys - s.queries, seen.params.a.tile_queries), turns = double(seen.params.order.units) / seen.shape.grid[0];
      CAPTURE(seen.params.order.columns_at_once);
      // What is left over in the last turn is nobody's fault.
      CHECK(share >= (turns >= 2 ? 0.85 : 0.49));
    }
}

// ---------------------------------------------------------------------------------------- lengths that only the device knows

// The segments as a warp of the kernel sees them (attention_lengths.cuh), in a loop.
struct array_segments {
  const sm90::walk_rules& rules;
  const std::vector<sm90::segment_lengths>& all;
  uint32_t first = 0, level = 0, looks = 0;

  sm90::segment_work work(uint32_t segment) const { return segment < all.size() ? work_of(rules, all[segment]) : sm90::segment_work{0, 0, 0}; }
  sm90::segments_seen look(const sm90::walk_state& s) {
    sm90::segments_seen seen{0, 0};
    first = s.first, level = s.level, ++looks;
    for (uint32_t n = first; n < first + sm90::segments_at_once; ++n) {
      const sm90::segment_work now = work(n);
      seen.items += items_of(rules, now, level);
      seen.below = std::max(seen.below, level_below(now, level));
    }
    return seen;
  }
  sm90::segment_item pick(uint32_t item) const {
    for (uint32_t n = first;; ++n) {
      const sm90::segment_work now = work(n);
      const uint32_t items = items_of(rules, now, level);
      if (item < items) return {n, now.tiles, item + first_item(rules, now.tiles, level == now.pair)};
      item -= items;
    }
  }
};

struct walked {
  double share = 1, largest = 0, mean = 0;  // of the time in which blocks work; work of the largest item and of a block
  uint32_t looks = 0;                       // of a block, at 32 segments
};

// Walks all blocks over these segments, as the kernel for what was asked last does.
walked walk_all(const std::vector<sm90::segment_lengths>& segments, uint32_t tile_keys) {
  const attention_params& p = seen.params.a;
  const uint32_t blocks = seen.shape.grid[0], columns = uint32_t(p.num_kv_heads * p.head_groups);
  const sm90::walk_rules rules{p.left, p.right, uint32_t(p.tile_queries), tile_keys, columns, uint32_t(segments.size()), blocks, seen.params.order.walk};
  REQUIRE(rules.mode != sm90::walk_mode::none);
  std::vector<std::vector<int>> taken(segments.size());
  for (size_t n = 0; n < segments.size(); ++n) taken[n].resize(columns * size_t((segments[n].queries + p.tile_queries - 1) / p.tile_queries));
  std::vector<double> work(blocks);
  array_segments lanes{rules, segments};
  walked out;
  for (uint32_t b = 0; b < blocks; ++b) {
    sm90::walk_state state = sm90::begin_walk(rules, p.seqlen_k);
    sm90::unit_place at;
    while (next_place(rules, lanes, state, b, at)) {
      const size_t segment = at.column / columns, column = at.column % columns, tiles = taken.at(segment).size() / columns;
      REQUIRE(at.tile < tiles);
      ++taken[segment][column * tiles + at.tile];
      const double now = sm90::around_a_tile + tiles_of_keys(rules, segments[segment], at.tile);
      work[b] += now, out.largest = std::max(out.largest, now);
    }
  }
  for (const auto& of_segment : taken) REQUIRE(std::all_of(of_segment.begin(), of_segment.end(), [](int n) { return n == 1; }));
  for (const double w : work) out.mean += w / blocks;
  if (out.mean > 0) out.share = out.mean / *std::max_element(work.begin(), work.end());
  out.looks = lanes.looks / blocks;
  return out;
}

struct heads_of {
  int64_t heads, kv_heads, d;
  uint32_t tile_keys;
};
// Segments of as many queries as keys, or of `queries` each with the keys in front of and beside them.
walked ask_varlen(const std::vector<int64_t>& lengths, const heads_of& h, int32_t causal, int64_t queries = -1) {
  static const int32_t somewhere_else = 0;
  std::vector<sm90::segment_lengths> segments;
  int64_t longest = 0, total = 0, all_queries = 0;
  for (const int64_t n : lengths) {
    const int64_t q = queries < 0 ? n : queries;
    segments.push_back({q, n, causal == CQSA_CAUSAL_TOP_LEFT ? 0 : n - q});
    longest = std::max(longest, n), total += n, all_queries += q;
  }
  cqsa_attention_leaf a = leaf_of({int64_t(lengths.size()), h.heads, h.kv_heads, queries < 0 ? longest : queries, longest, h.d}, causal);
  a.cu_seqlens_q = a.cu_seqlens_k = &somewhere_else, a.total_q = all_queries, a.total_k = total;
  for (cqsa_view* x : {&a.q, &a.k, &a.v, &a.out}) x->stride[0] = 0;
  ask(a);
  REQUIRE(seen.launches == (longest > 0));
  if (longest == 0) return {};
  REQUIRE(seen.shape.grid[0] <= 132);
  return walk_all(segments, h.tile_keys);
}

const std::vector<int64_t> mixed{8192, 300, 4096, 1000, 6000, 2048, 77, 3100, 5000, 1500, 7000, 512, 2600, 4500, 900, 3700};  // benchmarks/varlen.py
constexpr heads_of head_shapes[] = {{32, 32, 64, 128}, {16, 16, 128, 128}, {32, 8, 128, 128}, {8, 8, 256, 80}};

TEST_CASE("hopper launch: mixed lengths are shared evenly") {
  for (const heads_of& h : head_shapes)
    for (const int32_t causal : {CQSA_CAUSAL_NONE, CQSA_CAUSAL_TOP_LEFT}) {
      const walked w = ask_varlen(mixed, h, causal);
      INFO(h.heads << " heads of " << h.d << ", causal " << causal << ": share " << w.share << ", looks " << w.looks);
      CHECK(w.share >= 0.96);
    }
}

TEST_CASE("hopper launch: lengths at the edges") {
  std::vector<int64_t> one_long(4096, 0);
  one_long[777] = 16384;
  std::vector<int64_t> and_short(1000, 7);
  and_short[999] = 16384;
  for (const int32_t causal : {CQSA_CAUSAL_NONE, CQSA_CAUSAL_BOTTOM_RIGHT}) {
    const heads_of& h = head_shapes[1];
    CHECK(ask_varlen(std::vector<int64_t>(4096, 1), h, causal).share >= 0.99);
    CHECK(ask_varlen(one_long, h, causal).share >= 0.95);
    CHECK(ask_varlen(and_short, h, causal).share >= 0.95);
    CHECK(ask_varlen(std::vector<int64_t>(100, 0), h, causal).mean == 0);
    CHECK(ask_varlen({1}, h, causal).mean > 0);
    CHECK(ask_varlen({5, 0, 300}, h, causal).mean > 0);
    CHECK(ask_varlen(std::vector<int64_t>(16, 1024), h, causal).share >= 0.95);
  }
}

TEST_CASE("hopper launch: random lengths, every tile once, and blocks differ by about one item") {
  std::mt19937 random(7);
  const auto below = [&](int64_t n) { return int64_t(random() % uint64_t(n)); };
  for (int turn = 0; turn < 300; ++turn) {
    const heads_of& h = head_shapes[below(4)];
    const int32_t causal = int32_t(below(3));
    const int64_t most = int64_t(1) << below(turn % 10 ? 13 : 16), queries = below(3) ? -1 : 1 + below(300);
    std::vector<int64_t> lengths(size_t(1 + below(turn % 2 ? 20 : 300)));
    for (int64_t& n : lengths) n = below(4) ? below(most + 1) : below(2);
    const walked w = ask_varlen(lengths, h, causal, queries);
    INFO(turn << ": " << lengths.size() << " segments up to " << most << ", " << queries << " queries, causal " << causal << ", heads " << h.heads << " of " << h.d
              << ", share " << w.share << ", mean " << w.mean << ", largest " << w.largest);
    CHECK(w.mean / w.share <= w.mean + 1.5 * w.largest);
  }
}

TEST_CASE("hopper launch: tiles hold the queries that share one") {
  for (const int64_t d : {64, 128})
    for (int64_t group = 1; group <= 16; ++group)
      for (int64_t queries = 1; queries <= 192; ++queries) {
        ask(leaf_of({1, group, 1, queries, 4096, d}, CQSA_CAUSAL_NONE));
        const attention_params& p = seen.params.a;
        const int64_t rows = d == 64 ? 192 : 128;
        REQUIRE(p.heads_packed * p.tile_queries <= rows);
        if (p.heads_packed > 1) REQUIRE(p.q_tiles == 1);
        REQUIRE(p.q_tiles == (queries + p.tile_queries - 1) / p.tile_queries);
      }
}

TEST_CASE("hopper launch: one q for several heads is nothing for boxes") {
  cqsa_attention_leaf a = leaf_of({1, 8, 1, 20, 500, 128}, CQSA_CAUSAL_NONE);
  ask(a);
  REQUIRE(seen.launches == 1);
  REQUIRE((seen.boxes.size() == 3 && seen.boxes[0].box[1] > 1 && seen.boxes[0].box[1] <= seen.boxes[0].size[1]));
  a.q.stride[1] = 0;
  ask(a);
  CHECK((seen.launches == 0 && seen.other == 1));
  a = leaf_of({1, 8, 8, 20, 500, 128}, CQSA_CAUSAL_NONE), a.q.stride[1] = 0;
  ask(a);
  CHECK((seen.launches == 1 && seen.params.q_head == 0));
}

TEST_CASE("hopper launch: rows that the copy engine cannot read go to sm_80") {
  for (int n = 0; n < 5; ++n) {
    cqsa_attention_leaf a = leaf_of({2, 4, 4, 300, 500, 128}, CQSA_CAUSAL_NONE);
    if (n == 0) a.k.data = somewhere + 8;
    if (n == 1) a.v.stride[2] = -128;
    if (n == 2) a.q.stride[3] = 2;
    if (n == 3) a.k.stride[2] = 132;
    if (n == 4) a.k.stride[2] = 0;
    ask(a);
    CHECK((seen.launches == 0 && seen.other == 1));
  }
}

TEST_CASE("hopper launch: pages are boxes of a part of a tile of keys") {
  static const int32_t table[64] = {};
  const auto paged = [&](int64_t page_size, int64_t d, int64_t keys) {
    cqsa_attention_leaf a = leaf_of({2, 8, 2, 100, keys, d}, CQSA_CAUSAL_BOTTOM_RIGHT);
    a.page_table = table, a.page_table_stride[0] = 32, a.page_table_stride[1] = 1, a.page_size = page_size, a.num_pages = 50;
    a.k.stride[0] = a.v.stride[0] = 2 * page_size * d, a.k.stride[1] = a.v.stride[1] = d, a.k.stride[2] = a.v.stride[2] = 2 * d;
    return a;
  };
  for (const int64_t d : {64, 128, 256})
    for (const int64_t page_size : {16, 48, 64, 128, 256, 4096}) {
      cqsa_attention_leaf a = paged(page_size, d, 20000);
      ask(a);
      REQUIRE((seen.launches == 1 && seen.boxes.size() == 3));
      const int64_t tile_keys = d == 256 ? 80 : 128, part = seen.params.page_part;
      CHECK((part >= 16 && part % 16 == 0 && tile_keys % part == 0 && page_size % part == 0));
      for (int n = 1; n < 3; ++n) {
        const tensor_box& b = seen.boxes[n];
        CHECK((b.box[1] == part && b.size[1] == uint64_t(page_size) && b.size[2] == 2 && b.size[3] == 50));
        CHECK((b.stride[0] == uint64_t(4 * d) && b.stride[1] == uint64_t(2 * d) && b.stride[2] == uint64_t(4 * page_size * d)));
      }
      CHECK((seen.params.k_item == 1 && seen.params.order.walk == sm90::walk_mode::none));
    }
  char reason[100] = "";
  cqsa_attention_leaf a = paged(24, 128, 500);
  CHECK((sm90_attention.probe(&a, reason, sizeof reason) == CQSA_ERROR_UNSUPPORTED && std::string(reason).find("16 keys") != std::string::npos));
  a = paged(32, 128, 500);
  const cqsa_rect r{0, 0, 100, 500, 0, 0, 0};
  a.rects = &r, a.num_rects = 1;
  ask(a);
  CHECK((seen.launches == 0 && seen.other == 1));
}

}  // namespace
}  // namespace cqsa::gpu
