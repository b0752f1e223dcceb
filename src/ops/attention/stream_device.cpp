// SPDX-License-Identifier: Apache-2.0
// The stream schedule on a device: query tiles stay while windows of keys pass by through a ring of buffers. Two walks over the
// same steps, one that pushes what a step needs into the lane to the device, and one that launches it. The first is ahead by as
// many steps as fit the lane: copies to the device go as far as there are buffers, and behind them staging slots fill as far as
// there are slots. Outputs leave in the other lane while the next tile is computed.
#include <array>
#include <chrono>

#include "ops/attention/device_run.h"
#include "ops/attention/window_cache.h"

namespace cqsa {
namespace {

// A query tile, the views of its group, and the windows that it sees.
struct tile_plan {
  query_tile tile{};
  int64_t number = 0;  // of the region; decides the slots
  int64_t group = 0;   // number of its group
  key_range seen{}, group_keys{};  // keys that the tile's queries see, and any query of the group
  int64_t first = 0, last = 0;     // windows
  cqsa_view q{}, k{}, v{}, k_scale{}, v_scale{}, mask{}, bias{}, out{}, lse{};  // of the group
};

// One window of one tile: what is fetched for it, and one leaf call (or none: `window` < 0, a tile that sees no key).
struct stream_step {
  tile_plan plan;
  int64_t window = -1;
  int buffer = 0;
  bool fetched = false;           // something came for it, and its event says when
  int64_t begin = 0, length = 0;  // keys of the window
  bool first = false, last = false;  // of the tile
};

// How many leaf calls may be queued: enough that the device never waits for the host, few enough that a cancel is heard soon.
class pacer {
 public:
  int64_t depth() const { return depth_; }
  // After waiting for an older call: so many have been completed since the last time.
  void passed(int64_t calls) {
    const auto now = clock::now();
    const double seconds = std::chrono::duration<double>(now - last_).count() / static_cast<double>(calls);
    last_ = now;
    depth_ = std::clamp<int64_t>(static_cast<int64_t>(queued_seconds / std::max(seconds, 1e-9)), 2, most);
  }
  static constexpr int64_t most = device_session::paced_events;

 private:
  using clock = std::chrono::steady_clock;
  static constexpr double queued_seconds = 2e-3;
  clock::time_point last_ = clock::now();
  int64_t depth_ = 4;
};

class stream_runner {
 public:
  stream_runner(device_run& run, const device_region& region)
      : run_(run), g_(run.g), p_(run.problem.p), session_(run.session), region_(region), cache_(run.g.buffers) {}
  cqsa_status run();

 private:
  struct pending_tile {
    query_tile tile;
    int64_t stored;  // place in the lane
  };

  cqsa_status run_steps();
  void settle(cqsa_status failure);

  // The walk that fetches.
  bool can_begin_group() const;
  cqsa_status next_group(bool& found);
  cqsa_status next_tile(tile_plan& out, bool& found);
  cqsa_status enter_tile();
  cqsa_status fetch_ahead();
  bool fetches(bool held) const;
  bool may_fetch();
  cqsa_status fetch_step();
  cqsa_status fetch_window(const stream_step& step, bool held);
  cqsa_status wait_for_buffer(int buffer);
  bool slot_is_free(const tile_plan& plan) const;
  cqsa_status fetch_queries(const tile_plan& plan, int64_t& lines, int64_t end);
  cqsa_status fetch_share_of_next();
  cqsa_status fetch_operand(const stream_step& step, const cqsa_view& operand, int64_t channels, void* to);
  cqsa_status fetch_plane(const stream_step& step, const cqsa_view& plane, uint32_t bits, void* to, bool held);

  // The walk that launches.
  cqsa_status launch_step();
  void view_step(const stream_step& step, cqsa_attention_leaf& leaf) const;
  cqsa_view view_of_keys(const stream_step& step, const cqsa_view& operand, int64_t channels, void* at) const;
  cqsa_view view_of_plane(const stream_step& step, const cqsa_view& plane, uint32_t bits, void* at) const;
  void view_tile(const tile_plan& plan, cqsa_attention_leaf& leaf) const;
  cqsa_status call_window(const stream_step& step, cqsa_attention_leaf& leaf);
  cqsa_status call_pages(const stream_step& step, int64_t count, const cqsa_attention_leaf& leaf);
  int64_t list_pages(const stream_step& step, const key_range& keys, int64_t rows_per_page, bool join);
  int64_t rows_per_page(const cqsa_attention_leaf& leaf) const;
  cqsa_status call(cqsa_attention_leaf& leaf, int64_t rects, bool last);
  cqsa_status finish_without_keys(const stream_step& step, cqsa_attention_leaf& leaf);
  cqsa_status leave(const tile_plan& plan);
  cqsa_status store(const tile_plan& plan);
  cqsa_status finish_oldest();
  cqsa_status pace();

