// SPDX-License-Identifier: Apache-2.0
// Enumerates schedules, prices them in bytes and seconds, and picks: the fastest within the budget, and within 2 % of it the
// one with the smallest peak. Deterministic: the same problem, machine and budget give the same plan.
#include <cinttypes>
#include <cmath>
#include <numeric>

#include "ops/attention/decompose.h"
#include "ops/attention/host_blocks.h"
#include "ops/attention/plan.h"
#include "ops/attention/positions.h"

namespace cqsa {

namespace {

constexpr double tie = 1.02;              // candidates within 2 % of the fastest count as equally fast ..
constexpr double tie_of_blocks = 1.001;   // .. 0.1 % where it is known how many blocks fill the device: there less memory means idle units
constexpr int64_t most_cqs_tasks = 1000;  // deeper decompositions are made only on request
constexpr int most_tiles = 16;
constexpr cqsa_leaf_tile generic_tile{128, 128, 1.0, 0};  // of a machine that is not here

int64_t rounded_up(int64_t value, int64_t step) { return value / step * step + (value % step ? step : 0); }

// Chunk borders on leaf tiles where the chunks are long enough, so that tiles are rarely cut.
int64_t chunk_alignment(int64_t seqlen, int64_t tasks) {
  const int64_t chunk = seqlen / std::max<int64_t>(1, tasks);
  return chunk >= 512 ? 128 : chunk >= 64 ? 16 : 1;
}

struct priced {
  schedule_choice choice;
  footprint cost;
  double seconds;
};

// The least of each budget that would have admitted a candidate, the other two budgets staying as they are.
struct least_budgets {
  static constexpr int kinds = 3;
  uint64_t alone[kinds] = {UINT64_MAX, UINT64_MAX, UINT64_MAX};
  footprint smallest;  // of the candidates that break several budgets
  int count = 0;

  void add(const budget& limit, const footprint& cost) {
    const uint64_t needs[kinds] = {cost.device, cost.host, cost.pinned}, limits[kinds] = {limit.device, limit.host, limit.pinned};
    int broken = 0, which = 0;
    for (int k = 0; k < kinds; ++k)
      if (needs[k] > limits[k]) ++broken, which = k;
    if (broken == 1) alone[which] = std::min(alone[which], needs[which]);
    if (count++ == 0 || total(cost) < total(smallest)) smallest = cost;
  }

  static uint64_t total(const footprint& cost) { return cost.device + cost.host + cost.pinned; }

  cqsa_status report(const budget& limit, bool device_stated) const {
    const char* const names[kinds] = {device_stated ? "max_device_bytes" : "the device memory left to this call", "max_host_bytes",
                                      "max_pinned_bytes"};
    const uint64_t limits[kinds] = {limit.device, limit.host, limit.pinned};
    for (int k = 0; k < kinds; ++k)
      if (alone[k] != UINT64_MAX)
        return fail(CQSA_ERROR_BUDGET_TOO_SMALL, "%s is %" PRIu64 ", the least that works for this problem is %" PRIu64, names[k],
                    limits[k], alone[k]);
    return fail(CQSA_ERROR_BUDGET_TOO_SMALL,
                "several budgets are too small: max_device_bytes %" PRIu64 ", max_host_bytes %" PRIu64 ", max_pinned_bytes %" PRIu64
                "; %" PRIu64 ", %" PRIu64 " and %" PRIu64 " would work",
                limit.device, limit.host, limit.pinned, smallest.device, smallest.host, smallest.pinned);
  }
};

class chooser {
 public:
  chooser(const attention_problem& problem, const hardware_model& machine, const cqsa_attention_impl* impl, const budget& limit,
          std::vector<candidate_note>* notes = nullptr)
      : problem_(problem), machine_(machine), impl_(impl), limit_(limit), notes_(notes) {
    num_tiles_ = impl ? impl->tiles(&leaf_, tiles_, most_tiles) : 0;
    if (num_tiles_ <= 0) tiles_[0] = generic_tile, num_tiles_ = 1;
    tie_ = !machine.host && blocks_at_once(tiles_[0]) > 0 ? tie_of_blocks : tie;
  }

  void offer_all() { machine_.host ? offer_host() : offer_device(); }

