// SPDX-License-Identifier: Apache-2.0
// Cyclic quorum sets on a device: one leaf call for each task, on operands that are resident or gathered for the task. The
// state of all rows is on the device, updated in place, or in host memory, where partial states are merged in task order.
#include <cmath>

#include "ops/attention/device_run.h"

namespace cqsa {
namespace {

class cqs_runner {
 public:
  explicit cqs_runner(device_run& run)
      : run_(run), g_(run.g), p_(run.problem.p), session_(run.session), seqlen_(run.g.shape.seqlen),
        band_(key_band::of(run.problem.p, run.g.shape.seqlen, run.g.shape.seqlen)) {}
  cqsa_status run(const device_region& region);

 private:
  struct pending_task {
    int64_t task, buffer;
  };

  cqsa_status run_group();
  void begin_group();
  cqsa_status clear_accumulator();
  cqsa_status bring_resident();
  cqsa_status prepare_task(int64_t task);
  cqsa_status run_task(int64_t task, int64_t tasks);
  cqsa_status launch_task(int64_t task);
  cqsa_status bring_task(int64_t buffer);
  cqsa_status bring(const cqsa_view& operand, int32_t place, int64_t heads, int64_t rows, int64_t channels, bool by_list, void* to);
  cqsa_status bring_keys(int64_t rows, bool by_list, const device_window& to);
  cqsa_status bring_plane(const cqsa_view& plane, uint32_t bits, void* to);
  void view_task(const device_window& at, cqsa_attention_leaf& leaf) const;
  cqsa_view view_of(const cqsa_view& operand, int64_t heads, int64_t channels, bool in, bool by_list, void* at) const;
  cqsa_status call_task(int64_t blocks, cqsa_attention_leaf& leaf);
  cqsa_status call_blocks(int64_t blocks, const cqsa_attention_leaf& leaf);
  cqsa_status merge_oldest();
  cqsa_status merge_state(const device_window& from, int64_t rows, int64_t segments, int64_t blocks);
  void make_factors(int64_t rows, int64_t blocks);
  void merge_factor(int64_t line, int64_t state);
  cqsa_status finish();
  cqsa_status finish_rows(int64_t first, int64_t rows, int64_t slot);
  cqsa_status bring_state(int64_t first, int64_t rows, int64_t slot);
  cqsa_status store_rows(int64_t first, int64_t rows, int64_t slot);
  cqsa_attention_leaf blank_leaf() const;

  bool has_planes() const { return g_.q_in && (mask_.data || bias_.data); }
  bool gathers() const { return g_.gathers_q() || g_.gathers_kv() || has_planes(); }  // something comes for each task
  int64_t lines() const { return group_.items * group_.q_heads; }

