// SPDX-License-Identifier: Apache-2.0
// Attention of a few queries over many keys, bound by the memory that k and v are read from. docs/kernels/NOTES-decode.md has the
// reasons and the figures.
//
// A block has all rows of a key head (up to 64: four warps, each with one tile of 16 rows) and the keys of one split. With fewer
// than four tiles of rows, warps share a tile and take turns with the keys, 16 at a time; at the end their states are merged in shared
// memory. A row's bits depend on its keys, on how they are split, and on the number of tiles of rows.
#pragma once

#include "backends/cuda/sm80/decode_math.cuh"
#include "backends/gpu/row_end.cuh"

namespace cqsa::gpu::decode {

// Codes of int8 are all finite. With e5m2 the second part of a weight may be zero or of another sign than the first, and Inf must never
// meet that.
template <class V, int Kind>
CQSA_DEVICE void add_values(const decode_params& p, const block_memory<V>& mem, const step_place& at, const float (&s)[2][4], bool hidden,
                            row_sums<V>& w) {
  if constexpr (V::narrow && Kind != kind_e4m3) {
    multiply_pv_codes<V, Kind, Kind == kind_e5m2>(p, mem, at, s, w);
  } else if constexpr (V::narrow) {
    if (hidden) multiply_pv_codes<V, Kind, true>(p, mem, at, s, w);
    else multiply_pv_codes<V, Kind, false>(p, mem, at, s, w);
  } else {
    if (hidden) multiply_pv<V, true>(p, mem, at, s, w);
    else multiply_pv<V, false>(p, mem, at, s, w);
  }
}

// 16 keys: what is hidden is decided by the tables, and only where something may be.
template <class V, int Kind>
CQSA_DEVICE void add_keys(const decode_params& p, const block_memory<V>& mem, const step_place& at, const query_tile<V>& q,
                          const common_keys& common, row_sums<V>& w) {
  float s[2][4] = {};
  if constexpr (V::narrow) multiply_qk_codes<V, Kind>(p, mem, at, q, s);
  else multiply_qk<V>(p, mem, at, q, s);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] *= p.a.softmax_scale;
  const uint32_t present = mem.present(at.table)[at.group / 2] >> at.group % 2 * 16 & 0xffffu;
  if (present != 0xffffu || p.a.fix_always || at.key < common.lo || at.key + 16 > common.hi) fix_logits(p, mem.facts(), at, present, s);
  const bool hidden = softmax(s, w) && !CQSA_MUTANT(5);
  add_values<V, Kind>(p, mem, at, s, hidden, w);
}

// Tables of the first stages: all but the scales of the last one, whose place is returned.
template <class V> CQSA_DEVICE key_place fill_tables(const decode_params& p, const block_memory<V>& mem) {
  const block_facts& f = mem.facts();
  key_place place{};
#pragma unroll 1
  for (int stage = 0; stage < p.stages; ++stage) {
    place = place_in<V>(p, f, stage, ask_page(p, f, stage));
    keep_place(mem, stage, place);
    if (V::narrow && stage < p.stages - 1) keep_scales(p, mem, stage, load_scales<V>(p, f, place));
  }
  return place;
}