  cqsa_status choose(schedule_choice& choice_out, footprint& cost_out) {
    offer_all();
    const priced* best = pick();
    if (!best) return refuse();
    choice_out = best->choice;
    cost_out = best->cost;
    return CQSA_OK;
  }

 private:
  bool wanted(int32_t schedule) const {
    return problem_.p.schedule == CQSA_SCHEDULE_AUTO || problem_.p.schedule == schedule;
  }

  // Also decides the staging of a choice that needs some.
  footprint price(schedule_choice& choice) const {
    if (machine_.host) return host_footprint(problem_, impl_, choice);
    return is_one_launch(problem_, choice) ? whole_footprint(leaf_, impl_, choice) : device_footprint(problem_, impl_, limit_, machine_.workers, choice);
  }

  // Prices a candidate. Returns whether it fits.
  bool offer(const schedule_choice& choice) {
    priced item{choice, {}, 0};
    item.cost = price(item.choice);
    item.seconds = predicted_seconds(problem_, machine_, item.choice, item.cost);  // with the staging that was decided
    const bool fits = limit_.admits(item.cost);
    if (!fits) refusals_.add(limit_, item.cost);
    const char* verdict = !fits ? "does not fit the budget" : only_shown_ ? "not needed: a plan without partial results fits" : "";
    if (notes_) notes_->push_back({item.choice, item.cost, item.seconds, verdict});
    if (!fits || only_shown_) return fits;
    items_.push_back(item);
    fastest_ = std::min(fastest_, item.seconds);
    return true;
  }

  static uint64_t peak(const footprint& cost) { return cost.device + cost.host + cost.pinned; }

  // With two buffers a link that is slower than it was thought to be costs nothing, so where they are about as fast one is not taken.
  int32_t least_buffers(double& fastest_out) const {
    fastest_out = fastest_;
    if (tie_ == tie) return 1;
    double overlapped = HUGE_VAL;
    for (const priced& item : items_)
      if (item.choice.buffers > 1) overlapped = std::min(overlapped, item.seconds);
    if (overlapped > fastest_ * tie) return 1;
    fastest_out = overlapped;
    return 2;
  }

  const priced* pick() const {
    const priced* best = nullptr;
    double fastest = 0;
    const int32_t buffers = least_buffers(fastest);
    for (const priced& item : items_)
      if (item.choice.buffers >= buffers && item.seconds <= fastest * tie_ && (!best || peak(item.cost) < peak(best->cost))) best = &item;
    return best;
  }

  cqsa_status refuse() const {
    if (refusals_.count == 0)
      return fail(CQSA_ERROR_UNSUPPORTED, "no schedule of the wanted kind exists for this problem%s",
                  problem_.p.schedule == CQSA_SCHEDULE_DIRECT ? " (direct needs operands on the device, or a batched problem)"
                                                              : "");
    return refusals_.report(limit_, machine_.host || problem_.p.max_device_bytes);
  }

  // ---- host backend: operands are used in place, so only the tiles of the threads cost memory -----------------------------

  bool within_hints(const cqsa_leaf_tile& tile) const {
    const auto& p = problem_.p;
    return (p.tile_q == 0 || tile.tile_q <= p.tile_q) && (p.tile_k == 0 || tile.tile_k <= p.tile_k);
  }

  schedule_choice host_choice(int32_t schedule, const cqsa_leaf_tile& tile, int32_t workers) const {
    schedule_choice choice;
    choice.schedule = schedule;
    choice.group_batch = problem_.p.batch;
    choice.group_heads = problem_.p.num_kv_heads;
    choice.tile_q = choice.leaf_tile_q = tile.tile_q;
    choice.tile_k = choice.leaf_tile_k = tile.tile_k;
    choice.workers = workers;
    choice.leaf_efficiency = tile.efficiency;
    return choice;
  }

  void offer_host() {
    if (problem_.mapped()) return offer_host_mapped();
    if (wanted(CQSA_SCHEDULE_DIRECT) && offer(host_choice(CQSA_SCHEDULE_DIRECT, hinted_tile(), machine_.workers)) && !notes_)
      return;  // nothing on a host backend is faster than direct
    if (wanted(CQSA_SCHEDULE_STREAM)) offer_host_stream();
    if (cqs_matters()) offer_cqs();
  }