  // Windows of different groups are different.
  static int64_t id_of(const tile_plan& plan, int64_t window) { return (plan.group << 40) + window; }
  int64_t lines_of(const tile_plan& plan) const { return plan.tile.group.items * plan.tile.group.q_heads * plan.tile.rows; }

  device_run& run_;
  const device_geometry& g_;
  const cqsa_attention_params& p_;
  device_session& session_;
  const device_region region_;

  // Fetching: `here_` is the tile whose windows are pushed, `ahead_` the one after it, part of whose queries may be pushed.
  tile_plan group_{};  // the views of the group that is walked through
  bool in_group_ = false;
  int64_t groups_ = 0, item_ = 0, head_ = 0, row_ = 0, row_end_ = 0;  // the next group, the next row of this one
  int64_t tiles_ = 0;                                                  // planned
  query_tile entering_{};                                              // the group that is looked at, should that fail
  tile_plan here_{}, ahead_{};
  bool have_here_ = false, have_ahead_ = false;
  int64_t window_ = 0;                       // of here_, the next to push
  int64_t here_lines_ = 0, ahead_lines_ = 0;  // lines of queries that were pushed
  window_cache cache_;
  int64_t last_use_[3] = {-1, -1, -1};  // of each buffer: step

  // Between the two: steps that are fetched and not launched.
  static constexpr int most_steps = device_session::fetched_events;
  static constexpr int64_t most_entries = 16;  // of the lane, for one step
  stream_step steps_[most_steps];
  int64_t fetched_ = 0, launched_ = 0;  // steps

