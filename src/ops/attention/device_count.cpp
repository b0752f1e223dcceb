// SPDX-License-Identifier: Apache-2.0
// device_footprint(): what a device run allocates and moves. Bytes are exact for batched problems and an upper bound where the
// lengths are known at run time only.
#include "ops/attention/device_layout.h"
#include "ops/attention/io_lane.h"
#include "ops/attention/positions.h"
#include "ops/attention/window_cache.h"
#include "tensor.h"

namespace cqsa {
namespace {

// Bytes of a key with its scales, of one key head.
int64_t key_bytes(const attention_problem& problem) {
  return problem.k_row_bytes() + problem.v_row_bytes() + problem.k_scale_row_bytes() + problem.v_scale_row_bytes();
}

int64_t out_bytes(const attention_problem& problem) {
  const int64_t lse = problem.p.dtype_q == CQSA_DTYPE_F64 ? 8 : 4;
  return problem.out_row_bytes() + (problem.has(CQSA_ATTENTION_LSE) ? lse : 0);
}

double query_rows(const attention_problem& problem) {
  const auto& p = problem.p;
  const double rows = problem.varlen() ? static_cast<double>(p.total_q) : static_cast<double>(p.batch) * static_cast<double>(p.seqlen_q);
  return rows * static_cast<double>(p.num_heads);
}

double small_bytes(const attention_problem& problem, const device_geometry& g) {
  const auto& p = problem.p;
  double bytes = 0;
  if (g.q_in && problem.has(CQSA_ATTENTION_ALIBI)) bytes += static_cast<double>(p.batch * p.num_heads * 4);
  if (g.q_in && problem.has(CQSA_ATTENTION_SINKS)) bytes += static_cast<double>(p.num_heads * 4);
  for (const int32_t kind : {p.scale_k, p.scale_v})
    if (g.kv_in) bytes += static_cast<double>(kind == CQSA_SCALE_TENSOR ? 4 : kind == CQSA_SCALE_HEAD ? 4 * p.num_kv_heads : 0);
  return bytes;
}

// Index arrays and page ids that come from the device, because the host must know them.
double index_bytes(const attention_problem& problem, const device_geometry& g) {
  const auto& p = problem.p;
  if (g.q_in) return 0;
  double bytes = 0;
  if (problem.varlen()) bytes += 16.0 * static_cast<double>(p.batch + 1);
  if (problem.has(CQSA_ATTENTION_SEQUSED_K)) bytes += 8.0 * static_cast<double>(p.batch);
  const double groups = static_cast<double>(divided_up(p.num_kv_heads, g.heads));
  if (problem.paged()) bytes += 4.0 * groups * static_cast<double>(p.batch * (p.seqlen_k / p.page_size + 1));
  return bytes;
}

// A mask or a bias: how many planes of it all groups together move, and the bytes of an element.
struct plane_kind {
  uint32_t bits;
  double element_planes;
};

plane_kind plane_of(const attention_problem& problem, const device_geometry& g, uint32_t bits, int64_t element) {
  const auto& p = problem.p;
  const int64_t items = bits & CQSA_BROADCAST_BATCH ? divided_up(p.batch, g.items) : p.batch;
  const int64_t heads = bits & CQSA_BROADCAST_HEAD ? divided_up(p.num_kv_heads, g.heads) : p.num_heads;
  // A plane without an axis still moves once for every group along the other one.
  return {bits, static_cast<double>(items) * static_cast<double>(heads) * static_cast<double>(element)};
}

template <class F>
double plane_bytes(const attention_problem& problem, const device_geometry& g, F&& cells) {
  if (!g.q_in) return 0;
  double bytes = 0;
  if (problem.has(CQSA_ATTENTION_MASK)) {
    const plane_kind mask = plane_of(problem, g, problem.p.mask_broadcast, 1);
    bytes += mask.element_planes * cells(mask.bits);
  }
  if (problem.has(CQSA_ATTENTION_BIAS)) {
    const plane_kind bias = plane_of(problem, g, problem.p.bias_broadcast, dtype_bytes(problem.p.dtype_bias));
    bytes += bias.element_planes * cells(bias.bits);
  }
  return bytes;
}

// ---- stream -----------------------------------------------------------------------------------------------------------------

// Above this many query tiles not every one is looked at, and the counts become upper bounds.
constexpr int64_t most_tiles_walked = 4096;

// What one group does; the same for all groups. A window that is still there from the tile before is not loaded again.
struct stream_walk {
  double calls = 0, loads = 0, visits = 0;          // leaf calls, windows loaded and windows visited
  double loaded = 0;                                // keys
  double visited = 0, visited_rows = 0, cells = 0;  // keys, query rows, and their products over all visits