// All keys of the block. next: of the newest stage in the tables.
template <class V, int Kind>
CQSA_DEVICE void run_stages(const decode_params& p, const block_memory<V>& mem, int m_tile, key_place next, row_sums<V>& w) {
  const block_facts& f = mem.facts();
  const int warp = thread_index() / 32, count = int((max_i64(f.end - f.first, 0) + keys - 1) / keys);
  const int32_t first = int32_t(f.first);
  for (int stage = 0; stage < p.stages - 1; ++stage) {
    if (stage < count) issue_stage(p, mem, stage, stage);
    cp_async_commit();
  }
  const common_keys common = common_of(p, f);
  query_tile<V> q;
  if constexpr (query_tile<V>::kept) {
#pragma unroll
    for (int step = 0; step < V::d / 16; ++step) read_query(mem, m_tile, step, q.a[step]);
  }
  const bool active = m_tile * 16 < f.rows;
  const int m_shift = p.m_tiles >> 1;  // its binary logarithm
  int slot = 0, table = 0;  // of the stage, in the ring of `stages` and in that of one more
#pragma unroll 1
  for (int stage = 0; stage < count; ++stage) {
    wait_for_copies(p.stages - 2);
    barrier();  // this stage is there for all, and nobody is in the one before
    const int newest = stage + p.stages - 1, newest_table = before(table, 2, p.stages + 1), next_table = before(table, 1, p.stages + 1);
    if (newest < count) issue_stage(p, mem, before(slot, 1, p.stages), newest_table);
    cp_async_commit();
    const int32_t page = ask_page(p, f, newest + 1);
    key_scales<most_groups<V>> scales;
    if constexpr (V::narrow) scales = load_scales<V>(p, f, next);
    if constexpr (V::narrow && V::d > 128) keep_scales(p, mem, newest_table, scales);  // no registers to wait in
#pragma unroll 1
    for (int n = 0; active && n < p.m_tiles; ++n) {
      const int group = (warp + 4 * n) >> m_shift;
      const step_place at{slot, table, group, m_tile, first + stage * keys + group * 16};
      if (at.key < f.end) add_keys<V, Kind>(p, mem, at, q, common, w);
    }
    const key_place ahead = place_in<V>(p, f, newest + 1, page);
    keep_place(mem, next_table, ahead);
    if constexpr (V::narrow && V::d <= 128) keep_scales(p, mem, newest_table, scales);
    if constexpr (V::narrow) next = ahead;
    slot = slot + 1 == p.stages ? 0 : slot + 1;
    table = table == p.stages ? 0 : table + 1;
  }
}

// ------------------------------------------------------------------------------------------------------------- the end

// States of the warps, and what becomes of a row.
template <class V> struct merge_memory {
  float* base;
  static constexpr int stride = V::shape::merge_stride;
  CQSA_DEVICE float* sums(int warp, int row) const { return base + (warp * 16 + row) * stride; }
  CQSA_DEVICE float* m(int warp) const { return base + 4 * 16 * stride + warp * 16; }
  CQSA_DEVICE float* l(int warp) const { return m(4) + warp * 16; }
  CQSA_DEVICE float* weight(int part) const { return l(4) + part * most_rows; }
  CQSA_DEVICE float* factor() const { return weight(4); }
  CQSA_DEVICE float* divisor() const { return factor() + most_rows; }
};

template <class V> CQSA_DEVICE void store_sums(const merge_memory<V>& mem, row_sums<V>& w) {
  const int t = thread_index(), warp = t / 32, g = t % 32 / 4, l = t % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = w.l[r] + shuffle_xor<32>(w.l[r], 1);
    sum += shuffle_xor<32>(sum, 2);
    if (l == 0) mem.m(warp)[g + 8 * r] = w.m[r], mem.l(warp)[g + 8 * r] = sum;
  }
#pragma unroll
  for (int n = 0; n < V::d / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) mem.sums(warp, g + i / 2 * 8)[channel_of<V>(n, i)] = w.o[n][i];
}

CQSA_DEVICE int64_t part_row(const decode_params& p, const block_facts& f, int query, int64_t h) {
  return block_index_y() * p.part_rows + (f.batch * p.a.num_heads + h) * p.row_capacity + query;
}

// One thread: state (m, l) of a row to where it belongs.
CQSA_DEVICE row_end close_row(const decode_params& p, const block_facts& f, int row, float m, float l) {
  const int query = row / f.heads;
  const int64_t h = f.first_head + row % f.heads;
  if (p.part_acc) {
    const int64_t at = part_row(p, f, query, h);
    p.part_m[at] = m;
    p.part_l[at] = l;
    return {1.0f, 1.0f, 0.0f};
  }
  const row_end end = end_row(m, l, sink_of(p.a.sinks, h));
  if (p.a.lse.data) store_u32(p.a.lse.data + 4 * offset_of(p.a.lse, f.batch, h, f.q_row + query, 0), bits_of(end.lse));
  return end;
}