  // Mapped operands: all of them resident, or blocks of rows with windows of keys passing by.
  void offer_host_mapped() {
    if (wanted(CQSA_SCHEDULE_DIRECT) && offer(host_choice(CQSA_SCHEDULE_DIRECT, hinted_tile(), machine_.workers)) && !notes_) return;
    if (wanted(CQSA_SCHEDULE_STREAM)) {
      // The best leaf tile, one in the middle, and the smallest: what lies between changes little here.
      for (int i = 0, last = -1; i < 3; ++i) {
        const int tile = i * (num_tiles_ - 1) / 2;
        if (tile != last) offer_blocks(tiles_[last = tile]);
      }
    }
    if (cqs_matters()) offer_cqs();
  }

  void offer_blocks(const cqsa_leaf_tile& tile) {
    for (int32_t workers = machine_.workers; workers >= 1; workers = workers == 1 ? 0 : (workers + 1) / 2)
      for (int64_t heads = problem_.p.num_kv_heads; heads >= 1; heads = heads == 1 ? 0 : (heads + 1) / 2) {
        schedule_choice choice = host_choice(CQSA_SCHEDULE_STREAM, tile, workers);
        choice.group_batch = 1;
        choice.group_heads = heads;
        if (offer_rows(choice, tile)) break;
      }
  }

  // From many rows to few, and for each the longest windows that fit. Returns whether so many rows fit that reading the keys
  // once for each block hides behind the arithmetic: fewer heads would gain nothing, and where heads are interleaved in memory
  // they share the pages.
  bool offer_rows(schedule_choice choice, const cqsa_leaf_tile& tile) {
    constexpr int64_t enough = 1024;
    const auto& p = problem_.p;
    const int64_t all_rows = std::max<int64_t>(1, p.seqlen_q);
    const int64_t hinted_keys = std::max(tile.tile_k, p.tile_k / tile.tile_k * tile.tile_k);
    const bool state = choice.window_state = !problem_.paged() && (impl_ == nullptr || takes_state());
    bool many = false;
    choice.tile_q = p.tile_q && !problem_.paged() ? std::min(all_rows, p.tile_q) : all_rows;
    while (true) {
      bool fits = false;
      const int64_t all_keys = rounded_up(std::max<int64_t>(1, most_keys_of_rows(problem_, choice.tile_q, tile.tile_k)), tile.tile_k);
      choice.tile_k = p.tile_k && state ? std::min(all_keys, hinted_keys) : all_keys;
      while (!(fits = offer(choice)) && state && choice.tile_k > tile.tile_k)
        choice.tile_k = std::max(tile.tile_k, rounded_up(choice.tile_k / 4, tile.tile_k));
      many = many || (fits && (choice.tile_q >= enough || choice.tile_q == all_rows));
      if (fits && items_.size() && items_.back().seconds > fastest_ * tie) break;
      if (problem_.paged() || choice.tile_q <= tile.tile_q) break;
      choice.tile_q = std::max(tile.tile_q, rounded_up(choice.tile_q / 2, tile.tile_q));
    }
    return many;
  }

  // Without a state between calls all keys of a row must be in one window.
  bool takes_state() const {
    cqsa_attention_leaf leaf = shape_of_leaf(problem_);
    leaf.flags |= CQSA_LEAF_STATE_IN | CQSA_LEAF_STATE_OUT;
    char reason[256];
    return impl_->probe(&leaf, reason, sizeof reason) == CQSA_OK;
  }

  // On one device CQS moves the bytes that stream moves for the same memory, and partial results on top; on a host it only
  // costs memory. So unless asked for it counts when nothing else fits; explain shows it all the same.
  bool cqs_matters() {
    only_shown_ = problem_.p.schedule != CQSA_SCHEDULE_CQS && !items_.empty();
    return wanted(CQSA_SCHEDULE_CQS) && (!only_shown_ || notes_);
  }

  const cqsa_leaf_tile& hinted_tile() const {
    for (int i = 0; i < num_tiles_; ++i)
      if (within_hints(tiles_[i])) return tiles_[i];
    return tiles_[num_tiles_ - 1];
  }

  void offer_host_stream() {
    for (int i = 0; i < num_tiles_; ++i) {
      if (!within_hints(tiles_[i]) && i + 1 < num_tiles_) continue;
      for (int32_t workers = machine_.workers; workers >= 1; workers = workers == 1 ? 0 : (workers + 1) / 2)
        offer(host_choice(CQSA_SCHEDULE_STREAM, tiles_[i], workers));
    }
  }

