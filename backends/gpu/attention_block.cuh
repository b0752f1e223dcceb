// SPDX-License-Identifier: Apache-2.0
// Where a block of the portable attention stands: which rows it has, which keys they see, and the tables of both in shared
// memory. What all threads of a block share and few instructions need lives in shared memory too, not in everyone's registers.
#pragma once

#include "element.cuh"

namespace cqsa::gpu {

// Offset of a row or key that is not there.
constexpr int64_t no_row = INT64_MIN;

struct block_facts {
  int64_t batch, kv_head, first_head;
  int64_t position;  // key position at which the block's first query stands: i + off
  int64_t q_row, mask_row, state_row;
  int64_t mask_shift;  // column of mask and bias = row of k + shift
  int64_t num_ranges;
  gpu_group group;
  gpu_range range;      // the current one; for whole problems the only one
  int64_t first, end;   // keys of the range that some row sees; first is at a multiple of the tile
  int64_t tile_pos, tile_col;
  int32_t heads, rows;  // query heads in the tile, rows in use (0: nothing to do); row = query * heads + head
  int32_t queries;
  int32_t keys;         // of the current tile
  int32_t lo, hi;       // row of query n sees keys lo + n <= j < hi + n of the tile
  int32_t fix;          // some logits of the tile are hidden, or need more than the scale
  uint32_t gone;        // keys of the tile are on missing pages
  uint32_t bad[8];      // part n of the tile's values holds NaN or Inf
};
static_assert(sizeof(block_facts) <= attention_shape<64>::facts_bytes, "its place in shared memory");

// Shared memory of a block. The panel holds chunks of q and k while logits are computed, then chunks of v.
template <int Dv> struct block_memory {
  using shape = attention_shape<Dv>;
  unsigned char* base;
  CQSA_DEVICE float* panel() const { return reinterpret_cast<float*>(base); }
  CQSA_DEVICE float* panel_k() const { return panel() + shape::chunk * shape::rows; }
  CQSA_DEVICE float* p() const { return reinterpret_cast<float*>(base + shape::panel_bytes); }
  CQSA_DEVICE int64_t* row_offset() const { return reinterpret_cast<int64_t*>(base + shape::panel_bytes + shape::p_bytes); }
  CQSA_DEVICE int64_t* key_offset(int n) const { return row_offset() + shape::rows + n * shape::keys; }  // k, v, their scales
  CQSA_DEVICE float* row_m() const { return reinterpret_cast<float*>(key_offset(4)); }
  CQSA_DEVICE float* row_l() const { return row_m() + shape::rows; }
  CQSA_DEVICE float* row_slope() const { return row_m() + 2 * shape::rows; }
  CQSA_DEVICE int32_t* row_query() const { return reinterpret_cast<int32_t*>(row_m() + 3 * shape::rows); }
  CQSA_DEVICE int32_t* row_head() const { return reinterpret_cast<int32_t*>(row_m() + 4 * shape::rows); }
  CQSA_DEVICE float* key_scale(int n) const { return row_m() + 5 * shape::rows + n * shape::keys; }      // k, v
  CQSA_DEVICE block_facts& facts() const { return *reinterpret_cast<block_facts*>(key_scale(2)); }
};

// Index of element (line, i) of a transposed panel of `width` wide lines. Groups of four are exchanged, depending on the line,
// so that neither the scattered writes of a transposition nor the reads of four meet in a bank. The exchange stays within 32 rows and
// is the same for lines 4 n .. 4 n + 3: from an index with line and i multiples of four, line + 1 is `width` further, i + 32 is 32
// further, and i ^ 4 is found by ^ 4.
CQSA_DEVICE int panel_index(int width, int line, int i) { return line * width + (((i >> 2) ^ (line >> 2 & 7)) << 2 | (i & 3)); }

// The group of rectangles that query tile `tile` belongs to.
CQSA_DEVICE int64_t find_group(const attention_params& p, int64_t tile) {
  int64_t low = 0, high = p.num_groups - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (p.groups[middle].first_tile <= tile) low = middle;
    else high = middle - 1;
  }
  return low;
}