  stream_walk(const device_geometry& g, const key_band& band, int64_t seqlen_q, int64_t seqlen_k) {
    const key_range all = band.of_rows(0, seqlen_q, seqlen_k);
    const auto length = [&](int64_t w) { return std::min((w + 1) * g.keys, all.end) - std::max(w * g.keys, all.begin); };
    const int64_t tiles = divided_up(seqlen_q, g.rows), together = divided_up(tiles, most_tiles_walked);
    window_cache cache(g.buffers);
    for (int64_t tile = 0; tile < tiles; tile += together) {
      // Of tiles taken together the last one stands for all: under the causal rule it sees the most.
      const int64_t count = std::min(together, tiles - tile), q = (tile + count - 1) * g.rows;
      const int64_t rows = std::min(g.rows, seqlen_q - q);
      const key_range seen = band.of_rows(q, rows, seqlen_k);
      const int64_t first = seen.begin / g.keys, last = seen.length() ? divided_up(seen.end, g.keys) : first;
      calls += static_cast<double>(count) * static_cast<double>(std::max<int64_t>(1, last - first));
      if (last == first) continue;
      const double keys = static_cast<double>(std::min(last * g.keys, all.end) - std::max(first * g.keys, all.begin));
      visit(static_cast<double>(count), static_cast<double>(count == 1 ? rows : g.rows), static_cast<double>(last - first), keys);
      if (together > 1) continue;
      // Beyond as many windows as there are buffers nothing can still be there.
      for (int64_t w = first; w < std::min(last, first + g.buffers); cache.use(w++))
        if (cache.holds(w)) --loads, loaded -= static_cast<double>(length(w));
      for (int64_t w = std::max(first + g.buffers, last - g.buffers); w < last; ++w) cache.use(w);
    }
  }

  void visit(double count, double rows, double windows, double keys) {
    visits += count * windows;
    visited += count * keys;
    visited_rows += count * rows * windows;
    cells += count * rows * keys;
    loads += count * windows;
    loaded += count * keys;
  }

  double plane_cells(uint32_t bits) const {
    const bool key = bits & CQSA_BROADCAST_KEY;
    if (bits & CQSA_BROADCAST_QUERY) return key ? loads : loaded;
    return key ? visited_rows : cells;
  }
};

void count_stream(const attention_problem& problem, const device_geometry& g, footprint& cost) {
  const auto& p = problem.p;
  const key_band band = g.by_item ? key_band{-key_band::far, key_band::far} : key_band::of(p, p.seqlen_q, p.seqlen_k);
  const stream_walk walk(g, band, p.seqlen_q, p.seqlen_k);
  const double groups = static_cast<double>(divided_up(p.batch, g.items)) * static_cast<double>(divided_up(p.num_kv_heads, g.heads));
  const double calls = groups * walk.calls * static_cast<double>(problem.paged() && !g.kv_in ? g.rects : 1);
  cost.tasks = static_cast<int64_t>(std::min(calls, 1e18)) + (problem.varlen() && !g.out_back);
  if (g.q_in) cost.bytes_in += query_rows(problem) * static_cast<double>(problem.q_row_bytes());
  const double heads = static_cast<double>(p.batch) * static_cast<double>(p.num_kv_heads);
  if (g.kv_in) cost.bytes_in += heads * walk.loaded * static_cast<double>(key_bytes(problem));
  cost.bytes_in += plane_bytes(problem, g, [&](uint32_t bits) { return walk.plane_cells(bits); });
}

// ---- CQS --------------------------------------------------------------------------------------------------------------------

struct cqs_walk {
  int64_t tasks = 0, blocks = 0;  // with at least one visible block
  double rows = 0, squares = 0;   // of their lists

