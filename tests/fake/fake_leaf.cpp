// SPDX-License-Identifier: Apache-2.0
#include "fake_leaf.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "fake_memory.h"

namespace fake {
namespace {

int64_t element_bytes(cqsa_dtype dtype) { return (dtype >> 8 & 0xFF) / 8; }

int64_t index_at(const void* array, cqsa_dtype dtype, int64_t i) {
  const void* real = to_real(array);
  return dtype == CQSA_DTYPE_I64 ? static_cast<const int64_t*>(real)[i] : static_cast<const int32_t*>(real)[i];
}

template <class T>
void translate(T*& p) {
  if (p) p = static_cast<T*>(to_real(p));
}

}  // namespace

std::string leaf_call::bytes(const char* name, const void* begin, uint64_t count) {
  if (!the_memory().holds(begin, count, false)) return std::string("a leaf reaches outside what is allocated: ") + name;
  ranges_.push_back({begin, count});
  return "";
}

// Everything from the first to the last element that the call may touch. Sizes of 0 are never touched.
std::string leaf_call::operand(const char* name, cqsa_view& view, const int64_t (&first)[4], const int64_t (&count)[4]) {
  if (!view.data) return "";
  if (!is_device(view.data)) return std::string("a leaf is given a host address: ") + name;
  int64_t low = 0, high = 0;
  for (int axis = 0; axis < 4; ++axis) {
    if (count[axis] <= 0) return "";
    const int64_t a = first[axis] * view.stride[axis], b = (first[axis] + count[axis] - 1) * view.stride[axis];
    low += std::min(a, b);
    high += std::max(a, b);
  }
  const int64_t element = element_bytes(view.dtype);
  return bytes(name, static_cast<char*>(view.data) + low * element, static_cast<uint64_t>((high - low + 1) * element));
}

// First row and count of rows of the queries and of the keys: {first, count} each.
std::string leaf_call::rows_and_keys(int64_t* rows, int64_t* keys) {
  rows[0] = keys[0] = 0;
  rows[1] = leaf.seqlen_q;
  keys[1] = leaf.seqlen_k;
  // Values on the device may not be there yet.
  if (leaf.cu_seqlens_q) rows[1] = leaf.total_q;
  if (leaf.cu_seqlens_k) keys[1] = leaf.total_k;
  if (!leaf.rects) return "";
  int64_t q_end = 0, k_end = 0, state_end = 0;
  rows[0] = keys[0] = INT64_MAX;
  for (const cqsa_rect& r : rects) {
    if (r.q_len < 0 || r.k_len < 0 || r.state_row < 0) return "a rectangle has a negative size";
    state_end = std::max(state_end, r.state_row + r.q_len);
    rows[0] = std::min(rows[0], r.q_row);
    q_end = std::max(q_end, r.q_row + r.q_len);
    if (r.k_len == 0) continue;
    keys[0] = std::min(keys[0], r.k_row);
    k_end = std::max(k_end, r.k_row + r.k_len);
  }
  rows[1] = q_end - rows[0];
  keys[1] = keys[0] == INT64_MAX ? 0 : k_end - keys[0];
  if (keys[1] == 0) keys[0] = 0;
  if ((leaf.flags & (CQSA_LEAF_STATE_IN | CQSA_LEAF_STATE_OUT)) && state_end > leaf.state_rows) return "a rectangle's state rows reach past state_rows";
  return "";
}

std::string leaf_call::operands() {
  int64_t rows[2], keys[2];
  if (std::string wrong = rows_and_keys(rows, keys); !wrong.empty()) return wrong;
  cqsa_attention_leaf& l = leaf;
  const int64_t q_batch = l.cu_seqlens_q ? 1 : l.batch, k_batch = l.cu_seqlens_k ? 1 : l.batch;
  const bool no_keys = l.rects && keys[1] == 0;
  // Keys in pages: which of them are read only the table says; the first element has to do.
  const int64_t key_rows = l.page_table ? 1 : keys[1], key_batch = l.page_table ? 1 : k_batch;
  const auto scale = [&](const char* name, cqsa_view& v, int32_t kind, int64_t dim) {
    const int64_t groups = kind == CQSA_SCALE_GROUP ? (dim + l.kv_group - 1) / l.kv_group : 1;
    const bool per_row = kind == CQSA_SCALE_TOKEN || kind == CQSA_SCALE_GROUP;
    const int64_t heads = kind == CQSA_SCALE_TENSOR ? 1 : l.num_kv_heads;
    return operand(name, v, {0, 0, per_row ? keys[0] : 0, 0}, {per_row ? key_batch : 1, heads, per_row ? key_rows : 1, groups});
  };
  const bool ragged = l.cu_seqlens_q || l.cu_seqlens_k || l.seqused_k;
  const int64_t plane_rows = l.rects ? rows[1] : ragged ? 1 : l.seqlen_q, plane_keys = l.rects ? keys[1] : ragged ? 1 : l.seqlen_k;
  const bool writes = !(l.flags & CQSA_LEAF_STATE_OUT);
  for (const std::string& wrong :
       {no_keys ? "" : operand("q", l.q, {0, 0, rows[0], 0}, {q_batch, l.num_heads, rows[1], l.head_dim}),
        operand("k", l.k, {0, 0, keys[0], 0}, {key_batch, l.num_kv_heads, key_rows, l.head_dim}),
        operand("v", l.v, {0, 0, keys[0], 0}, {key_batch, l.num_kv_heads, key_rows, l.head_dim_v}),
        no_keys ? "" : scale("k_scale", l.k_scale, l.scale_k, l.head_dim), no_keys ? "" : scale("v_scale", l.v_scale, l.scale_v, l.head_dim_v),
        operand("mask", l.mask, {0, 0, rows[0], keys[0]}, {l.batch, l.num_heads, plane_rows, plane_keys}),
        operand("bias", l.bias, {0, 0, rows[0], keys[0]}, {l.batch, l.num_heads, plane_rows, plane_keys}),
        operand("slopes", l.slopes, {0, 0, 0, 0}, {l.batch, l.num_heads, 1, 1}),
        operand("sinks", l.sinks, {0, 0, 0, 0}, {1, l.num_heads, 1, 1}),
        writes ? operand("out", l.out, {0, 0, rows[0], 0}, {q_batch, l.num_heads, rows[1], l.head_dim_v}) : "",
        writes ? operand("lse", l.lse, {0, 0, rows[0], 0}, {q_batch, l.num_heads, rows[1], 1}) : ""})
    if (!wrong.empty()) return wrong;
  return "";
}

std::string leaf_call::indices() {
  const uint64_t count = static_cast<uint64_t>(leaf.batch), size = static_cast<uint64_t>(element_bytes(leaf.index_dtype));
  if (leaf.rects && (leaf.cu_seqlens_q || leaf.cu_seqlens_k || leaf.seqused_k || leaf.page_table))
    return "rectangles and index arrays in one call";
  std::string wrong;
  if (leaf.cu_seqlens_q) wrong = bytes("cu_seqlens_q", leaf.cu_seqlens_q, (count + 1) * size);
  if (wrong.empty() && leaf.cu_seqlens_k) wrong = bytes("cu_seqlens_k", leaf.cu_seqlens_k, (count + 1) * size);
  if (wrong.empty() && leaf.seqused_k)
    wrong = bytes("seqused_k", leaf.seqused_k, count * static_cast<uint64_t>(element_bytes(leaf.seqused_dtype)));
  // Which pages are used only the lengths say; the first has to do. With no keys there is none.
  if (wrong.empty() && leaf.page_table && leaf.seqlen_k > 0) wrong = bytes("page_table", leaf.page_table, 4);
  return wrong;
}

std::string leaf_call::state() {
  if (!(leaf.flags & (CQSA_LEAF_STATE_IN | CQSA_LEAF_STATE_OUT))) return "";
  const uint64_t rows = static_cast<uint64_t>(leaf.batch * leaf.num_heads * leaf.state_rows) * 4;
  for (const std::string& wrong : {bytes("state acc", leaf.state_acc, rows * static_cast<uint64_t>(leaf.head_dim_v)),
                                   bytes("state m", leaf.state_m, rows), bytes("state l", leaf.state_l, rows)})
    if (!wrong.empty()) return wrong;
  return "";
}

std::string leaf_call::prepare(const cqsa_attention_leaf& from, void* memory, uint64_t size) {
  leaf = from;
  if (from.num_rects > 0 && (!from.rects || is_device(from.rects))) return "the rectangles are not in host memory";
  if (from.rects && from.num_rects <= 0) return "a leaf has a list of no rectangles";
  if (from.rects) rects.assign(from.rects, from.rects + from.num_rects);
  workspace_bytes = size;
  for (const std::string& wrong : {size ? bytes("workspace", memory, size) : "", indices(), operands(), state()})
    if (!wrong.empty()) return wrong;
  if (reinterpret_cast<uintptr_t>(memory) % 64) return "the workspace is not aligned to 64 bytes";
  if (from.rects) leaf.rects = rects.data();
  workspace = to_real(memory);
  for (cqsa_view* view : {&leaf.q, &leaf.k, &leaf.v, &leaf.k_scale, &leaf.v_scale, &leaf.mask, &leaf.bias, &leaf.slopes, &leaf.sinks,
                          &leaf.out, &leaf.lse})
    translate(view->data);
  translate(leaf.cu_seqlens_q);
  translate(leaf.cu_seqlens_k);
  translate(leaf.seqused_k);
  translate(leaf.page_table);
  translate(leaf.state_acc);
  translate(leaf.state_m);
  translate(leaf.state_l);
  return "";
}

namespace {

// The index arrays as a kernel of a device uses them: whatever the values are, nothing outside the operands is touched.
struct clamped {
  std::vector<int64_t> cu_q, cu_k, used;
  std::vector<int32_t> pages;

