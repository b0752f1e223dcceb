// SPDX-License-Identifier: Apache-2.0
// The stream schedule on a device: query tiles stay while windows of keys pass by through a ring of buffers. Copies in,
// leaves and copies back are three streams, ordered by events; the host waits for staging slots only.
#include "ops/attention/device_run.h"
#include "tensor.h"

namespace cqsa {
namespace {

class stream_runner {
 public:
  explicit stream_runner(device_run& run) : run_(run), g_(run.g), p_(run.problem.p), session_(run.session) {}
  cqsa_status run(const device_region& region);

 private:
  struct pending_tile {
    query_tile tile;
    int64_t slot;
  };

  cqsa_status run_groups(const device_region& region);
  void begin_group(const device_group& group);
  cqsa_status run_tile();
  cqsa_status bring_queries(cqsa_attention_leaf& leaf);
  void place_outputs(cqsa_attention_leaf& leaf);
  cqsa_status bring_window(int64_t window, cqsa_attention_leaf& leaf);
  cqsa_status bring_keys(int64_t buffer, bool held, cqsa_attention_leaf& leaf);
  cqsa_status bring_plane(const cqsa_view& plane, uint32_t bits, void* to, bool held, cqsa_view& out);
  cqsa_status bring_operand(const cqsa_view& operand, int64_t channels, void* to, bool held, cqsa_view& out);
  bool fetches(bool held) const;
  cqsa_status call_window(const key_range& seen, bool last, cqsa_attention_leaf& leaf);
  cqsa_status call_pages(int64_t count, bool last, const cqsa_attention_leaf& leaf);
  int64_t list_pages(const key_range& keys, int64_t rows_per_page, bool join);
  int64_t rows_per_page(const cqsa_attention_leaf& leaf) const;
  cqsa_status call(cqsa_attention_leaf& leaf, int64_t rects, bool last);
  cqsa_status finish_without_keys(cqsa_attention_leaf& leaf);
  cqsa_status leave();
  cqsa_status store_oldest();
  cqsa_status store_all();
  void settle(cqsa_status failure, const device_region& region);

  device_run& run_;
  const device_geometry& g_;
  const cqsa_attention_params& p_;
  device_session& session_;