  double plane_cells(uint32_t bits) const {
    const bool query = bits & CQSA_BROADCAST_QUERY, key = bits & CQSA_BROADCAST_KEY;
    return query && key ? static_cast<double>(tasks) : query || key ? rows : squares;
  }
};

// Upper bounds that need no look at the tasks: every row is in l tasks of each level.
cqs_walk bound_of_tasks(const device_geometry& g) {
  cqs_walk walk;
  walk.tasks = cqs_num_tasks(g.shape);
  walk.blocks = static_cast<int64_t>(std::min(arena::limit, arena::times(static_cast<uint64_t>(walk.tasks), static_cast<uint64_t>(g.rects))));
  walk.rows = static_cast<double>(g.shape.seqlen);
  for (int32_t level = 0; level < g.shape.itr; ++level) walk.rows *= find_quorum_set(g.shape.c)->l;
  walk.squares = walk.rows * static_cast<double>(g.rows);
  return walk;
}

cqs_walk walk_tasks(const attention_problem& problem, const device_geometry& g) {
  // The planner prices many candidates: where the tasks are too many to visit, their bound has to do.
  constexpr int64_t most_blocks = 1 << 16;
  const int64_t tasks = cqs_num_tasks(g.shape);
  if (tasks > most_blocks / g.rects) return bound_of_tasks(g);
  const key_band band = key_band::of(problem.p, g.shape.seqlen, g.shape.seqlen);
  std::vector<cqs_block> blocks(static_cast<size_t>(g.rects));
  std::vector<cqs_segment> segments(static_cast<size_t>(std::max<int64_t>(1, cqs_max_segments(g.shape))));
  cqs_walk walk;
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t visible = visible_blocks(g.shape, band, task, blocks.data());
    if (visible == 0) continue;
    const int64_t rows = task_rows(segments.data(), cqs_task_segments(g.shape, task, segments.data()));
    ++walk.tasks;
    walk.blocks += visible;
    walk.rows += static_cast<double>(rows);
    walk.squares += static_cast<double>(rows) * static_cast<double>(rows);
  }
  return walk;
}

void count_cqs(const attention_problem& problem, const device_geometry& g, footprint& cost) {
  const auto& p = problem.p;
  const cqs_walk walk = walk_tasks(problem, g);
  const int64_t groups = divided_up(p.batch, g.items) * divided_up(p.num_kv_heads, g.heads);
  const int64_t finishing = divided_up(p.seqlen_q, g.finish_rows);
  const int64_t calls = calls_per_block(problem, g) ? walk.blocks : walk.tasks;
  cost.tasks = static_cast<int64_t>(std::min<double>(1e18, static_cast<double>(groups) * static_cast<double>(calls + finishing + !g.acc_on_host)));
  const double q_heads = static_cast<double>(p.batch) * static_cast<double>(p.num_heads);
  const double k_heads = static_cast<double>(p.batch) * static_cast<double>(p.num_kv_heads);
  const double all = static_cast<double>(p.seqlen_q);
  if (g.q_in) cost.bytes_in += q_heads * (g.resident ? all : walk.rows) * static_cast<double>(problem.q_row_bytes());
  if (g.kv_in) cost.bytes_in += k_heads * (g.resident ? all : walk.rows) * static_cast<double>(key_bytes(problem));
  cost.bytes_in += plane_bytes(problem, g, [&](uint32_t bits) { return walk.plane_cells(bits); });
  if (!g.acc_on_host) return;
  const double state = static_cast<double>((p.head_dim_v + 2) * 4);
  cost.bytes_in += q_heads * all * state;
  cost.bytes_out += q_heads * walk.rows * state;
}

// ---- staging ------------------------------------------------------------------------------------------------------------------

// Large enough for full speed, small enough that the processor's cache holds a slot on its way: 4 MiB slots reach the rate of the
// link with 8 threads on an H200's host, 16 MiB slots two thirds of it.
constexpr uint64_t best_slot = uint64_t{4} << 20;
constexpr uint64_t good_slot = uint64_t{1} << 20;    // down to this size more slots are better than larger ones
constexpr uint64_t least_slot = uint64_t{64} << 10;  // .. and below this nothing is gained

// Pinning memory takes as long as copying some 25 times as much, so a ring is no larger than pays.
constexpr double bytes_per_staged_byte = 32;

class staging_fitter {
 public:
  staging_fitter(const attention_problem& problem, const device_layout& layout, const footprint& cost, uint64_t lists,
                 const budget& limit, int32_t threads, bool pinned)
      : problem_(problem), in_(layout.in), back_(layout.back), cost_(cost), lists_(lists), limit_(limit), pinned_(pinned) {
    most_threads_ = std::clamp(threads, 1, problem.mapped() ? most_mapping_threads : most_copy_threads);
  }