  // ---- cyclic quorum sets, both kinds of backend --------------------------------------------------------------------------

  bool cqs_possible() const {
    const auto& p = problem_.p;
    return p.seqlen_q == p.seqlen_k && !problem_.varlen() && !problem_.paged() && !problem_.has(CQSA_ATTENTION_SEQUSED_K) &&
           !problem_.batch_invariant();
  }

  void offer_cqs() {
    if (!cqs_possible()) return;
    const auto& p = problem_.p;
    for (int index = 0; index < num_quorum_sets; ++index)
      for (int32_t itr = 1; itr <= 3; ++itr) {
        const cqs_shape shape{p.seqlen_q, quorum_set_at(index).c, itr, 1};
        if ((p.cqs_c && p.cqs_c != shape.c) || (p.cqs_itr && p.cqs_itr != itr)) continue;
        const int64_t tasks = cqs_num_tasks(shape);
        const bool asked = p.cqs_c && p.cqs_itr;
        if (!asked && (tasks > most_cqs_tasks || tasks > std::max<int64_t>(p.seqlen_q / 16, 3))) continue;
        machine_.host ? offer_host_cqs(shape.c, itr, tasks) : offer_device_cqs(shape.c, itr, tasks);
      }
  }

  schedule_choice cqs_choice(schedule_choice choice, int32_t c, int32_t itr, int64_t tasks) const {
    choice.schedule = CQSA_SCHEDULE_CQS;
    choice.c = c;
    choice.itr = itr;
    choice.chunk_alignment = chunk_alignment(problem_.p.seqlen_q, tasks);
    choice.tile_q = choice.tile_k = cqs_max_rows({problem_.p.seqlen_q, c, itr, choice.chunk_alignment});
    return choice;
  }

  void offer_host_cqs(int32_t c, int32_t itr, int64_t tasks) {
    for (int i = 0; i < num_tiles_; ++i)
      for (const bool whole : {true, false})
        for (int32_t workers = machine_.workers; workers >= 1; workers = workers == 1 ? 0 : (workers + 1) / 2) {
          schedule_choice choice = cqs_choice(host_choice(CQSA_SCHEDULE_CQS, tiles_[i], workers), c, itr, tasks);
          choice.group_batch = 1;
          choice.group_heads = whole ? problem_.p.num_kv_heads : 1;
          offer(choice);
        }
  }

  // ---- device backend: tiles and windows of a separate memory --------------------------------------------------------------

  // What the implementation says of its tile comes before what is usual.
  double blocks_at_once(const cqsa_leaf_tile& tile) const {
    const double told = tile.blocks_per_unit * static_cast<double>(leaf_.chip.compute_units);
    return told > 0 ? told : machine_.parallel_blocks;
  }

  schedule_choice device_choice(const cqsa_leaf_tile& tile) const {
    schedule_choice choice;
    choice.group_batch = std::max<int64_t>(1, problem_.p.batch);
    choice.group_heads = problem_.p.num_kv_heads;
    choice.tile_q = problem_.p.seqlen_q;
    choice.tile_k = problem_.p.seqlen_k;
    choice.leaf_tile_q = tile.tile_q;
    choice.leaf_tile_k = tile.tile_k;
    choice.leaf_efficiency = tile.efficiency;
    choice.parallel_blocks = blocks_at_once(tile);
    return choice;
  }

  void offer_device() {
    if (wanted(CQSA_SCHEDULE_DIRECT)) offer_device_direct();
    if (problem_.on_device() && !items_.empty() && !notes_) return;  // nothing to copy: nothing is faster than direct
    if (wanted(CQSA_SCHEDULE_STREAM)) offer_device_stream();
    if (cqs_matters()) for_staging([this] { offer_cqs(); });
  }

  bool one_by_one() const {  // sequences have lengths or places of their own: one batch item per group
    return problem_.varlen() || problem_.paged() || problem_.has(CQSA_ATTENTION_SEQUSED_K);
  }

  void offer_device_direct() {
    if (!problem_.on_device() && one_by_one()) return;
    for_staging([this] {
      for (int i = 0; i < num_tiles_; ++i) {
        schedule_choice choice = device_choice(tiles_[i]);
        choice.staging.pinned = staging_pinned_;
        offer(choice);
      }
    });
  }