// One thread per row: how much each warp's sums count.
template <class V> CQSA_DEVICE void weigh_row(const decode_params& p, const block_facts& f, const merge_memory<V>& mem, int row) {
  const int parts = 4 / p.m_tiles, tile = row / 16, x = row % 16;
  float top = -infinity(), sum = 0.0f;
  for (int n = 0; n < parts; ++n) top = max_f32(top, mem.m(n * p.m_tiles + tile)[x]);
  const float ref = top == -infinity() ? 0.0f : top;
  for (int n = 0; n < parts; ++n) {
    const int warp = n * p.m_tiles + tile;
    const float weight = CQSA_MUTANT(6) ? 1.0f : exp2_f32((mem.m(warp)[x] - ref) * log2_of_e);
    mem.weight(n)[row] = weight;
    sum = fma_f32(weight, mem.l(warp)[x], sum);
  }
  const row_end end = close_row(p, f, row, top, sum);
  mem.factor()[row] = end.factor;
  mem.divisor()[row] = end.divisor;
}

// A warp takes a row: sums of the warps in their order.
template <class V> CQSA_DEVICE void store_row(const decode_params& p, const block_facts& f, const merge_memory<V>& mem, int row) {
  const int parts = 4 / p.m_tiles, tile = row / 16, query = row / f.heads;
  const int64_t h = f.first_head + row % f.heads;
  const float factor = mem.factor()[row], divisor = mem.divisor()[row];
  float* const part = p.part_acc ? p.part_acc + part_row(p, f, query, h) * p.a.head_dim_v : nullptr;
  const int64_t to = offset_of(p.a.out, f.batch, h, f.q_row + query, 0);
  for (int c = thread_index() % 32; c < p.a.head_dim_v; c += 32) {
    float sum = 0.0f;
    for (int n = 0; n < parts; ++n) sum = fma_f32(mem.weight(n)[row], mem.sums(n * p.m_tiles + tile, row % 16)[c], sum);
    if (part) part[c] = sum;
    else store_element(p.a.out.data, p.a.out.kind, to + c * p.a.out.stride[3], sum * factor / divisor);
  }
}

template <class V> CQSA_DEVICE void run_kind(const decode_params& p, const block_memory<V>& mem, int m_tile, row_sums<V>& w) {
  const key_place newest = fill_tables(p, mem);
  barrier();  // tables and q
  if constexpr (!V::narrow) run_stages<V, V::type>(p, mem, m_tile, newest, w);
  else if (p.a.k.kind == kind_i8) run_stages<V, kind_i8>(p, mem, m_tile, newest, w);
  else if (p.a.k.kind == kind_e4m3) run_stages<V, kind_e4m3>(p, mem, m_tile, newest, w);
  else run_stages<V, kind_e5m2>(p, mem, m_tile, newest, w);
}

template <int D, int Type, int Bytes> CQSA_DEVICE void decode_block(const decode_params& p) {
  using V = variant<D, Type, Bytes>;
  const block_memory<V> mem(p);
  block_facts& f = mem.facts();
  const int t = thread_index();
  if (t == 0) {
    begin_block(p.a, f);
    begin_range(p.a, f, 0, keys);
    begin_split(p, f);
  }
  barrier();
  if (f.rows == 0) return;
  if (p.part_acc && f.first >= f.end) {  // the sums of such a state are not read
    for (int row = t; row < f.rows; row += threads) close_row(p, f, row, -infinity(), 0.0f);
    return;
  }
  load_queries(p, mem);
  const int m_tile = t / 32 % p.m_tiles;
  row_sums<V> w;
#pragma unroll
  for (int n = 0; n < D / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) w.o[n][i] = 0.0f;
  w.m[0] = w.m[1] = -infinity();
  w.l[0] = w.l[1] = 0.0f;
  run_kind(p, mem, m_tile, w);
  barrier();  // the ring becomes the memory of the merge
  const merge_memory<V> merge{reinterpret_cast<float*>(mem.base)};
  store_sums(merge, w);
  barrier();
  for (int row = t; row < f.rows; row += threads) weigh_row(p, f, merge, row);
  barrier();
  for (int row = t / 32; row < f.rows; row += threads / 32) store_row(p, f, merge, row);
}

}  // namespace cqsa::gpu::decode