  staging_choice fit() const {
    const int32_t full = pinned_ && most_threads_ > 1 ? 2 * most_threads_ : 2;
    staging_choice s;
    for (uint64_t size = best_slot; size >= good_slot; size /= 2)
      if (fits(s = made(size, full))) return s;
    for (int32_t slots = full / 2; slots >= 2; slots /= 2)
      if (fits(s = made(good_slot, slots))) return s;
    for (uint64_t size = good_slot / 2; size >= least_slot; size /= 2)
      if (fits(s = made(size, 2))) return s;
    return made(least_slot, 1);
  }

 private:
  staging_choice made(uint64_t size, int32_t most_slots) const {
    staging_choice s;
    s.pinned = pinned_;
    s.threads = most_threads_;
    slots(in_, cost_.bytes_in, size, most_slots, s.in_slots, s.in_bytes);
    slots(back_, cost_.bytes_out, size, most_slots, s.back_slots, s.back_bytes);
    while (s.threads > 1 && !fits(s) && problem_.mapped()) s.threads /= 2;
    return s;
  }

  static void slots(const transfer_bound& bound, double moved, uint64_t size, int32_t most, int32_t& count, uint64_t& bytes) {
    if (bound.largest == 0) return;
    bytes = std::max(bound.line, std::min(size, bound.largest));
    const double sensible = moved / bytes_per_staged_byte / static_cast<double>(bytes);
    count = static_cast<int32_t>(std::clamp<double>(sensible, std::min(most, 2), most));
  }

  bool fits(const staging_choice& s) const {
    arena memory;
    staging_layout().carve(s, memory);
    const uint64_t host = lists_ + resident_bytes_of_staging(problem_, s) + (pinned_ ? 0 : memory.used());
    return host <= limit_.host && (!pinned_ || memory.used() <= limit_.pinned);
  }

  const attention_problem& problem_;
  const transfer_bound in_, back_;
  const footprint& cost_;
  const uint64_t lists_;
  const budget& limit_;
  const bool pinned_;
  int32_t most_threads_;
};

}  // namespace

footprint device_footprint(const attention_problem& problem, const cqsa_attention_impl* impl, const budget& limit, int32_t threads,
                           schedule_choice& choice) {
  const device_geometry g = geometry_of(problem, choice);
  arena device, staging, host;
  device_layout layout;
  layout.carve(problem, impl, choice, g, device);
  device_host_layout lists;
  lists.carve(problem, g, host);

  footprint cost;
  cost.device = cost.workspace = device.used();
  cost.bytes_out = index_bytes(problem, g);
  cost.bytes_in = small_bytes(problem, g);
  if (g.out_back) cost.bytes_out += query_rows(problem) * static_cast<double>(out_bytes(problem));
  g.cqs ? count_cqs(problem, g, cost) : count_stream(problem, g, cost);
  choice.staging = staging_fitter(problem, layout, cost, host.used(), limit, threads, choice.staging.pinned).fit();
  staging_layout().carve(choice.staging, staging);
  cost.host = host.used() + resident_bytes_of_staging(problem, choice.staging) + (choice.staging.pinned ? 0 : staging.used());
  cost.pinned = choice.staging.pinned ? staging.used() : 0;
  return cost;
}

}  // namespace cqsa