  // Pinned staging first; pageable as well, for when the pinned budget is too small.
  template <class F>
  void for_staging(F offers) {
    for (const bool pinned : {true, false}) {
      if (pinned && (!machine_.pinned || problem_.on_device())) continue;
      staging_pinned_ = pinned;
      const size_t before = items_.size();
      offers();
      if (items_.size() > before) return;
    }
  }

  void offer_device_stream() {
    for_staging([this] {
      const auto& p = problem_.p;
      for (int64_t items = one_by_one() ? 1 : std::max<int64_t>(1, p.batch); items > 1; items = (items + 1) / 2)
        offer_windows(items, p.num_kv_heads);
      for (int64_t heads = p.num_kv_heads; heads >= 1; heads = heads == 1 ? 0 : (heads + 1) / 2) offer_windows(1, heads);
    });
  }

  void offer_windows(int64_t items, int64_t heads) {
    const auto& p = problem_.p;
    // The best leaf tile and the smallest one: what lies between changes the workspace of a device leaf little.
    for (int tile = 0; tile < num_tiles_; tile += std::max(1, num_tiles_ - 1)) {
      schedule_choice choice = device_choice(tiles_[tile]);
      choice.schedule = CQSA_SCHEDULE_STREAM;
      choice.group_batch = items;
      choice.group_heads = heads;
      choice.staging.pinned = staging_pinned_;
      for (choice.buffers = 2; choice.buffers >= 1; --choice.buffers)
        for (int64_t window = next_window(0, tiles_[tile]); window > 0; window = next_window(window, tiles_[tile])) {
          choice.tile_k = window;
          offer_query_tiles(choice, tiles_[tile]);
          if (p.tile_k) break;
        }
    }
  }

  // Window lengths from small to large, multiples of the leaf tile; after 0 the first, 0 after the last.
  int64_t next_window(int64_t window, const cqsa_leaf_tile& tile) const {
    const int64_t all = std::max<int64_t>(1, problem_.p.seqlen_k);
    if (problem_.p.tile_k) {
      const int64_t wanted = std::min(all, problem_.p.tile_k);
      return problem_.batch_invariant() ? std::min(all, rounded_up(wanted, tile.tile_k)) : wanted;
    }
    if (window == 0) return std::min(all, tile.tile_k);
    return window >= all ? 0 : std::min(all, window * 4);
  }

  // Rows of so many that their blocks are a multiple of what the device works on at once; 0: that is not known.
  int64_t rows_of_waves(const schedule_choice& choice) const {
    const auto at_once = static_cast<int64_t>(std::min(choice.parallel_blocks, 1e9));
    if (at_once < 1) return 0;
    const int64_t lines = choice.group_batch * choice.group_heads * problem_.ratio();
    return choice.leaf_tile_q * (at_once / std::gcd(at_once, lines));
  }

  bool fits_with(schedule_choice choice, int64_t rows) const {
    choice.tile_q = rows;
    return limit_.admits(price(choice));
  }

  // The most rows in whole waves, from `low` (which fits) to below `high` (which does not), that fit; and a few waves less, which
  // may leave fewer rows to the last tile.
  void offer_most_waves(schedule_choice choice, int64_t low, int64_t high) {
    const int64_t step = rows_of_waves(choice);
    if (step == 0) return;
    int64_t fit = low / step, beyond = (high + step - 1) / step;
    while (beyond - fit > 1) {
      const int64_t middle = fit + (beyond - fit) / 2;
      (fits_with(choice, middle * step) ? fit : beyond) = middle;
    }
    for (int64_t waves = fit; waves > fit - 4 && waves * step > low; --waves) {
      choice.tile_q = waves * step;
      offer(choice);
    }
  }