  query_tile tile_{};
  key_band band_{};
  key_range group_keys_{};  // keys that any query of the group sees
  cqsa_view q_{}, k_{}, v_{}, k_scale_{}, v_scale_{}, mask_{}, bias_{}, out_{}, lse_{};  // of the group
  int64_t held_[3] = {};    // window in each buffer
  int64_t begin_ = 0, length_ = 0;  // keys of the window at hand
  int64_t tiles_ = 0;       // begun; decides the slots
  bool started_ = false;    // the tile's state has been written
  pending_tile pending_[2];
  int pending_count_ = 0;
};

cqsa_status stream_runner::run(const device_region& region) {
  cqsa_status status = run_groups(region);
  if (status == CQSA_OK) status = store_all();
  if (status == CQSA_OK) status = session_.drain();
  if (status != CQSA_OK) settle(status, region);
  return status;
}

// Where a later attempt has to go on. What was launched before the failure still counts if the device lets us fetch it.
void stream_runner::settle(cqsa_status failure, const device_region& region) {
  run_.unfinished = tile_;
  if (failure != CQSA_ERROR_OUT_OF_DEVICE_MEMORY) return;
  const bool drained = session_.drain() == CQSA_OK;
  if (drained) store_all();
  if (pending_count_ > 0) run_.unfinished = pending_[0].tile;
  if (drained) return;
  device_group first{};
  first.item = region.item_begin;
  first.head = region.head_begin;
  first.items = std::min(g_.items, region.item_end - region.item_begin);
  first.heads = std::min(g_.heads, region.head_end - region.head_begin);
  run_.unfinished = {first, region.row_begin, 0};
}

cqsa_status stream_runner::run_groups(const device_region& region) {
  for (int64_t item = region.item_begin; item < region.item_end; item += g_.items)
    for (int64_t head = region.head_begin; head < region.head_end; head += g_.heads) {
      device_group group;
      const int64_t items = std::min(g_.items, region.item_end - item), heads = std::min(g_.heads, region.head_end - head);
      tile_ = {{}, region.row_begin, 0};
      tile_.group.item = item, tile_.group.items = items, tile_.group.head = head, tile_.group.heads = heads;
      CQSA_TRY(run_.make_group(item, items, head, heads, group));
      begin_group(group);
      const int64_t end = std::min(region.row_end, group.seqlen_q);
      for (int64_t q = region.row_begin; q < end; q += g_.rows) {
        tile_ = {group, q, std::min(g_.rows, end - q)};
        CQSA_TRY(run_tile());
      }
    }
  return CQSA_OK;
}

void stream_runner::begin_group(const device_group& group) {
  const cqsa_attention_leaf& whole = run_.whole;
  band_ = key_band::of(p_, group.seqlen_q, group.seqlen_k);
  group_keys_ = band_.of_rows(0, group.seqlen_q, group.seqlen_k);
  q_ = run_.q_of(group);
  k_ = run_.keys_of(whole.k, group);
  v_ = run_.keys_of(whole.v, group);
  k_scale_ = run_.keys_of(whole.k_scale, group);
  v_scale_ = run_.keys_of(whole.v_scale, group);
  mask_ = run_.plane_of(whole.mask, group);
  bias_ = run_.plane_of(whole.bias, group);
  out_ = run_.out_of(whole.out, group);
  lse_ = run_.out_of(whole.lse, group);
  std::fill_n(held_, 3, -1);
}

cqsa_status stream_runner::run_tile() {
  CQSA_TRY(poll_run(run_.run, 0));
  cqsa_attention_leaf leaf = run_.leaf_of(tile_.group);
  CQSA_TRY(bring_queries(leaf));
  place_outputs(leaf);
  leaf.state_acc = session_.device.acc;
  leaf.state_m = session_.device.m;
  leaf.state_l = session_.device.l;
  leaf.state_rows = g_.rows;
  started_ = false;
  const key_range seen = band_.of_rows(tile_.q, tile_.rows, tile_.group.seqlen_k);
  const int64_t first = seen.begin / g_.keys, last = seen.length() ? (seen.end + g_.keys - 1) / g_.keys : first;
  bool finished = false;
  for (int64_t window = first; window < last; ++window) {
    const int64_t calls = session_.leaf_calls();
    CQSA_TRY(bring_window(window, leaf));
    CQSA_TRY(call_window(seen, window + 1 == last, leaf));
    finished = window + 1 == last && session_.leaf_calls() > calls;
    CQSA_TRY(session_.record(session_.window_free[window % g_.buffers], stream_compute));
  }
  if (!finished) CQSA_TRY(finish_without_keys(leaf));
  return leave();
}

// ---- operands of a tile ------------------------------------------------------------------------------------------------------------

cqsa_status stream_runner::bring_queries(cqsa_attention_leaf& leaf) {
  if (!g_.q_in) {
    leaf.q = moved(q_, 0, 0, tile_.q, 0);
    return CQSA_OK;
  }
  const int64_t slot = tiles_ % g_.q_slots;
  const int64_t extent[4] = {tile_.group.items, tile_.group.q_heads, tile_.rows, p_.head_dim};
  host_tile tile = tile_of(q_, extent, p_.memory_q);
  tile.rows.first = tile_.q;
  leaf.q = compact_view(session_.device.q[slot], q_.dtype, extent);
  CQSA_TRY(session_.wait(stream_in, session_.q_free[slot]));
  CQSA_TRY(session_.fetch(tile, session_.device.q[slot]));
  CQSA_TRY(session_.record(session_.q_ready[slot], stream_in));
  return session_.wait(stream_compute, session_.q_ready[slot]);
}

void stream_runner::place_outputs(cqsa_attention_leaf& leaf) {
  if (!g_.out_back) {
    leaf.out = moved(out_, 0, 0, tile_.q, 0);
    leaf.lse = moved(lse_, 0, 0, tile_.q, 0);
    return;
  }
  const int64_t slot = tiles_ % g_.out_slots;
  leaf.out = compact_view(session_.device.out[slot], out_.dtype, {tile_.group.items, tile_.group.q_heads, tile_.rows, p_.head_dim_v});
  if (lse_.data) leaf.lse = compact_view(session_.device.lse[slot], lse_.dtype, {tile_.group.items, tile_.group.q_heads, tile_.rows, 1});
}

// A mask or a bias that differs from query to query comes anew for every tile, even where the window is still there.
bool stream_runner::fetches(bool held) const {
  const bool planes = g_.q_in && ((mask_.data && !(p_.mask_broadcast & CQSA_BROADCAST_QUERY)) ||
                                  (bias_.data && !(p_.bias_broadcast & CQSA_BROADCAST_QUERY)));
  return planes || (!held && (g_.kv_in || (g_.q_in && (mask_.data || bias_.data))));
}

cqsa_status stream_runner::bring_window(int64_t window, cqsa_attention_leaf& leaf) {
  const int64_t buffer = window % g_.buffers;
  const bool held = held_[buffer] == window;
  begin_ = std::max(window * g_.keys, group_keys_.begin);
  length_ = std::min((window + 1) * g_.keys, group_keys_.end) - begin_;
  const bool fetching = fetches(held);
  // Until the copies are complete the buffer holds nothing.
  if (fetching) held_[buffer] = -1;
  if (fetching) CQSA_TRY(session_.wait(stream_in, session_.window_free[buffer]));
  CQSA_TRY(bring_keys(buffer, held, leaf));
  const device_window& to = session_.device.windows[buffer];
  CQSA_TRY(bring_plane(mask_, p_.mask_broadcast, to.mask, held, leaf.mask));
  CQSA_TRY(bring_plane(bias_, p_.bias_broadcast, to.bias, held, leaf.bias));
  if (fetching) CQSA_TRY(session_.record(session_.window_ready[buffer], stream_in));
  held_[buffer] = window;
  return session_.wait(stream_compute, session_.window_ready[buffer]);
}

cqsa_status stream_runner::bring_keys(int64_t buffer, bool held, cqsa_attention_leaf& leaf) {
  const device_window& to = session_.device.windows[buffer];
  CQSA_TRY(bring_operand(k_, p_.head_dim, to.k, held, leaf.k));
  CQSA_TRY(bring_operand(v_, p_.head_dim_v, to.v, held, leaf.v));
  const int64_t k_groups = run_.problem.k_scale_row_bytes() / std::max<int64_t>(1, dtype_bytes(k_scale_.dtype));
  const int64_t v_groups = run_.problem.v_scale_row_bytes() / std::max<int64_t>(1, dtype_bytes(v_scale_.dtype));
  if (k_groups) CQSA_TRY(bring_operand(k_scale_, k_groups, to.k_scale, held, leaf.k_scale));
  if (v_groups) CQSA_TRY(bring_operand(v_scale_, v_groups, to.v_scale, held, leaf.v_scale));
  return CQSA_OK;
}

cqsa_status stream_runner::bring_operand(const cqsa_view& operand, int64_t channels, void* to, bool held, cqsa_view& out) {
  const device_group& group = tile_.group;
  if (!g_.kv_in) {
    out = moved(operand, 0, 0, group.pages ? 0 : begin_, 0);
    return CQSA_OK;
  }
  const int64_t extent[4] = {group.items, group.heads, length_, channels};
  out = compact_view(to, operand.dtype, extent);
  if (held) return CQSA_OK;
  host_tile tile = tile_of(operand, extent, p_.memory_kv);
  tile.rows.first = begin_;
  tile.rows.pages = group.pages;
  tile.rows.page_stride = group.page_stride;
  tile.rows.page_size = p_.page_size;
  return session_.fetch(tile, to);
}

cqsa_status stream_runner::bring_plane(const cqsa_view& plane, uint32_t bits, void* to, bool held, cqsa_view& out) {
  if (!plane.data || !g_.q_in) {
    out = moved(plane, 0, 0, tile_.q, begin_);
    return CQSA_OK;
  }
  const int64_t extent[4] = {broadcast_extent(bits, CQSA_BROADCAST_BATCH, tile_.group.items),
                             broadcast_extent(bits, CQSA_BROADCAST_HEAD, tile_.group.q_heads),
                             broadcast_extent(bits, CQSA_BROADCAST_QUERY, tile_.rows),
                             broadcast_extent(bits, CQSA_BROADCAST_KEY, length_)};
  out = compact_view(to, plane.dtype, extent);
  if (held && (bits & CQSA_BROADCAST_QUERY)) return CQSA_OK;
  host_tile tile = tile_of(plane, extent, p_.memory_q);
  tile.rows.first = bits & CQSA_BROADCAST_QUERY ? 0 : tile_.q;
  tile.columns.first = bits & CQSA_BROADCAST_KEY ? 0 : begin_;
  return session_.fetch(tile, to);
}

// ---- leaf calls ----------------------------------------------------------------------------------------------------------------------

cqsa_status stream_runner::call(cqsa_attention_leaf& leaf, int64_t rects, bool last) {
  leaf.num_rects = rects;
  leaf.flags = (started_ ? CQSA_LEAF_STATE_IN : 0) | (last ? 0 : CQSA_LEAF_STATE_OUT);
  started_ = true;
  return run_.launch(leaf);
}

cqsa_status stream_runner::call_window(const key_range& seen, bool last, cqsa_attention_leaf& leaf) {
  const key_range keys{std::max(seen.begin, begin_), std::min(seen.end, begin_ + length_)};
  if (!tile_.group.pages) {
    session_.host.rects[0] = {tile_.q, keys.begin, tile_.rows, keys.length(), 0, keys.begin - begin_, 0};
    return call(leaf, 1, last);
  }
  const int64_t per_page = g_.kv_in ? 0 : rows_per_page(leaf);
  if (g_.kv_in || per_page > 0) {
    const int64_t count = list_pages(keys, per_page, true);
    return count ? call(leaf, count, last) : CQSA_OK;
  }
  return call_pages(list_pages(keys, p_.page_size, false), last, leaf);
}

// Rectangles for the keys that are on a page: of the compact window, or (rows_per_page > 0) of the pool on the device.
int64_t stream_runner::list_pages(const key_range& keys, int64_t rows_per_page, bool join) {
  cqsa_rect* rects = session_.host.rects;
  int64_t count = 0;
  for (int64_t key = keys.begin, end; key < keys.end; key = end) {
    const int64_t page = key / p_.page_size;
    end = std::min(keys.end, (page + 1) * p_.page_size);
    const int64_t id = tile_.group.pages[page * tile_.group.page_stride];
    if (id < 0) continue;
    const int64_t row = rows_per_page ? id * rows_per_page + key % p_.page_size : key - begin_;
    cqsa_rect* before = count && join ? &rects[count - 1] : nullptr;
    if (before && before->k_pos + before->k_len == key && before->k_row + before->k_len == row)
      before->k_len += end - key;
    else
      rects[count++] = {tile_.q, key, tile_.rows, end - key, 0, row, 0};
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
cqsa_status stream_runner::call_pages(int64_t count, bool last, const cqsa_attention_leaf& leaf) {
  cqsa_rect* rects = session_.host.rects;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t page = rects[i].k_row / p_.page_size, inside = rects[i].k_row % p_.page_size;
    cqsa_attention_leaf one = leaf;
    one.k = moved(leaf.k, page, 0, inside, 0);
    one.v = moved(leaf.v, page, 0, inside, 0);
    if (run_.problem.k_scale_row_bytes()) one.k_scale = moved(leaf.k_scale, page, 0, inside, 0);
    if (run_.problem.v_scale_row_bytes()) one.v_scale = moved(leaf.v_scale, page, 0, inside, 0);
    one.mask = moved(leaf.mask, 0, 0, 0, rects[i].k_pos - begin_);
    one.bias = moved(leaf.bias, 0, 0, 0, rects[i].k_pos - begin_);
    rects[i].k_row = 0;
    one.rects = rects + i;
    CQSA_TRY(call(one, 1, last && i + 1 == count));
  }
  return CQSA_OK;
}

// No key is left for the last call (none is visible, or the last pages are hidden): a rectangle without keys writes the rows.
cqsa_status stream_runner::finish_without_keys(cqsa_attention_leaf& leaf) {
  for (cqsa_view* view : {&leaf.k, &leaf.v, &leaf.mask, &leaf.bias}) *view = unread_view(*view, session_.device.header);
  if (run_.problem.k_scale_row_bytes()) leaf.k_scale = unread_view(leaf.k_scale, session_.device.header);
  if (run_.problem.v_scale_row_bytes()) leaf.v_scale = unread_view(leaf.v_scale, session_.device.header);
  session_.host.rects[0] = {tile_.q, 0, tile_.rows, 0, 0, 0, 0};
  return call(leaf, 1, true);
}

// ---- the way out -----------------------------------------------------------------------------------------------------------------------

cqsa_status stream_runner::leave() {
  if (g_.q_in) CQSA_TRY(session_.record(session_.q_free[tiles_ % g_.q_slots], stream_compute));
  const int64_t slot = tiles_++ % g_.out_slots;
  if (!g_.out_back) return run_.done(tile_.group, tile_.rows);
  CQSA_TRY(session_.record(session_.out_ready[slot], stream_compute));
  pending_[pending_count_++] = {tile_, slot};
  // With two slots the tile before comes back while this one is computed.
  return pending_count_ < g_.out_slots ? CQSA_OK : store_oldest();
}

cqsa_status stream_runner::store_oldest() {
  const query_tile tile = pending_[0].tile;
  const int64_t slot = pending_[0].slot;
  CQSA_TRY(session_.wait(stream_back, session_.out_ready[slot]));
  host_tile out = tile_of(run_.out_of(run_.whole.out, tile.group), {tile.group.items, tile.group.q_heads, tile.rows, p_.head_dim_v},
                          p_.memory_out);
  out.rows.first = tile.q;
  CQSA_TRY(session_.store(out, session_.device.out[slot]));
  if (run_.whole.lse.data) {
    host_tile lse = tile_of(run_.out_of(run_.whole.lse, tile.group), {tile.group.items, tile.group.q_heads, tile.rows, 1}, p_.memory_out);
    lse.rows.first = tile.q;
    CQSA_TRY(session_.store(lse, session_.device.lse[slot]));
  }
  pending_[0] = pending_[1];
  --pending_count_;
  return run_.done(tile.group, tile.rows);
}

cqsa_status stream_runner::store_all() {
  while (pending_count_ > 0) CQSA_TRY(store_oldest());
  return CQSA_OK;
}

}  // namespace

cqsa_status run_device_stream(device_run& run, const device_region& region) { return stream_runner(run).run(region); }

}  // namespace cqsa