  device_run& run_;
  const device_geometry& g_;
  const cqsa_attention_params& p_;
  device_session& session_;
  const int64_t seqlen_;
  const key_band band_;
  device_group group_{};
  cqsa_view q_{}, k_{}, v_{}, k_scale_{}, v_scale_{}, mask_{}, bias_{};  // of the group
  int64_t blocks_ = 0, segments_ = 0, rows_ = 0;  // of the task that is prepared
  int64_t issued_ = 0;               // tasks with a leaf call; decides the buffer
  pending_task tasks_[3];
  int pending_tasks_ = 0;
  int64_t stored_[2] = {};  // of each output slot: the place in the lane behind what left it last
};

cqsa_status cqs_runner::run(const device_region& region) {
  for (int64_t item = region.item_begin; item < region.item_end; item += g_.items)
    for (int64_t head = region.head_begin; head < region.head_end; head += g_.heads) {
      const int64_t items = std::min(g_.items, region.item_end - item), heads = std::min(g_.heads, region.head_end - head);
      CQSA_TRY(run_.make_group(item, items, head, heads, group_));
      run_.unfinished = {group_, 0, seqlen_};  // a group whose state is lost begins again
      CQSA_TRY(run_group());
    }
  return session_.drain();
}

void cqs_runner::begin_group() {
  const cqsa_attention_leaf& whole = run_.whole;
  q_ = run_.q_of(group_);
  k_ = run_.keys_of(whole.k, group_);
  v_ = run_.keys_of(whole.v, group_);
  k_scale_ = run_.problem.k_scale_row_bytes() ? run_.keys_of(whole.k_scale, group_) : cqsa_view{};
  v_scale_ = run_.problem.v_scale_row_bytes() ? run_.keys_of(whole.v_scale, group_) : cqsa_view{};
  mask_ = run_.plane_of(whole.mask, group_);
  bias_ = run_.plane_of(whole.bias, group_);
}

cqsa_status cqs_runner::run_group() {
  begin_group();
  CQSA_TRY(clear_accumulator());
  if (g_.resident) CQSA_TRY(bring_resident());
  const int64_t tasks = cqs_num_tasks(g_.shape);
  const int64_t work = seqlen_ * group_.items * group_.heads, share = work / (tasks + 1);
  CQSA_TRY(prepare_task(0));
  for (int64_t task = 0; task < tasks; ++task) {
    CQSA_TRY(run_task(task, tasks));
    CQSA_TRY(poll_run(run_.run, share));
  }
  while (pending_tasks_ > 0) CQSA_TRY(merge_oldest());
  CQSA_TRY(finish());
  return poll_run(run_.run, work - share * tasks);
}

// A leaf of the group in which no operand is read and no output is written.
cqsa_attention_leaf cqs_runner::blank_leaf() const {
  cqsa_attention_leaf leaf = run_.leaf_of(group_);
  for (cqsa_view* view : {&leaf.q, &leaf.k, &leaf.v, &leaf.mask, &leaf.bias, &leaf.out, &leaf.lse})
    *view = unread_view(*view, session_.device.header);
  if (k_scale_.data) leaf.k_scale = unread_view(leaf.k_scale, session_.device.header);
  if (v_scale_.data) leaf.v_scale = unread_view(leaf.v_scale, session_.device.header);
  leaf.state_acc = session_.device.acc;
  leaf.state_m = session_.device.m;
  leaf.state_l = session_.device.l;
  leaf.state_rows = seqlen_;
  return leaf;
}

// The state of rows that have met no key: on the device a leaf without keys writes it.
cqsa_status cqs_runner::clear_accumulator() {
  if (!g_.acc_on_host) {
    cqsa_attention_leaf leaf = blank_leaf();
    session_.host.rects[0] = {0, 0, seqlen_, 0, 0, 0, 0};
    leaf.num_rects = 1;
    leaf.flags = CQSA_LEAF_STATE_OUT;
    return run_.launch(leaf);
  }
  std::fill_n(session_.host.acc, lines() * seqlen_ * p_.head_dim_v, 0.0f);
  std::fill_n(session_.host.m, lines() * seqlen_, -HUGE_VALF);
  std::fill_n(session_.host.l, lines() * seqlen_, 0.0f);
  return CQSA_OK;
}

// ---- operands --------------------------------------------------------------------------------------------------------------------------

cqsa_status cqs_runner::bring(const cqsa_view& operand, int32_t place, int64_t heads, int64_t rows, int64_t channels, bool by_list,
                              void* to) {
  host_tile tile = tile_of(operand, {group_.items, heads, rows, channels}, place);
  if (by_list) {
    tile.rows.segments = session_.host.segments[0];
    tile.rows.num_segments = segments_;
  }
  return session_.fetch(tile, to);
}

cqsa_status cqs_runner::bring_keys(int64_t rows, bool by_list, const device_window& to) {
  CQSA_TRY(bring(k_, p_.memory_kv, group_.heads, rows, p_.head_dim, by_list, to.k));
  CQSA_TRY(bring(v_, p_.memory_kv, group_.heads, rows, p_.head_dim_v, by_list, to.v));
  const int64_t k_groups = scale_groups(k_scale_, run_.problem.k_scale_row_bytes());
  const int64_t v_groups = scale_groups(v_scale_, run_.problem.v_scale_row_bytes());
  if (k_groups) CQSA_TRY(bring(k_scale_, p_.memory_kv, group_.heads, rows, k_groups, by_list, to.k_scale));
  if (v_groups) CQSA_TRY(bring(v_scale_, p_.memory_kv, group_.heads, rows, v_groups, by_list, to.v_scale));
  return CQSA_OK;
}

cqsa_status cqs_runner::bring_plane(const cqsa_view& plane, uint32_t bits, void* to) {
  if (!plane.data) return CQSA_OK;
  host_tile tile = plane_tile(plane, bits, group_, rows_, rows_, p_.memory_q);
  index_map list;
  list.segments = session_.host.segments[0];
  list.num_segments = segments_;
  if (!(bits & CQSA_BROADCAST_QUERY)) tile.rows = list;
  if (!(bits & CQSA_BROADCAST_KEY)) tile.columns = list;
  return session_.fetch(tile, to);
}

cqsa_status cqs_runner::bring_resident() {
  if (!g_.q_in && !g_.kv_in) return CQSA_OK;
  // The group before may still be read.
  for (int64_t i = 0; i < g_.buffers; ++i) CQSA_TRY(session_.wait(stream_in, session_.window_free[i]));
  const device_window& to = session_.device.windows[0];
  if (g_.q_in) CQSA_TRY(bring(q_, p_.memory_q, group_.q_heads, seqlen_, p_.head_dim, false, to.q));
  if (g_.kv_in) CQSA_TRY(bring_keys(seqlen_, false, to));
  CQSA_TRY(session_.record(session_.window_ready[0], stream_in));
  return session_.wait(stream_compute, session_.window_ready[0]);
}

cqsa_status cqs_runner::bring_task(int64_t buffer) {
  const bool planes = has_planes();
  if (!gathers()) return CQSA_OK;
  const device_window& to = session_.device.windows[buffer];
  CQSA_TRY(session_.wait(stream_in, session_.window_free[buffer]));
  if (g_.gathers_q()) CQSA_TRY(bring(q_, p_.memory_q, group_.q_heads, rows_, p_.head_dim, true, to.q));
  if (g_.gathers_kv()) CQSA_TRY(bring_keys(rows_, true, to));
  if (planes) CQSA_TRY(bring_plane(mask_, p_.mask_broadcast, to.mask));
  if (planes) CQSA_TRY(bring_plane(bias_, p_.bias_broadcast, to.bias));
  return session_.record(session_.window_ready[buffer], stream_in);
}

cqsa_view cqs_runner::view_of(const cqsa_view& operand, int64_t heads, int64_t channels, bool in, bool by_list, void* at) const {
  if (!in) return operand;
  return compact_view(at, operand.dtype, {group_.items, heads, by_list ? rows_ : seqlen_, channels});
}

void cqs_runner::view_task(const device_window& at, cqsa_attention_leaf& leaf) const {
  const bool by_list = g_.gathers_kv();
  leaf.q = view_of(q_, group_.q_heads, p_.head_dim, g_.q_in, g_.gathers_q(), at.q);
  leaf.k = view_of(k_, group_.heads, p_.head_dim, g_.kv_in, by_list, at.k);
  leaf.v = view_of(v_, group_.heads, p_.head_dim_v, g_.kv_in, by_list, at.v);
  const int64_t k_groups = scale_groups(k_scale_, run_.problem.k_scale_row_bytes());
  const int64_t v_groups = scale_groups(v_scale_, run_.problem.v_scale_row_bytes());
  if (k_groups) leaf.k_scale = view_of(k_scale_, group_.heads, k_groups, g_.kv_in, by_list, at.k_scale);
  if (v_groups) leaf.v_scale = view_of(v_scale_, group_.heads, v_groups, g_.kv_in, by_list, at.v_scale);
  leaf.mask = mask_.data && g_.q_in ? plane_view(mask_, p_.mask_broadcast, group_, rows_, rows_, at.mask) : mask_;
  leaf.bias = bias_.data && g_.q_in ? plane_view(bias_, p_.bias_broadcast, group_, rows_, rows_, at.bias) : bias_;
}

// ---- tasks -----------------------------------------------------------------------------------------------------------------------------

// Lists of the task, and its operands on their way. The task before was launched: what it needed has left the lists.
cqsa_status cqs_runner::prepare_task(int64_t task) {
  blocks_ = visible_blocks(g_.shape, band_, task, session_.host.blocks[0]);
  if (blocks_ == 0) return CQSA_OK;
  segments_ = cqs_task_segments(g_.shape, task, session_.host.segments[0]);
  rows_ = task_rows(session_.host.segments[0], segments_);
  return bring_task(issued_ % g_.buffers);
}

// The operands of the next task are fetched before the state of an older one is merged: the device need not wait for that.
cqsa_status cqs_runner::run_task(int64_t task, int64_t tasks) {
  const bool launched = blocks_ > 0;
  if (launched) CQSA_TRY(launch_task(task));
  if (task + 1 < tasks) CQSA_TRY(prepare_task(task + 1));
  return launched && g_.acc_on_host && pending_tasks_ == g_.buffers ? merge_oldest() : CQSA_OK;
}

cqsa_status cqs_runner::launch_task(int64_t task) {
  // So many tasks may be queued: the device does not wait for the host, and a cancel is heard soon.
  constexpr int64_t queued = 8;
  device_event& paced = session_.paced[issued_ % queued];
  if (issued_ >= queued) CQSA_TRY(session_.sync(paced));
  const int64_t buffer = issued_++ % g_.buffers;
  const device_window& at = session_.device.windows[buffer];
  if (gathers()) CQSA_TRY(session_.wait(stream_compute, session_.window_ready[buffer]));
  cqsa_attention_leaf leaf = blank_leaf();
  view_task(at, leaf);
  if (g_.acc_on_host) {
    leaf.state_acc = at.acc;
    leaf.state_m = at.m;
    leaf.state_l = at.l;
    leaf.state_rows = rows_;
  }
  CQSA_TRY(call_task(blocks_, leaf));
  CQSA_TRY(session_.record(session_.window_free[buffer], stream_compute));
  CQSA_TRY(session_.record(paced, stream_compute));
  if (!g_.acc_on_host) return CQSA_OK;
  tasks_[pending_tasks_++] = {task, buffer};
  return session_.record(session_.out_ready[buffer], stream_compute);
}

cqsa_status cqs_runner::call_task(int64_t blocks, cqsa_attention_leaf& leaf) {
  if (calls_per_block(run_.problem, g_)) return call_blocks(blocks, leaf);
  for (int64_t i = 0; i < blocks; ++i) {
    const cqs_block& b = session_.host.blocks[0][i];
    session_.host.rects[i] = {b.q_pos, b.k_pos, b.q_len, b.k_len, g_.gathers_q() ? b.q_row : b.q_pos,
                              g_.gathers_kv() ? b.k_row : b.k_pos, g_.acc_on_host ? b.q_row : b.q_pos};
  }
  leaf.num_rects = blocks;
  leaf.flags = CQSA_LEAF_STATE_OUT | (g_.acc_on_host ? 0 : CQSA_LEAF_STATE_IN);
  return run_.launch(leaf);
}

cqsa_status cqs_runner::call_blocks(int64_t blocks, const cqsa_attention_leaf& leaf) {
  const cqs_block* list = session_.host.blocks[0];
  for (int64_t i = 0; i < blocks; ++i) {
    const cqs_block& b = list[i];
    cqsa_attention_leaf one = leaf;
    const int64_t q = g_.gathers_q() ? b.q_row : b.q_pos, k = g_.gathers_kv() ? b.k_row : b.k_pos;
    one.q = moved(leaf.q, 0, 0, q, 0);
    one.k = moved(leaf.k, 0, 0, k, 0);
    one.v = moved(leaf.v, 0, 0, k, 0);
    if (k_scale_.data) one.k_scale = moved(leaf.k_scale, 0, 0, k, 0);
    if (v_scale_.data) one.v_scale = moved(leaf.v_scale, 0, 0, k, 0);
    for (cqsa_view* plane : {&one.mask, &one.bias})
      *plane = moved(*plane, 0, 0, g_.q_in ? b.q_row : b.q_pos, g_.q_in ? b.k_row : b.k_pos);
    session_.host.rects[0] = {b.q_pos, b.k_pos, b.q_len, b.k_len, 0, 0, g_.acc_on_host ? b.q_row : b.q_pos};
    one.num_rects = 1;
    // A task's own state begins with the first block of its rows.
    const bool goes_on = !g_.acc_on_host || (i > 0 && list[i - 1].q_row == b.q_row);
    one.flags = CQSA_LEAF_STATE_OUT | (goes_on ? CQSA_LEAF_STATE_IN : 0);
    CQSA_TRY(run_.launch(one));
  }
  return CQSA_OK;
}

// ---- merge on the host -------------------------------------------------------------------------------------------------------------------

cqsa_status cqs_runner::merge_oldest() {
  const pending_task next = tasks_[0];
  std::copy(tasks_ + 1, tasks_ + pending_tasks_, tasks_);
  --pending_tasks_;
  const int64_t blocks = visible_blocks(g_.shape, band_, next.task, session_.host.blocks[1]);
  const int64_t segments = cqs_task_segments(g_.shape, next.task, session_.host.segments[1]);
  CQSA_TRY(session_.wait(stream_back, session_.out_ready[next.buffer]));
  return merge_state(session_.device.windows[next.buffer], task_rows(session_.host.segments[1], segments), segments, blocks);
}

cqsa_status cqs_runner::merge_state(const device_window& from, int64_t rows, int64_t segments, int64_t blocks) {
  const device_host_layout& host = session_.host;
  const auto keep = [](float* to) {
    return [to](int64_t begin, int64_t end, const char* data) {
      std::copy_n(reinterpret_cast<const float*>(data), end - begin, to + begin);
      return CQSA_OK;
    };
  };
  CQSA_TRY(session_.collect(from.m, lines() * rows, 4, keep(host.new_factor)));
  CQSA_TRY(session_.collect(from.l, lines() * rows, 4, keep(host.old_factor)));
  make_factors(rows, blocks);
  const int64_t dim = p_.head_dim_v;
  return session_.collect(from.acc, lines() * rows, dim * 4, [&](int64_t begin, int64_t end, const char* data) {
    auto body = [&](int64_t part_begin, int64_t part_end) {
      for (int64_t line = begin + part_begin; line < begin + part_end; ++line) {
        const float old_factor = host.old_factor[line], new_factor = host.new_factor[line];
        if (new_factor == 0 && old_factor == 1) continue;
        const int64_t position = run_of_row(host.segments[1], segments, line % rows).position;
        float* acc = host.acc + (line / rows * seqlen_ + position) * dim;
        const float* part = reinterpret_cast<const float*>(data) + (line - begin) * dim;
        // A task that saw no key of the row brings nothing, not even something to multiply by 0.
        for (int64_t c = 0; c < dim; ++c) acc[c] = old_factor * acc[c] + (new_factor == 0 ? 0.0f : new_factor * part[c]);
      }
    };
    return for_ranges(session_.context(), end - begin, (end - begin) * dim * 4, body);
  });
}

// The task's m and l, row by row, become the factors of the merge. Rows without a block of this task keep what they have: the
// leaf has written no state for them.
void cqs_runner::make_factors(int64_t rows, int64_t blocks) {
  const device_host_layout& host = session_.host;
  for (int64_t head = 0; head < lines(); ++head) {
    int64_t row = 0;
    const auto skip_to = [&](int64_t end) {
      for (; row < end; ++row) host.old_factor[head * rows + row] = 1, host.new_factor[head * rows + row] = 0;
    };
    for (int64_t i = 0; i < blocks; ++i) {
      const cqs_block& b = host.blocks[1][i];
      if (i > 0 && host.blocks[1][i - 1].q_row == b.q_row) continue;
      skip_to(b.q_row);
      for (; row < b.q_row + b.q_len; ++row) merge_factor(head * rows + row, head * seqlen_ + b.q_pos + (row - b.q_row));
    }
    skip_to(rows);
  }
}

void cqs_runner::merge_factor(int64_t line, int64_t state) {
  const device_host_layout& host = session_.host;
  const float task_m = host.new_factor[line], task_l = host.old_factor[line], own_m = host.m[state];
  host.old_factor[line] = 1;
  host.new_factor[line] = 0;
  if (task_m == -HUGE_VALF) return;
  const float m = task_m > own_m || task_m != task_m ? task_m : own_m;  // a NaN stays
  host.old_factor[line] = std::exp(own_m - m);
  host.new_factor[line] = std::exp(task_m - m);
  host.m[state] = m;
  host.l[state] = host.old_factor[line] * host.l[state] + host.new_factor[line] * task_l;
}

// ---- the end of a group --------------------------------------------------------------------------------------------------------------------

cqsa_status cqs_runner::finish() {
  int64_t tiles = 0;
  for (int64_t first = 0; first < seqlen_; first += g_.finish_rows)
    CQSA_TRY(finish_rows(first, std::min(g_.finish_rows, seqlen_ - first), tiles++ % g_.out_slots));
  return session_.await_stored(session_.stored());
}

// Rows of the host's accumulator go up to be finished.
cqsa_status cqs_runner::bring_state(int64_t first, int64_t rows, int64_t slot) {
  const device_window& to = session_.device.windows[slot];
  const auto bring_part = [&](float* from, int64_t channels, float* at) {
    const cqsa_view view{from, CQSA_DTYPE_F32, 0, {group_.q_heads * seqlen_ * channels, seqlen_ * channels, channels, 1}};
    host_tile tile = tile_of(view, {group_.items, group_.q_heads, rows, channels}, CQSA_MEMORY_HOST);
    tile.rows.first = first;
    return session_.fetch(tile, at);
  };
  CQSA_TRY(session_.wait(stream_in, session_.window_free[slot]));
  CQSA_TRY(bring_part(session_.host.acc, p_.head_dim_v, to.acc));
  CQSA_TRY(bring_part(session_.host.m, 1, to.m));
  CQSA_TRY(bring_part(session_.host.l, 1, to.l));
  CQSA_TRY(session_.record(session_.window_ready[slot], stream_in));
  return session_.wait(stream_compute, session_.window_ready[slot]);
}

cqsa_status cqs_runner::finish_rows(int64_t first, int64_t rows, int64_t slot) {
  cqsa_attention_leaf leaf = blank_leaf();
  const cqsa_attention_leaf& whole = run_.whole;
  if (g_.out_back) CQSA_TRY(session_.await_stored(stored_[slot]));
  if (g_.acc_on_host) {
    CQSA_TRY(bring_state(first, rows, slot));
    leaf.state_acc = session_.device.windows[slot].acc;
    leaf.state_m = session_.device.windows[slot].m;
    leaf.state_l = session_.device.windows[slot].l;
    leaf.state_rows = rows;
  }
  if (g_.out_back) {
    leaf.out = compact_view(session_.device.out[slot], whole.out.dtype, {group_.items, group_.q_heads, rows, p_.head_dim_v});
    if (whole.lse.data) leaf.lse = compact_view(session_.device.lse[slot], whole.lse.dtype, {group_.items, group_.q_heads, rows, 1});
  } else {
    leaf.out = moved(run_.out_of(whole.out, group_), 0, 0, first, 0);
    leaf.lse = moved(run_.out_of(whole.lse, group_), 0, 0, first, 0);
  }
  session_.host.rects[0] = {first, 0, rows, 0, 0, 0, g_.acc_on_host ? 0 : first};
  leaf.num_rects = 1;
  leaf.flags = CQSA_LEAF_STATE_IN;
  CQSA_TRY(run_.launch(leaf));
  CQSA_TRY(session_.record(session_.window_free[slot], stream_compute));
  if (!g_.out_back) return CQSA_OK;
  return store_rows(first, rows, slot);
}

// They leave while the next rows are finished.
cqsa_status cqs_runner::store_rows(int64_t first, int64_t rows, int64_t slot) {
  CQSA_TRY(session_.record(session_.out_ready[slot], stream_compute));
  CQSA_TRY(session_.wait(stream_back, session_.out_ready[slot]));
  host_tile out = tile_of(run_.out_of(run_.whole.out, group_), {group_.items, group_.q_heads, rows, p_.head_dim_v}, p_.memory_out);
  out.rows.first = first;
  CQSA_TRY(session_.store(out, session_.device.out[slot]));
  if (run_.whole.lse.data) {
    host_tile lse = tile_of(run_.out_of(run_.whole.lse, group_), {group_.items, group_.q_heads, rows, 1}, p_.memory_out);
    lse.rows.first = first;
    CQSA_TRY(session_.store(lse, session_.device.lse[slot]));
  }
  CQSA_TRY(session_.record(session_.out_done[slot], stream_back));
  stored_[slot] = session_.stored();
  return CQSA_OK;
}

}  // namespace

cqsa_status run_device_cqs(device_run& run, const device_region& region) { return cqs_runner(run).run(region); }

}  // namespace cqsa