  // Fewer bytes move the more rows stay: go down from all of them until it is too slow to matter.
  void offer_query_tiles(schedule_choice choice, const cqsa_leaf_tile& tile) {
    const auto& p = problem_.p;
    const int64_t all = std::max<int64_t>(1, p.seqlen_q), step = rows_of_waves(choice);
    int64_t rows = p.tile_q ? std::min(all, p.tile_q) : all;
    for (int64_t refused = 0;;) {
      choice.tile_q = rows;
      const bool fits = offer(choice);
      if (fits && refused) offer_most_waves(choice, rows, refused);
      refused = fits ? 0 : rows;
      if (fits && items_.back().seconds > fastest_ * tie) break;
      if (p.tile_q || rows <= tile.tile_q) break;
      if (step && rows / step > 0 && rows % step) {
        choice.tile_q = rows / step * step;
        offer(choice);
      }
      const int64_t half = rounded_up(rows / 2, tile.tile_q);
      rows = half < rows ? half : rows / 2;
    }
  }

  void offer_device_cqs(int32_t c, int32_t itr, int64_t tasks) {
    for (const bool whole : {true, false})
      for (const bool resident : {true, false})
        for (const bool on_host : {false, true})
          for (const int32_t buffers : {2, 1}) {
            if (resident && buffers > 1 && !on_host) continue;
            schedule_choice choice = cqs_choice(device_choice(tiles_[num_tiles_ > 1 && !whole ? num_tiles_ - 1 : 0]), c, itr, tasks);
            choice.group_batch = 1;
            choice.group_heads = whole ? problem_.p.num_kv_heads : 1;
            choice.operands_resident = resident;
            choice.accumulator_on_host = on_host;
            choice.buffers = buffers;
            choice.staging.pinned = staging_pinned_;
            offer(choice);
          }
  }