// Rows and keys of a batch item. Nobody has looked at the lengths: they are brought into bounds.
CQSA_DEVICE void whole_problem(const attention_params& p, block_facts& f) {
  int64_t q0 = 0, q_len = p.seqlen_q, k0 = 0, k_len = p.seqlen_k;
  if (p.cu_seqlens_q) {
    q0 = clamp_i64(load_index(p.cu_seqlens_q, p.index_bytes, f.batch), 0, p.total_q);
    q_len = clamp_i64(load_index(p.cu_seqlens_q, p.index_bytes, f.batch + 1), q0, p.total_q) - q0;
    q_len = min_i64(q_len, p.seqlen_q);
  }
  if (p.cu_seqlens_k) {
    k0 = clamp_i64(load_index(p.cu_seqlens_k, p.index_bytes, f.batch), 0, p.total_k);
    k_len = clamp_i64(load_index(p.cu_seqlens_k, p.index_bytes, f.batch + 1), k0, p.total_k) - k0;
    k_len = min_i64(k_len, p.seqlen_k);
  }
  if (p.seqused_k) k_len = clamp_i64(load_index(p.seqused_k, p.seqused_bytes, f.batch), 0, k_len);
  f.group = {0, q_len, q0, 0, 0, 1, 0};
  f.range = {0, k_len, k0};
  f.mask_row = 0;
  f.mask_shift = -k0;
  f.position = p.top_left ? 0 : k_len - q_len;
}

// Of numbers that are not negative. A division of 64 bits takes a hundred instructions, and everyone waits for those of begin_block.
CQSA_DEVICE int64_t divide_i64(int64_t a, int64_t b) {
  if ((a | b) >> 31 == 0) return uint32_t(a) / uint32_t(b);
  return a / b;
}

// One thread: the queries of query tile `tile` for the batch item and the heads that f has already.
CQSA_DEVICE void begin_queries(const attention_params& p, block_facts& f, int64_t tile) {
  if (p.num_groups == 0) {
    whole_problem(p, f);
  } else {
    // Not by ?: .. a pointer that may point into the parameters makes compilers copy them to every thread's stack.
    if (p.groups) f.group = p.groups[find_group(p, tile)];
    else f.group = p.one_group;
    f.mask_row = f.group.q_row;
    f.mask_shift = 0;
    f.position = f.group.q_pos + (p.top_left ? 0 : p.seqlen_k - p.seqlen_q);
  }
  f.gone = 0;
  const int64_t skip = (tile - f.group.first_tile) * p.tile_queries;
  f.queries = int32_t(clamp_i64(f.group.q_len - skip, 0, p.tile_queries));
  f.rows = f.queries * f.heads;
  f.position += skip;
  f.q_row = f.group.q_row + skip;
  f.mask_row += skip;
  f.state_row = f.group.state_row + skip;
  f.num_ranges = f.group.num_ranges;
}

// One thread: which rows are the block's.
CQSA_DEVICE void begin_block(const attention_params& p, block_facts& f) {
  const int64_t unit = p.first_unit + block_index_x();
  const int64_t inner = p.batch * p.num_kv_heads * p.head_groups;
  const int64_t outer = divide_i64(unit, p.longest_first ? inner : p.q_tiles);
  const int64_t inside = unit - outer * (p.longest_first ? inner : p.q_tiles);
  const int64_t tile = p.longest_first ? p.q_tiles - 1 - outer : inside;
  int64_t rest = p.longest_first ? inside : outer;
  int64_t up = divide_i64(rest, p.head_groups);
  const int64_t part = (rest - up * p.head_groups) * p.heads_packed;
  rest = up;
  up = divide_i64(rest, p.num_kv_heads);
  f.kv_head = rest - up * p.num_kv_heads;
  f.batch = up;
  const int64_t group_heads = divide_i64(p.num_heads, p.num_kv_heads);
  f.first_head = f.kv_head * group_heads + part;
  f.heads = int32_t(min_i64(group_heads - part, p.heads_packed));
  begin_queries(p, f, tile);
}

// One thread: the keys of range n that the block needs.
CQSA_DEVICE void begin_range(const attention_params& p, block_facts& f, int64_t n, int tile_keys) {
  if (p.num_groups > 0) {
    if (p.ranges) f.range = p.ranges[f.group.first_range + n];
    else f.range = p.one_range;
  }
  const int64_t low = f.position - p.left - f.range.pos;
  const int64_t high = f.position + f.queries - 1 + p.right + 1 - f.range.pos;
  f.end = min_i64(f.range.len, high);
  f.first = max_i64(0, low) / tile_keys * tile_keys;
}