  static std::vector<int64_t> segments(const void* array, cqsa_dtype dtype, int64_t batch, int64_t total, int64_t longest) {
    std::vector<int64_t> out(static_cast<size_t>(batch) + 1, 0);
    for (size_t i = 1; i < out.size(); ++i)
      out[i] = std::clamp(index_at(array, dtype, static_cast<int64_t>(i)), out[i - 1], std::min(total, out[i - 1] + longest));
    return out;
  }

  explicit clamped(cqsa_attention_leaf& leaf) {
    const int64_t batch = leaf.batch;
    if (leaf.cu_seqlens_q) cu_q = segments(leaf.cu_seqlens_q, leaf.index_dtype, batch, leaf.total_q, leaf.seqlen_q);
    if (leaf.cu_seqlens_k) cu_k = segments(leaf.cu_seqlens_k, leaf.index_dtype, batch, leaf.total_k, leaf.seqlen_k);
    const int64_t columns = leaf.page_table ? (leaf.seqlen_k + leaf.page_size - 1) / leaf.page_size : 0;
    for (int64_t b = 0; b < batch && leaf.seqused_k; ++b) {
      const auto at = static_cast<size_t>(b);
      const int64_t most = leaf.cu_seqlens_k ? cu_k[at + 1] - cu_k[at] : leaf.seqlen_k;
      used.push_back(std::clamp(index_at(leaf.seqused_k, leaf.seqused_dtype, b), int64_t{0}, most));
    }
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t i = 0; i < columns; ++i) {
        const int64_t used_pages = leaf.seqused_k ? (used[static_cast<size_t>(b)] + leaf.page_size - 1) / leaf.page_size : columns;
        const int32_t id = i < used_pages ? leaf.page_table[b * leaf.page_table_stride[0] + i * leaf.page_table_stride[1]] : -1;
        pages.push_back(id >= leaf.num_pages ? -1 : std::max(id, -1));
      }
    if (leaf.cu_seqlens_q) leaf.cu_seqlens_q = cu_q.data();
    if (leaf.cu_seqlens_k) leaf.cu_seqlens_k = cu_k.data();
    if (leaf.seqused_k) leaf.seqused_k = used.data();
    leaf.index_dtype = leaf.seqused_dtype = CQSA_DTYPE_I64;
    if (!leaf.page_table) return;
    leaf.page_table = pages.data();
    leaf.page_table_stride[0] = columns;
    leaf.page_table_stride[1] = 1;
  }
};

// out = 0 and lse = -inf in the rows past the last segment.
void clear_tail(const cqsa_attention_leaf& leaf) {
  const double nothing = -std::numeric_limits<double>::infinity();
  const auto put = [](const cqsa_view& view, int64_t element, double value) {
    char* at = static_cast<char*>(view.data) + element * element_bytes(view.dtype);
    const float narrow = static_cast<float>(value);
    if (value == 0) std::memset(at, 0, static_cast<size_t>(element_bytes(view.dtype)));
    else if (view.dtype == CQSA_DTYPE_F64) std::memcpy(at, &value, sizeof value);
    else std::memcpy(at, &narrow, sizeof narrow);
  };
  for (int64_t row = index_at(leaf.cu_seqlens_q, leaf.index_dtype, leaf.batch); row < leaf.total_q; ++row)
    for (int64_t head = 0; head < leaf.num_heads; ++head) {
      for (int64_t c = 0; c < leaf.head_dim_v; ++c)
        put(leaf.out, head * leaf.out.stride[1] + row * leaf.out.stride[2] + c * leaf.out.stride[3], 0);
      if (leaf.lse.data) put(leaf.lse, head * leaf.lse.stride[1] + row * leaf.lse.stride[2], nothing);
    }
}

}  // namespace

bool leaf_call::run(const cqsa_attention_impl& impl) const {
  cqsa_attention_leaf now = leaf;
  const clamped indices(now);
  const bool tail = now.flags & CQSA_LEAF_CLEAR_TAIL;
  now.flags &= ~static_cast<uint32_t>(CQSA_LEAF_CLEAR_TAIL);
  if (impl.launch(nullptr, &now, workspace, workspace_bytes, nullptr, nullptr) != CQSA_OK) return false;
  if (tail) clear_tail(now);
  return true;
}

bool leaf_call::alive() const {
  return std::all_of(ranges_.begin(), ranges_.end(), [](const range& r) { return the_memory().holds(r.begin, r.bytes, false); });
}

}  // namespace fake