  // Launching.
  int64_t tiles_launched_ = 0;
  bool started_ = false;  // the tile's state has been written
  pending_tile pending_[2];
  int pending_count_ = 0;
  pacer pacer_;
  int64_t paced_ = 0;  // steps that are known to be complete
};

cqsa_status stream_runner::run() {
  item_ = region_.item_begin;
  head_ = region_.head_begin;
  cqsa_status status = session_.launched(0);
  if (status == CQSA_OK) status = run_steps();
  while (status == CQSA_OK && pending_count_ > 0) status = finish_oldest();
  if (status == CQSA_OK) status = session_.drain();
  if (status != CQSA_OK) settle(status);
  return status;
}

cqsa_status stream_runner::run_steps() {
  for (;;) {
    CQSA_TRY(fetch_ahead());
    if (fetched_ == launched_) return CQSA_OK;
    CQSA_TRY(launch_step());
  }
}

// Where a later attempt has to go on. What was launched before the failure still counts if the device lets us fetch it.
void stream_runner::settle(cqsa_status failure) {
  run_.unfinished = fetched_ > launched_ ? steps_[launched_ % most_steps].plan.tile : have_here_ ? here_.tile : entering_;
  if (failure != CQSA_ERROR_OUT_OF_DEVICE_MEMORY) return;
  session_.abandon_fetches();
  const bool drained = session_.drain() == CQSA_OK;
  while (drained && pending_count_ > 0 && finish_oldest() == CQSA_OK) {}
  if (pending_count_ > 0) run_.unfinished = pending_[0].tile;
  if (drained) return;
  device_group first{};
  first.item = region_.item_begin;
  first.head = region_.head_begin;
  first.items = std::min(g_.items, region_.item_end - region_.item_begin);
  first.heads = std::min(g_.heads, region_.head_end - region_.head_begin);
  run_.unfinished = {first, region_.row_begin, 0};
}

// ---- the walk over tiles -----------------------------------------------------------------------------------------------------------

// Page ids that the host had to copy are of one group at a time.
bool stream_runner::can_begin_group() const { return !session_.host.pages || fetched_ == launched_; }

cqsa_status stream_runner::next_group(bool& found) {
  found = false;
  if (item_ >= region_.item_end || !can_begin_group()) return CQSA_OK;
  const int64_t items = std::min(g_.items, region_.item_end - item_), heads = std::min(g_.heads, region_.head_end - head_);
  entering_ = {{}, region_.row_begin, 0};
  entering_.group.item = item_, entering_.group.items = items, entering_.group.head = head_, entering_.group.heads = heads;
  device_group group;
  CQSA_TRY(run_.make_group(item_, items, head_, heads, group));
  const cqsa_attention_leaf& whole = run_.whole;
  group_.tile.group = group;
  group_.q = run_.q_of(group);
  group_.k = run_.keys_of(whole.k, group);
  group_.v = run_.keys_of(whole.v, group);
  group_.k_scale = run_.keys_of(whole.k_scale, group);
  group_.v_scale = run_.keys_of(whole.v_scale, group);
  group_.mask = run_.plane_of(whole.mask, group);
  group_.bias = run_.plane_of(whole.bias, group);
  group_.out = run_.out_of(whole.out, group);
  group_.lse = run_.out_of(whole.lse, group);
  group_.group_keys = key_band::of(p_, group.seqlen_q, group.seqlen_k).of_rows(0, group.seqlen_q, group.seqlen_k);
  group_.group = groups_++;
  row_ = region_.row_begin;
  row_end_ = std::min(region_.row_end, group.seqlen_q);
  head_ += g_.heads;
  if (head_ >= region_.head_end) head_ = region_.head_begin, item_ += g_.items;
  found = true;
  return CQSA_OK;
}

// The tile after the last one that was planned; `found` is false at the end, and where the group after this one must wait.
cqsa_status stream_runner::next_tile(tile_plan& out, bool& found) {
  while (!in_group_ || row_ >= row_end_) {
    in_group_ = false;
    CQSA_TRY(next_group(in_group_));
    if (!(found = in_group_)) return CQSA_OK;
  }
  found = true;
  out = group_;
  const device_group& group = group_.tile.group;
  out.tile.q = row_;
  out.tile.rows = std::min(g_.rows, row_end_ - row_);
  out.number = tiles_++;
  out.seen = key_band::of(p_, group.seqlen_q, group.seqlen_k).of_rows(row_, out.tile.rows, group.seqlen_k);
  out.first = out.seen.begin / g_.keys;
  out.last = out.seen.length() ? (out.seen.end + g_.keys - 1) / g_.keys : out.first;
  row_ += out.tile.rows;
  return CQSA_OK;
}

// ---- fetching --------------------------------------------------------------------------------------------------------------------

cqsa_status stream_runner::enter_tile() {
  if (have_ahead_) {
    here_ = ahead_;
    have_here_ = true;
  } else {
    CQSA_TRY(next_tile(here_, have_here_));
  }
  here_lines_ = have_ahead_ ? ahead_lines_ : 0;
  have_ahead_ = false;
  window_ = here_.first;
  return CQSA_OK;
}

// As far as the lane has room. A slot for queries is free again when the last call that reads it was launched.
cqsa_status stream_runner::fetch_ahead() {
  while (fetched_ - launched_ < most_steps) {
    if (!have_here_) CQSA_TRY(enter_tile());
    if (!have_here_) return CQSA_OK;
    if (g_.q_in && here_lines_ < lines_of(here_)) {
      if (!slot_is_free(here_)) return CQSA_OK;
      CQSA_TRY(fetch_queries(here_, here_lines_, lines_of(here_)));
    }
    if (!may_fetch()) return CQSA_OK;
    CQSA_TRY(fetch_step());
    if (window_ >= here_.last) have_here_ = false;
  }
  return CQSA_OK;
}

// A mask or a bias that differs from query to query comes anew for every tile, even where the window is still there.
bool stream_runner::fetches(bool held) const {
  const bool planes = g_.q_in && ((here_.mask.data && !(p_.mask_broadcast & CQSA_BROADCAST_QUERY)) ||
                                  (here_.bias.data && !(p_.bias_broadcast & CQSA_BROADCAST_QUERY)));
  return planes || (!held && (g_.kv_in || (g_.q_in && (here_.mask.data || here_.bias.data))));
}

// A full lane would keep the caller from launching what opens its gates; when nothing waits for a launch, none is closed.
bool stream_runner::may_fetch() { return fetched_ == launched_ || session_.may_fetch(most_entries); }

cqsa_status stream_runner::fetch_step() {
  stream_step& step = steps_[fetched_ % most_steps];
  step = {};
  step.plan = here_;
  step.first = window_ == here_.first;
  if (here_.first < here_.last) {
    const int64_t id = id_of(here_, window_);
    const bool held = cache_.holds(id);
    step.window = window_;
    step.buffer = cache_.buffer_for(id);
    step.begin = std::max(window_ * g_.keys, here_.group_keys.begin);
    step.length = std::min((window_ + 1) * g_.keys, here_.group_keys.end) - step.begin;
    step.fetched = fetches(held);
    if (step.fetched) CQSA_TRY(fetch_window(step, held));
    cache_.use(id);
    last_use_[step.buffer] = fetched_;
  }
  ++window_;
  step.last = window_ >= here_.last;
  ++fetched_;
  return fetch_share_of_next();
}

// Until the last call that reads it has been launched, only the threads go on: gate n opens when n steps are.
cqsa_status stream_runner::wait_for_buffer(int buffer) {
  device_event& free = session_.window_free[buffer];
  if (last_use_[buffer] < launched_) return session_.wait(stream_in, free);
  return session_.wait_behind(last_use_[buffer] + 1, free);
}

cqsa_status stream_runner::fetch_window(const stream_step& step, bool held) {
  const tile_plan& t = step.plan;
  const device_window& to = session_.device.windows[step.buffer];
  CQSA_TRY(wait_for_buffer(step.buffer));
  if (g_.kv_in && !held) {
    CQSA_TRY(fetch_operand(step, t.k, p_.head_dim, to.k));
    CQSA_TRY(fetch_operand(step, t.v, p_.head_dim_v, to.v));
    CQSA_TRY(fetch_operand(step, t.k_scale, scale_groups(t.k_scale, run_.problem.k_scale_row_bytes()), to.k_scale));
    CQSA_TRY(fetch_operand(step, t.v_scale, scale_groups(t.v_scale, run_.problem.v_scale_row_bytes()), to.v_scale));
  }
  CQSA_TRY(fetch_plane(step, t.mask, p_.mask_broadcast, to.mask, held));
  CQSA_TRY(fetch_plane(step, t.bias, p_.bias_broadcast, to.bias, held));
  return session_.record(session_.window_ready[fetched_ % most_steps], stream_in);
}

cqsa_status stream_runner::fetch_operand(const stream_step& step, const cqsa_view& operand, int64_t channels, void* to) {
  if (channels == 0) return CQSA_OK;
  const device_group& group = step.plan.tile.group;
  host_tile tile = tile_of(operand, {group.items, group.heads, step.length, channels}, p_.memory_kv);
  tile.rows.first = step.begin;
  tile.rows.pages = group.pages;
  tile.rows.page_stride = group.page_stride;
  tile.rows.page_size = p_.page_size;
  return session_.fetch(tile, to);
}

cqsa_status stream_runner::fetch_plane(const stream_step& step, const cqsa_view& plane, uint32_t bits, void* to, bool held) {
  if (!plane.data || !g_.q_in || (held && (bits & CQSA_BROADCAST_QUERY))) return CQSA_OK;
  host_tile tile = plane_tile(plane, bits, step.plan.tile.group, step.plan.tile.rows, step.length, p_.memory_q);
  tile.rows.first = bits & CQSA_BROADCAST_QUERY ? 0 : step.plan.tile.q;
  tile.columns.first = bits & CQSA_BROADCAST_KEY ? 0 : step.begin;
  return session_.fetch(tile, to);
}

// The tile that had the slot before must have been launched.
bool stream_runner::slot_is_free(const tile_plan& plan) const { return plan.number < tiles_launched_ + g_.q_slots; }

cqsa_status stream_runner::fetch_queries(const tile_plan& plan, int64_t& lines, int64_t end) {
  const int64_t slot = plan.number % g_.q_slots;
  host_tile tile = tile_of(plan.q, {plan.tile.group.items, plan.tile.group.q_heads, plan.tile.rows, p_.head_dim}, p_.memory_q);
  tile.rows.first = plan.tile.q;
  if (lines == 0) CQSA_TRY(session_.wait(stream_in, session_.q_free[slot]));
  CQSA_TRY(session_.fetch(tile, lines, end, session_.device.q[slot]));
  lines = end;
  return end == lines_of(plan) ? session_.record(session_.q_ready[slot], stream_in) : CQSA_OK;
}

// The queries of the next tile travel with the windows of this one, in equal shares: the first calls of a tile would have to wait
// for them otherwise, or a window of this tile would, if they came at once.
cqsa_status stream_runner::fetch_share_of_next() {
  if (!g_.q_in || g_.q_slots < 2) return CQSA_OK;
  if (!have_ahead_) {
    CQSA_TRY(next_tile(ahead_, have_ahead_));
    ahead_lines_ = 0;
  }
  if (!have_ahead_ || !slot_is_free(ahead_)) return CQSA_OK;
  const int64_t steps = std::max<int64_t>(1, here_.last - window_ + 1), left = lines_of(ahead_) - ahead_lines_;
  return left ? fetch_queries(ahead_, ahead_lines_, ahead_lines_ + (left + steps - 1) / steps) : CQSA_OK;
}

// ---- views -----------------------------------------------------------------------------------------------------------------------

cqsa_view stream_runner::view_of_keys(const stream_step& step, const cqsa_view& operand, int64_t channels, void* at) const {
  const device_group& group = step.plan.tile.group;
  if (!g_.kv_in) return moved(operand, 0, 0, group.pages ? 0 : step.begin, 0);
  return compact_view(at, operand.dtype, {group.items, group.heads, step.length, channels});
}

cqsa_view stream_runner::view_of_plane(const stream_step& step, const cqsa_view& plane, uint32_t bits, void* at) const {
  if (!plane.data || !g_.q_in) return moved(plane, 0, 0, step.plan.tile.q, step.begin);
  return plane_view(plane, bits, step.plan.tile.group, step.plan.tile.rows, step.length, at);
}

void stream_runner::view_step(const stream_step& step, cqsa_attention_leaf& leaf) const {
  const tile_plan& t = step.plan;
  const device_window& at = session_.device.windows[step.buffer];
  const int64_t k_groups = scale_groups(t.k_scale, run_.problem.k_scale_row_bytes());
  const int64_t v_groups = scale_groups(t.v_scale, run_.problem.v_scale_row_bytes());
  leaf.k = view_of_keys(step, t.k, p_.head_dim, at.k);
  leaf.v = view_of_keys(step, t.v, p_.head_dim_v, at.v);
  if (k_groups) leaf.k_scale = view_of_keys(step, t.k_scale, k_groups, at.k_scale);
  if (v_groups) leaf.v_scale = view_of_keys(step, t.v_scale, v_groups, at.v_scale);
  leaf.mask = view_of_plane(step, t.mask, p_.mask_broadcast, at.mask);
  leaf.bias = view_of_plane(step, t.bias, p_.bias_broadcast, at.bias);
}

void stream_runner::view_tile(const tile_plan& plan, cqsa_attention_leaf& leaf) const {
  const query_tile& tile = plan.tile;
  const int64_t q_slot = plan.number % g_.q_slots, slot = plan.number % g_.out_slots;
  leaf.q = g_.q_in ? compact_view(session_.device.q[q_slot], plan.q.dtype, {tile.group.items, tile.group.q_heads, tile.rows, p_.head_dim})
                   : moved(plan.q, 0, 0, tile.q, 0);
  leaf.state_acc = session_.device.acc;
  leaf.state_m = session_.device.m;
  leaf.state_l = session_.device.l;
  leaf.state_rows = g_.rows;
  leaf.out = moved(plan.out, 0, 0, tile.q, 0);
  leaf.lse = moved(plan.lse, 0, 0, tile.q, 0);
  if (!g_.out_back) return;
  leaf.out = compact_view(session_.device.out[slot], plan.out.dtype, {tile.group.items, tile.group.q_heads, tile.rows, p_.head_dim_v});
  if (plan.lse.data) leaf.lse = compact_view(session_.device.lse[slot], plan.lse.dtype, {tile.group.items, tile.group.q_heads, tile.rows, 1});
}

// ---- launching -------------------------------------------------------------------------------------------------------------------

cqsa_status stream_runner::launch_step() {
  const stream_step& step = steps_[launched_ % most_steps];
  const tile_plan& plan = step.plan;
  CQSA_TRY(poll_run(run_.run, 0));
  CQSA_TRY(pace());
  cqsa_attention_leaf leaf = run_.leaf_of(plan.tile.group);
  view_tile(plan, leaf);
  if (step.first) started_ = false;
  if (step.first && g_.q_in) CQSA_TRY(session_.wait(stream_compute, session_.q_ready[plan.number % g_.q_slots]));
  // The tile that had the output slot before must have left it.
  if (step.last && g_.out_back && plan.number >= g_.out_slots)
    CQSA_TRY(session_.wait(stream_compute, session_.out_done[(plan.number - g_.out_slots) % session_.out_events]));
  const int64_t calls = session_.leaf_calls();
  if (step.window >= 0) {
    if (step.fetched) CQSA_TRY(session_.wait(stream_compute, session_.window_ready[launched_ % most_steps]));
    view_step(step, leaf);
    CQSA_TRY(call_window(step, leaf));
    CQSA_TRY(session_.record(session_.window_free[step.buffer], stream_compute));
  }
  // No key was left for the last call: none is visible, or the last pages are hidden.
  if (step.last && session_.leaf_calls() == calls) CQSA_TRY(finish_without_keys(step, leaf));
  CQSA_TRY(session_.record(session_.paced[launched_ % pacer::most], stream_compute));
  if (step.last) CQSA_TRY(leave(plan));
  return session_.launched(++launched_);
}

cqsa_status stream_runner::pace() {
  const int64_t oldest = launched_ - pacer_.depth();
  if (oldest < paced_) return CQSA_OK;
  CQSA_TRY(session_.sync(session_.paced[oldest % pacer::most]));
  pacer_.passed(oldest + 1 - paced_);
  paced_ = oldest + 1;
  return CQSA_OK;
}

// ---- leaf calls ----------------------------------------------------------------------------------------------------------------------

cqsa_status stream_runner::call(cqsa_attention_leaf& leaf, int64_t rects, bool last) {
  leaf.num_rects = rects;
  leaf.flags = (started_ ? CQSA_LEAF_STATE_IN : 0) | (last ? 0 : CQSA_LEAF_STATE_OUT);
  started_ = true;
  return run_.launch(leaf);
}

cqsa_status stream_runner::call_window(const stream_step& step, cqsa_attention_leaf& leaf) {
  const query_tile& tile = step.plan.tile;
  const key_range& seen = step.plan.seen;
  const key_range keys{std::max(seen.begin, step.begin), std::min(seen.end, step.begin + step.length)};
  if (!tile.group.pages) {
    session_.host.rects[0] = {tile.q, keys.begin, tile.rows, keys.length(), 0, keys.begin - step.begin, 0};
    return call(leaf, 1, step.last);
  }
  const int64_t per_page = g_.kv_in ? 0 : rows_per_page(leaf);
  if (g_.kv_in || per_page > 0) {
    const int64_t count = list_pages(step, keys, per_page, true);
    return count ? call(leaf, count, step.last) : CQSA_OK;
  }
  return call_pages(step, list_pages(step, keys, p_.page_size, false), leaf);
}

// Rectangles for the keys that are on a page: of the compact window, or (rows_per_page > 0) of the pool on the device.
int64_t stream_runner::list_pages(const stream_step& step, const key_range& keys, int64_t rows_per_page, bool join) {
  const query_tile& tile = step.plan.tile;
  cqsa_rect* rects = session_.host.rects;
  int64_t count = 0;
  for (int64_t key = keys.begin, end; key < keys.end; key = end) {
    const int64_t page = key / p_.page_size;
    end = std::min(keys.end, (page + 1) * p_.page_size);
    const int64_t id = tile.group.pages[page * tile.group.page_stride];
    if (id < 0) continue;
    const int64_t row = rows_per_page ? id * rows_per_page + key % p_.page_size : key - step.begin;
    cqsa_rect* before = count && join ? &rects[count - 1] : nullptr;
    if (before && before->k_pos + before->k_len == key && before->k_row + before->k_len == row)
      before->k_len += end - key;
    else
      rects[count++] = {tile.q, key, tile.rows, end - key, 0, row, 0};
  }
  return count;
}

// How many rows apart pages are in a pool on the device, when that is the same for all its operands, so that a page is a row
// number; 0 otherwise. Not with a mask or a bias: their columns are keys, and a rectangle has only one row for both.
int64_t stream_runner::rows_per_page(const cqsa_attention_leaf& leaf) const {
  if (leaf.mask.data || leaf.bias.data || leaf.k.stride[2] == 0) return 0;
  const int64_t rows = leaf.k.stride[0] / leaf.k.stride[2];
  const auto agrees = [rows](const cqsa_view& view) { return view.stride[0] == rows * view.stride[2]; };
  const bool all = agrees(leaf.k) && agrees(leaf.v) && (run_.problem.k_scale_row_bytes() == 0 || agrees(leaf.k_scale)) &&
                   (run_.problem.v_scale_row_bytes() == 0 || agrees(leaf.v_scale));
  return all && rows > 0 ? rows : 0;
}

// One leaf call for each page, with views that begin at its first key.
cqsa_status stream_runner::call_pages(const stream_step& step, int64_t count, const cqsa_attention_leaf& leaf) {
  cqsa_rect* rects = session_.host.rects;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t page = rects[i].k_row / p_.page_size, inside = rects[i].k_row % p_.page_size;
    cqsa_attention_leaf one = leaf;
    one.k = moved(leaf.k, page, 0, inside, 0);
    one.v = moved(leaf.v, page, 0, inside, 0);
    if (run_.problem.k_scale_row_bytes()) one.k_scale = moved(leaf.k_scale, page, 0, inside, 0);
    if (run_.problem.v_scale_row_bytes()) one.v_scale = moved(leaf.v_scale, page, 0, inside, 0);
    one.mask = moved(leaf.mask, 0, 0, 0, rects[i].k_pos - step.begin);
    one.bias = moved(leaf.bias, 0, 0, 0, rects[i].k_pos - step.begin);
    rects[i].k_row = 0;
    one.rects = rects + i;
    CQSA_TRY(call(one, 1, step.last && i + 1 == count));
  }
  return CQSA_OK;
}

// A rectangle without keys writes the rows.
cqsa_status stream_runner::finish_without_keys(const stream_step& step, cqsa_attention_leaf& leaf) {
  for (cqsa_view* view : {&leaf.k, &leaf.v, &leaf.mask, &leaf.bias}) *view = unread_view(*view, session_.device.header);
  if (run_.problem.k_scale_row_bytes()) leaf.k_scale = unread_view(leaf.k_scale, session_.device.header);
  if (run_.problem.v_scale_row_bytes()) leaf.v_scale = unread_view(leaf.v_scale, session_.device.header);
  session_.host.rects[0] = {step.plan.tile.q, 0, step.plan.tile.rows, 0, 0, 0, 0};
  return call(leaf, 1, true);
}

// ---- the way out -----------------------------------------------------------------------------------------------------------------------

cqsa_status stream_runner::leave(const tile_plan& plan) {
  if (g_.q_in) CQSA_TRY(session_.record(session_.q_free[plan.number % g_.q_slots], stream_compute));
  ++tiles_launched_;
  if (!g_.out_back) return run_.done(plan.tile.group, plan.tile.rows);
  // The tile before comes back while the next one is computed; the one before that has left by now, or is waited for.
  if (pending_count_ == g_.out_slots) CQSA_TRY(finish_oldest());
  return store(plan);
}

cqsa_status stream_runner::store(const tile_plan& plan) {
  const query_tile& t = plan.tile;
  const int64_t slot = plan.number % g_.out_slots;
  device_event& ready = session_.out_ready[plan.number % 3];
  CQSA_TRY(session_.record(ready, stream_compute));
  CQSA_TRY(session_.wait(stream_back, ready));
  host_tile out = tile_of(plan.out, {t.group.items, t.group.q_heads, t.rows, p_.head_dim_v}, p_.memory_out);
  out.rows.first = t.q;
  CQSA_TRY(session_.store(out, session_.device.out[slot]));
  if (plan.lse.data) {
    host_tile lse = tile_of(plan.lse, {t.group.items, t.group.q_heads, t.rows, 1}, p_.memory_out);
    lse.rows.first = t.q;
    CQSA_TRY(session_.store(lse, session_.device.lse[slot]));
  }
  CQSA_TRY(session_.record(session_.out_done[plan.number % session_.out_events], stream_back));
  pending_[pending_count_++] = {t, session_.stored()};
  return CQSA_OK;
}

cqsa_status stream_runner::finish_oldest() {
  const query_tile tile = pending_[0].tile;
  CQSA_TRY(session_.await_stored(pending_[0].stored));
  pending_[0] = pending_[1];
  --pending_count_;
  if (run_.listener) CQSA_TRY(run_.listener->finished(run_, tile));
  return run_.done(tile.group, tile.rows);
}

}  // namespace

cqsa_status run_device_stream(device_run& run, const device_region& region) { return stream_runner(run, region).run(); }

}  // namespace cqsa