// One thread: the tile of keys from `first` on.
CQSA_DEVICE void begin_tile(const attention_params& p, block_facts& f, int64_t first, int tile_keys) {
  const int64_t far = 1 << 20;
  f.keys = int32_t(min_i64(tile_keys, f.end - first));
  f.tile_pos = f.range.pos + first;
  f.tile_col = f.range.row + first + f.mask_shift;
  f.lo = int32_t(clamp_i64(f.position - p.left - f.tile_pos, -far, far));
  f.hi = int32_t(clamp_i64(f.position + p.right + 1 - f.tile_pos, -far, far));
  // The first query sees the fewest late keys, the last one the fewest early ones.
  const bool ragged = f.keys < tile_keys || f.hi < tile_keys || f.lo + f.queries - 1 > 0;
  f.fix = ragged || p.fix_always;
  for (uint32_t& word : f.bad) word = 0;
}

// Page of key row `row`, or -1. The table is the user's: ids outside the pool hide their keys.
CQSA_DEVICE int64_t page_of(const attention_params& p, int64_t batch, int64_t row) {
  const int64_t at = batch * p.page_table_stride[0] + row / p.page_size * p.page_table_stride[1];
  const int64_t page = int32_t(load_u32(p.page_table + 4 * at));
  return page < p.num_pages ? page : -1;
}

// Scale of a whole row of k or v; scales of groups of channels are looked up with the channels.
CQSA_DEVICE float row_scale(const gpu_view& scale, int kind, int64_t item, int64_t g, int64_t row) {
  if (kind == scale_per_tensor) return load_element(scale.data, scale.kind, 0);
  if (kind == scale_per_head) return load_element(scale.data, scale.kind, g * scale.stride[1]);
  if (kind == scale_per_token) return load_element(scale.data, scale.kind, offset_of(scale, item, g, row, 0));
  return 1.0f;
}

// One thread per key: where it is in k and v, and its scales.
template <int Dv> CQSA_DEVICE void find_key(const attention_params& p, const block_memory<Dv>& mem, int64_t first, int n) {
  block_facts& f = mem.facts();
  int64_t item = f.batch, row = f.range.row + first + n;
  bool gone = first + n >= f.end;
  if (!gone && p.page_table) {
    item = page_of(p, f.batch, row);
    row %= p.page_size;
    gone = item < 0;
    if (gone) atomic_or(&f.gone, 1);
  }
  mem.key_offset(0)[n] = gone ? no_row : offset_of(p.k, item, f.kv_head, row, 0);
  mem.key_offset(1)[n] = gone ? no_row : offset_of(p.v, item, f.kv_head, row, 0);
  mem.key_offset(2)[n] = offset_of(p.k_scale, item, f.kv_head, row, 0);
  mem.key_offset(3)[n] = offset_of(p.v_scale, item, f.kv_head, row, 0);
  mem.key_scale(0)[n] = gone ? 1.0f : row_scale(p.k_scale, p.scale_k, item, f.kv_head, row);
  mem.key_scale(1)[n] = gone ? 1.0f : row_scale(p.v_scale, p.scale_v, item, f.kv_head, row);
}

// One thread per row of the tile. Rows that are not in use have zeros for q and nobody looks at them.
template <int Dv> CQSA_DEVICE void begin_row(const attention_params& p, const block_memory<Dv>& mem, int x) {
  const block_facts& f = mem.facts();
  const bool used = x < f.rows;
  const int query = used ? x / f.heads : 0, head = used ? x % f.heads : 0;
  const int64_t h = f.first_head + head;
  mem.row_query()[x] = query;
  mem.row_head()[x] = int32_t(h);
  mem.row_offset()[x] = used ? offset_of(p.q, f.batch, h, f.q_row + query, 0) : no_row;
  mem.row_slope()[x] = p.slopes.data ? load_element(p.slopes.data, kind_f32, offset_of(p.slopes, f.batch, h, 0, 0)) : 0.0f;
  const bool from_state = used && (p.flags & flag_state_in);
  const int64_t at = (f.batch * p.num_heads + h) * p.state_rows + f.state_row + query;
  mem.row_m()[x] = from_state ? p.state_m[at] : -infinity();
  mem.row_l()[x] = from_state ? p.state_l[at] : 0.0f;
}

}  // namespace cqsa::gpu