  const attention_problem& problem_;
  const cqsa_attention_leaf leaf_ = shape_of_leaf(problem_);
  const hardware_model& machine_;
  const cqsa_attention_impl* impl_;
  const budget& limit_;
  std::vector<candidate_note>* notes_;
  cqsa_leaf_tile tiles_[most_tiles];
  int num_tiles_ = 0;
  bool staging_pinned_ = false;
  bool only_shown_ = false;  // candidates are priced for explain, but are not to be taken
  double tie_ = tie, fastest_ = HUGE_VAL;
  std::vector<priced> items_;
  least_budgets refusals_;
};

}  // namespace

double problem_flops(const attention_problem& problem) {
  const auto& p = problem.p;
  const int64_t rows = problem.varlen() ? p.total_q : p.batch * p.seqlen_q;
  if (rows == 0 || p.seqlen_q == 0) return 0;
  const key_band band = key_band::of(p, p.seqlen_q, p.seqlen_k);
  const double per_sequence = visible_pairs(band, p.seqlen_q, p.seqlen_k);
  const double sequences = static_cast<double>(rows) / static_cast<double>(p.seqlen_q);
  return 2.0 * static_cast<double>(p.head_dim + p.head_dim_v) * per_sequence * sequences * static_cast<double>(p.num_heads);
}

namespace {

// A leaf call that is not the only one of its rows reads and writes their f32 state in device memory.
double state_seconds(const attention_problem& problem, const hardware_model& machine, const schedule_choice& choice,
                     const footprint& cost) {
  const bool windows = choice.schedule == CQSA_SCHEDULE_STREAM && choice.tile_k < problem.p.seqlen_k;
  if (!windows && choice.schedule != CQSA_SCHEDULE_CQS) return 0;
  const double rows = static_cast<double>(choice.tile_q) * static_cast<double>(choice.group_batch * choice.group_heads * problem.ratio());
  return static_cast<double>(cost.tasks) * rows * 8.0 * static_cast<double>(problem.p.head_dim_v + 2) / machine.memory_rate();
}

// By how much longer `rows` rows of a group take than the same work in calls without end. The blocks of a call come in waves of as
// many as the device works on at once: the last wave is as long as a full one while all blocks take the same time, and half of one
// is lost when they have drifted apart; the truth is between the two.
double stretch_of_rows(const attention_problem& problem, const schedule_choice& choice, int64_t rows) {
  const int64_t tile = std::max<int64_t>(1, choice.leaf_tile_q);
  const double lines = static_cast<double>(choice.group_batch * choice.group_heads * problem.ratio());
  const double waves = static_cast<double>((rows + tile - 1) / tile) * lines / choice.parallel_blocks;
  return waves > 0 ? (std::ceil(waves) + waves + 0.5) / (2 * waves) : 1;
}

// .. of all rows: those of the last query tile, which may have few, count with what they see.
double stretch_of_blocks(const attention_problem& problem, const hardware_model& machine, const schedule_choice& choice) {
  if (machine.host || choice.parallel_blocks <= 0) return 1;
  const auto& p = problem.p;
  const int64_t rows = std::clamp<int64_t>(choice.tile_q, 1, std::max<int64_t>(1, p.seqlen_q));
  const double full = stretch_of_rows(problem, choice, rows);
  const int64_t last = p.seqlen_q % rows;
  if (last == 0 || choice.schedule != CQSA_SCHEDULE_STREAM) return full;
  const key_band band = key_band::of(p, p.seqlen_q, p.seqlen_k);
  const double all = visible_pairs(band, p.seqlen_q, p.seqlen_k);
  const double share = all > 0 ? 1 - visible_pairs(band, p.seqlen_q - last, p.seqlen_k) / all : 0;
  return full + share * (stretch_of_rows(problem, choice, last) - full);
}

// Slots are filled and emptied side by side, as many as there are: the lane runs ahead of the device's buffers.
double staging_rate(const hardware_model& machine, const staging_choice& staging) {
  const int32_t slots = staging.in_slots > 0 ? staging.in_slots : staging.back_slots;
  return machine.host_copy * std::max(1, std::min(staging.threads, slots));
}

// Page faults, and the state that goes through memory between windows; the disk itself works ahead.
double page_seconds(const attention_problem& problem, const schedule_choice& choice, const footprint& cost) {
  constexpr double rate = 4e9;  // bytes/s of mapping pages that are in memory, measured on a Zen 5
  const double keys = static_cast<double>(std::min(choice.tile_k, most_keys_of_rows(problem, choice.tile_q, choice.leaf_tile_k)));
  const double windows = static_cast<double>(cost.tasks) * static_cast<double>(choice.group_heads);
  double bytes = windows * keys * static_cast<double>(problem.k_row_bytes() + problem.v_row_bytes());
  if (has_several_windows(problem, choice))
    bytes += windows * static_cast<double>(problem.ratio() * choice.tile_q * (problem.p.head_dim_v + 2)) * 8;
  return bytes / rate;
}

// A block's tiles are dealt to the threads, and the block ends with the last of them.
double block_balance(const attention_problem& problem, const schedule_choice& choice) {
  const int64_t tiles = choice.group_heads * problem.ratio() * ((choice.tile_q + choice.leaf_tile_q - 1) / choice.leaf_tile_q);
  const int64_t rounds = (tiles + choice.workers - 1) / choice.workers;
  return static_cast<double>(tiles) / static_cast<double>(rounds * choice.workers);
}

}  // namespace

double predicted_seconds(const attention_problem& problem, const hardware_model& machine, const schedule_choice& choice,
                         const footprint& cost) {
  const double share = machine.host ? static_cast<double>(choice.workers) / machine.workers : 1.0;
  const double stretch = stretch_of_blocks(problem, machine, choice);
  const cqsa_dtype products = problem.p.precision > CQSA_PRECISION_FAST ? CQSA_DTYPE_F32 : problem.p.dtype_q;
  const double compute = stretch * problem_flops(problem) / (machine.flops(problem.p.head_dim, products) * choice.leaf_efficiency * share);
  const double launches = static_cast<double>(cost.tasks) * machine.launch_seconds;
  if (machine.host) {
    if (in_windows(problem, choice)) return compute / block_balance(problem, choice) + launches + page_seconds(problem, choice, cost);
    if (choice.schedule != CQSA_SCHEDULE_CQS) return compute + launches;
    // Every row's state is read and written once for each of the l^itr tasks that hold the row.
    const double visits = std::pow(find_quorum_set(choice.c)->l, choice.itr);
    const double state = 8.0 * static_cast<double>(problem.p.batch * problem.p.num_heads * problem.p.seqlen_q) *
                         static_cast<double>(problem.p.head_dim_v + 2);
    return compute + launches + visits * state / machine.host_copy;
  }
  const double in = cost.bytes_in / machine.copy_in;
  const double out = cost.bytes_out / machine.copy_out;
  const double busy = compute + launches + state_seconds(problem, machine, choice, cost);
  // Partial results that are merged on the host: read, read, written.
  const double merged = choice.accumulator_on_host ? 3 * cost.bytes_out / machine.host_copy : 0;
  const auto is_staged = [](int32_t place) { return place == CQSA_MEMORY_HOST || place == CQSA_MEMORY_MAPPED; };
  const bool staged = is_staged(problem.p.memory_kv) || is_staged(problem.p.memory_q);
  const double staging = staged ? (cost.bytes_in + cost.bytes_out) / staging_rate(machine, choice.staging) : 0;
  const double pageable = choice.staging.pinned || cost.bytes_in == 0 ? 1.0 : 2.0;  // the driver stages once more
  const double transfer = pageable * std::max({in, out, staging});
  if (choice.buffers > 1) return merged + std::max(busy, transfer) + 0.02 * std::min(busy, transfer);
  // With one buffer leaf calls and copies wait for each other, and each turn costs the device as much as a call.
  return merged + busy + transfer + 2 * launches;
}

budget budget_of(const attention_problem& problem, const hardware_model& machine) {
  const auto or_unlimited = [](uint64_t bytes) { return bytes ? bytes : UINT64_MAX; };
  budget limit{or_unlimited(problem.p.max_device_bytes), or_unlimited(problem.p.max_host_bytes),
               or_unlimited(problem.p.max_pinned_bytes)};
  // Without a stated limit a tenth of the free device memory stays free for others.
  if (!machine.host && problem.p.max_device_bytes == 0 && machine.device_bytes) limit.device = machine.device_bytes / 10 * 9;
  return limit;
}

cqsa_status choose_schedule(const attention_problem& problem, const hardware_model& machine, const cqsa_attention_impl* impl,
                            const budget& limit, schedule_choice& choice_out, footprint& cost_out) {
  if (problem.p.schedule == CQSA_SCHEDULE_CQS && problem.batch_invariant())
    return fail(CQSA_ERROR_UNSUPPORTED, "params->schedule CQS cuts rows by the chunk count, which CQSA_ATTENTION_BATCH_INVARIANT "
                                        "forbids; use DIRECT, STREAM or AUTO");
  if (problem.empty()) {
    choice_out = {};
    cost_out = {};
    if (machine.host) cost_out.workspace = cost_out.host = workspace_header_bytes;
    if (!limit.admits(cost_out))
      return fail(CQSA_ERROR_BUDGET_TOO_SMALL, "the budget is below the least that works, %d bytes", workspace_header_bytes);
    return CQSA_OK;
  }
  return chooser(problem, machine, impl, limit).choose(choice_out, cost_out);
}

std::vector<candidate_note> explain_schedule(const attention_problem& problem, const hardware_model& machine,
                                             const cqsa_attention_impl* impl, const budget& limit, const schedule_choice& chosen) {
  std::vector<candidate_note> notes;
  chooser(problem, machine, impl, limit, &notes).offer_all();
  double seconds = HUGE_VAL;
  for (candidate_note& note : notes)
    if (note.choice == chosen && seconds == HUGE_VAL) note.verdict = "chosen", seconds = note.seconds;
  for (candidate_note& note : notes) {
    if (!note.verdict.empty()) continue;
    note.verdict = note.seconds > seconds          ? "slower"
                   : note.seconds * tie >= seconds ? "about as fast, with a larger peak"
                                                   : "faster by the rates measured since the plan was made";
  }
  return notes;
}

cqsa_status choose_implementation(const cqsa_backend_v1& backend, const attention_problem& problem, bool needs_state,
                                  const cqsa_attention_impl*& impl_out, std::string* declined) {
  cqsa_attention_leaf leaf = shape_of_leaf(problem);
  if (needs_state) leaf.flags |= CQSA_LEAF_STATE_IN | CQSA_LEAF_STATE_OUT;
  char reason[256] = "the backend has no attention implementation";
  cqsa_status status = CQSA_ERROR_UNSUPPORTED;
  for (int32_t i = 0; i < backend.num_attention; ++i) {
    const cqsa_attention_impl& impl = backend.attention[i];
    status = impl.probe(&leaf, reason, sizeof reason);
    if (status == CQSA_OK) {
      impl_out = &impl;
      return CQSA_OK;
    }
    if (declined) *declined += std::string(impl.name) + " declined: " + reason + "\n";
  }
  return fail(status, "no implementation of backend %s takes this problem; the last one says: %s", backend.name, reason);
}

}  // namespace cqsa
