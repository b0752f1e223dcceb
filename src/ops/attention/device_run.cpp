// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/device_run.h"

#include <cinttypes>

#include "tensor.h"

namespace cqsa {

cqsa_view moved(cqsa_view view, int64_t axis0, int64_t axis1, int64_t axis2, int64_t axis3) {
  if (!view.data) return view;
  const int64_t elements = axis0 * view.stride[0] + axis1 * view.stride[1] + axis2 * view.stride[2] + axis3 * view.stride[3];
  view.data = static_cast<char*>(view.data) + elements * dtype_bytes(view.dtype);
  return view;
}

cqsa_view compact_view(void* data, cqsa_dtype dtype, const int64_t (&extent)[4]) {
  cqsa_view view{data, dtype, 0, {}};
  int64_t stride = 1;
  for (int axis = 3; axis >= 0; --axis) {
    view.stride[axis] = extent[axis] == 1 ? 0 : stride;
    stride *= extent[axis];
  }
  return view;
}

host_tile tile_of(const cqsa_view& operand, const int64_t (&extent)[4], int32_t place) {
  host_tile tile;
  tile.pinned = place == CQSA_MEMORY_PINNED;
  tile.data = static_cast<char*>(operand.data);
  tile.element = dtype_bytes(operand.dtype);
  std::copy_n(operand.stride, 4, tile.stride);
  std::copy_n(extent, 4, tile.extent);
  return tile;
}

namespace {

struct plane_size {
  int64_t extent[4];
};
plane_size size_of_plane(uint32_t broadcast, const device_group& group, int64_t rows, int64_t keys) {
  return {{broadcast_extent(broadcast, CQSA_BROADCAST_BATCH, group.items), broadcast_extent(broadcast, CQSA_BROADCAST_HEAD, group.q_heads),
           broadcast_extent(broadcast, CQSA_BROADCAST_QUERY, rows), broadcast_extent(broadcast, CQSA_BROADCAST_KEY, keys)}};
}

}  // namespace

host_tile plane_tile(const cqsa_view& plane, uint32_t broadcast, const device_group& group, int64_t rows, int64_t keys, int32_t place) {
  return tile_of(plane, size_of_plane(broadcast, group, rows, keys).extent, place);
}

cqsa_view plane_view(const cqsa_view& plane, uint32_t broadcast, const device_group& group, int64_t rows, int64_t keys, void* data) {
  return compact_view(data, plane.dtype, size_of_plane(broadcast, group, rows, keys).extent);
}

int64_t scale_groups(const cqsa_view& scale, int64_t bytes) { return scale.data ? bytes / dtype_bytes(scale.dtype) : 0; }

cqsa_view unread_view(const cqsa_view& like, void* somewhere) {
  cqsa_view view = like;
  if (view.data) view.data = somewhere;
  std::fill_n(view.stride, 4, 0);
  return view;
}

// ---- the start of an attempt -------------------------------------------------------------------------------------------------------

cqsa_status device_run::open(const budget& limit) {
  CQSA_TRY(session.open());
  if (problem.mapped()) {
    CQSA_TRY(pages.find(whole));
    pages.open_files();
  }
  session.mapped = problem.mapped() ? &pages : nullptr;
  CQSA_TRY(session.allocate(problem, impl, choice, g, run.args->workspace, limit));
  CQSA_TRY(copy_indices());
  return upload_small();
}

cqsa_status device_run::copy_indices() {
  const struct { const void* from; void* to; const void** result; int64_t count; cqsa_dtype dtype; } arrays[] = {
      {whole.cu_seqlens_q, session.host.cu_seqlens_q, &cu_seqlens_q_, whole.batch + 1, whole.index_dtype},
      {whole.cu_seqlens_k, session.host.cu_seqlens_k, &cu_seqlens_k_, whole.batch + 1, whole.index_dtype},
      {whole.seqused_k, session.host.seqused_k, &seqused_k_, whole.batch, whole.seqused_dtype}};
  for (const auto& a : arrays) {
    *a.result = a.to ? a.to : a.from;
    if (a.from && a.to) CQSA_TRY(session.read(a.to, a.from, static_cast<uint64_t>(a.count * dtype_bytes(a.dtype))));
  }
  return g.q_in ? CQSA_OK : check_indices();
}

// Values on the device could not be looked at before; the host walks by them now.
cqsa_status device_run::check_indices() const {
  const auto& p = problem.p;
  const auto check = [&](const char* name, const void* array, int64_t total, int64_t longest) -> cqsa_status {
    int64_t before = array ? index_at(array, whole.index_dtype, 0) : 0;
    if (before != 0) return fail(CQSA_ERROR_INDEX, "args->%s[0] is %" PRId64 ", wanted 0", name, before);
    for (int64_t i = 1; array && i <= p.batch; ++i) {
      const int64_t value = index_at(array, whole.index_dtype, i);
      if (value < before || value > total || value - before > longest)
        return fail(CQSA_ERROR_INDEX, "args->%s[%" PRId64 "] is %" PRId64 " after %" PRId64 ", wanted no less, at most %" PRId64
                    " more, and at most %" PRId64, name, i, value, before, longest, total);
      before = value;
    }
    return CQSA_OK;
  };
  CQSA_TRY(check("cu_seqlens_q", cu_seqlens_q_, p.total_q, p.seqlen_q));
  CQSA_TRY(check("cu_seqlens_k", cu_seqlens_k_, p.total_k, p.seqlen_k));
  for (int64_t i = 0; seqused_k_ && i < p.batch; ++i) {
    const int64_t used = index_at(seqused_k_, whole.seqused_dtype, i);
    const int64_t most = cu_seqlens_k_ ? first_row(cu_seqlens_k_, i + 1) - first_row(cu_seqlens_k_, i) : p.seqlen_k;
    if (used < 0 || used > most)
      return fail(CQSA_ERROR_INDEX, "args->seqused_k[%" PRId64 "] is %" PRId64 ", wanted 0 to %" PRId64, i, used, most);
  }
  return CQSA_OK;
}

int64_t device_run::first_row(const void* cu_seqlens, int64_t item) const { return index_at(cu_seqlens, whole.index_dtype, item); }

// Small operands go up once, whole and compact.
cqsa_status device_run::upload_small() {
  const auto& p = problem.p;
  const auto upload = [&](const cqsa_view& from, void* to, const int64_t (&extent)[4], cqsa_view& out) -> cqsa_status {
    out = from;
    if (!from.data || !to) return CQSA_OK;
    host_tile tile = tile_of(from, extent, CQSA_MEMORY_HOST);
    // The line that the layout counted runs over the heads.
    std::swap(tile.extent[1], tile.extent[3]);
    std::swap(tile.stride[1], tile.stride[3]);
    out = compact_view(to, from.dtype, extent);
    return session.fetch(tile, to);
  };
  CQSA_TRY(upload(whole.slopes, session.device.slopes, {p.batch, p.num_heads, 1, 1}, slopes_));
  CQSA_TRY(upload(whole.sinks, session.device.sinks, {1, p.num_heads, 1, 1}, sinks_));
  const auto heads = [&](int32_t kind) { return kind == CQSA_SCALE_HEAD ? p.num_kv_heads : 1; };
  CQSA_TRY(upload(whole.k_scale, session.device.k_scale, {1, heads(p.scale_k), 1, 1}, k_scale_));
  CQSA_TRY(upload(whole.v_scale, session.device.v_scale, {1, heads(p.scale_v), 1, 1}, v_scale_));
  // Whatever uses them waits for the copies that follow on the same stream, unless there are none.
  CQSA_TRY(session.record(session.q_ready[0], stream_in));
  return session.wait(stream_compute, session.q_ready[0]);
}

// ---- groups --------------------------------------------------------------------------------------------------------------------------

cqsa_status device_run::make_group(int64_t item, int64_t items, int64_t head, int64_t heads, device_group& out) {
  const auto& p = problem.p;
  const int64_t ratio = problem.ratio();
  out = {item, items, head, heads, head * ratio, heads * ratio, 0, 0, p.seqlen_q, p.seqlen_k, nullptr, 0};
  if (cu_seqlens_q_) {
    out.q_first = first_row(cu_seqlens_q_, item);
    out.seqlen_q = first_row(cu_seqlens_q_, item + 1) - out.q_first;
  }
  if (cu_seqlens_k_) {
    out.k_first = first_row(cu_seqlens_k_, item);
    out.seqlen_k = first_row(cu_seqlens_k_, item + 1) - out.k_first;
  }
  if (seqused_k_) out.seqlen_k = index_at(seqused_k_, whole.seqused_dtype, item);
  if (!whole.page_table) return CQSA_OK;
  out.pages = whole.page_table + item * whole.page_table_stride[0];
  out.page_stride = whole.page_table_stride[1];
  if (g.q_in) return CQSA_OK;
  const int64_t count = (out.seqlen_k + p.page_size - 1) / p.page_size;
  const int64_t run_length = out.page_stride == 1 ? count : 1;
  for (int64_t i = 0; i < count; i += run_length)
    CQSA_TRY(session.read(session.host.pages + i, out.pages + i * out.page_stride, static_cast<uint64_t>(run_length) * 4));
  out.pages = session.host.pages;
  out.page_stride = 1;
  for (int64_t i = 0; i < count; ++i)
    if (out.pages[i] < -1 || out.pages[i] >= p.num_pages)
      return fail(CQSA_ERROR_INDEX, "args->page_table[%" PRId64 "][%" PRId64 "] is %d, wanted -1 to %" PRId64, item, i, out.pages[i], p.num_pages - 1);
  return CQSA_OK;
}

cqsa_attention_leaf device_run::leaf_of(const device_group& group) const {
  cqsa_attention_leaf leaf = whole;
  leaf.flags = 0;
  leaf.batch = group.items;
  leaf.num_heads = group.q_heads;
  leaf.num_kv_heads = group.heads;
  leaf.seqlen_q = group.seqlen_q;
  leaf.seqlen_k = group.seqlen_k;
  leaf.cu_seqlens_q = leaf.cu_seqlens_k = leaf.seqused_k = nullptr;
  leaf.page_table = nullptr;
  leaf.page_size = leaf.num_pages = 0;
  leaf.total_q = leaf.total_k = 0;
  leaf.slopes = moved(slopes_, group.item, group.q_head, 0, 0);
  leaf.sinks = moved(sinks_, 0, group.q_head, 0, 0);
  leaf.k_scale = moved(k_scale_, 0, problem.p.scale_k == CQSA_SCALE_HEAD ? group.head : 0, 0, 0);
  leaf.v_scale = moved(v_scale_, 0, problem.p.scale_v == CQSA_SCALE_HEAD ? group.head : 0, 0, 0);
  leaf.tile_q = choice.leaf_tile_q;
  leaf.tile_k = choice.leaf_tile_k;
  leaf.rects = session.host.rects;
  leaf.num_rects = 0;
  return leaf;
}

cqsa_view device_run::q_of(const device_group& group) const {
  return moved(whole.q, problem.varlen() ? 0 : group.item, group.q_head, group.q_first, 0);
}

cqsa_view device_run::keys_of(const cqsa_view& operand, const device_group& group) const {
  const bool one_array = whole.page_table || whole.cu_seqlens_k;
  return moved(operand, one_array ? 0 : group.item, group.head, group.k_first, 0);
}

// Axes along which the operand is the same have stride 0, so that moving along them does nothing.
cqsa_view device_run::plane_of(const cqsa_view& operand, const device_group& group) const {
  return moved(operand, group.item, group.q_head, 0, 0);
}

cqsa_view device_run::out_of(const cqsa_view& operand, const device_group& group) const {
  return moved(operand, problem.varlen() ? 0 : group.item, group.q_head, group.q_first, 0);
}

void device_run::clear_host_rows() const {
  cqsa_attention_leaf leaf = whole;
  leaf.cu_seqlens_q = cu_seqlens_q_;
  clear_rows_past_segments(problem, leaf);
}

int64_t device_run::progress_total() const {
  const auto& p = problem.p;
  return std::max<int64_t>(1, p.num_kv_heads * (cu_seqlens_q_ ? first_row(cu_seqlens_q_, p.batch) : p.batch * p.seqlen_q));
}

}  // namespace cqsa
