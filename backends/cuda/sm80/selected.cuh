// SPDX-License-Identifier: Apache-2.0
// Attention over selected cells by matrix instructions: a block of four warps for a query, a key head and up to 16 of its query heads,
// which are the rows of the products. docs/kernels/NOTES-selected.md has the reasons and the figures.
//
// Each warp takes every fourth tile of the list for itself: its own copies, products and sums, no barrier in the loop. While k of a
// tile is multiplied its v is under way, and meanwhile the next k. In the end the sums of the four are added in order: results are the
// same every time.
#pragma once

#include "backends/cuda/sm80/selected_math.cuh"

namespace cqsa::gpu::sm80 {

template <class S> struct block_memory_of {
  unsigned char* base;
  CQSA_DEVICE warp_memory<S> warp(int n) const { return {base + n * S::warp_bytes}; }
  CQSA_DEVICE unsigned char* fragments() const { return base + S::warps * S::warp_bytes; }
  CQSA_DEVICE float* row_factor() const { return reinterpret_cast<float*>(fragments() + S::q_bytes * (S::split ? 2 : 1)); }
  CQSA_DEVICE float* m(int warp) const { return row_factor() + S::rows * (1 + warp); }
  CQSA_DEVICE float* l(int warp) const { return m(warp + S::warps); }
  // In shared memory because registers are for the sums.
  CQSA_DEVICE selected_place& place() const { return *reinterpret_cast<selected_place*>(l(S::warps)); }
};

template <class S> struct warp_state {
  selected_sums<S> sums;
  uint32_t there;  // cells of the tile in shared memory
};

// Ids and pages of the warp's first tiles, and the copies of its first one.
template <class S>
CQSA_DEVICE void begin_warp(const selected_params& p, const selected_place& x, const warp_memory<S>& mem, int64_t first, warp_state<S>& w) {
  constexpr int64_t apart = S::warps * S::cells;
  entry_ahead ahead, second, third;
  ask_for_id<S>(p, x, first, ahead);
  ask_for_id<S>(p, x, first + apart, second);
  ask_for_id<S>(p, x, first + 2 * apart, third);
  ask_for_page(p, x, ahead);
  ask_for_page(p, x, second);
  const bool there = is_there(p, ahead);
  w.there = uint32_t(ballot<32>(there));
  if (there) place_cell<S>(p, x, mem, ahead);
  if constexpr (S::codes) ask_for_scales<S>(p, x, there, ahead);
  lanes_barrier<32>();
  if (first < x.count) copy_rows<S, 0>(p, mem, w.there);
  cp_async_commit();
  if (first < x.count) copy_rows<S, 1>(p, mem, w.there);
  cp_async_commit();
  ahead.page = second.page, ahead.row = second.row;
  ahead.id = third.id, ahead.before = third.before;
  mem.ahead() = ahead;
}

template <class S> CQSA_DEVICE void clear(selected_sums<S>& sums) {
  sums.m[0] = sums.m[1] = -infinity();
  sums.l[0] = sums.l[1] = 0.0f;
  sums.up = S::codes ? 0x1p30f : 0x1p12f;
#pragma unroll
  for (int g = 0; g < S::groups; ++g)
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums.o[g][j][i] = 0.0f;
}

// One tile. The copies of k, then those of v, are under way. What is overwritten has been read by all lanes without a barrier of its own:
// tiles went into products that the warp makes together, places into copies, scales into fragments, before the ballots here.
template <class S>
CQSA_DEVICE void take_tile(const selected_params& p, const block_memory_of<S>& block, int warp, int64_t first, warp_state<S>& w) {
  constexpr int64_t apart = S::warps * S::cells;
  const warp_memory<S> mem = block.warp(warp);
  const selected_place& x = block.place();
  const uint32_t there = w.there;
  const bool more = first + apart < x.count;
  float change = 1.0f;
  entry_ahead ahead = mem.ahead();
  if constexpr (S::codes) {
    const float up = next_up<S>(ahead, w.sums.up);
    change = quotient(up, w.sums.up);
    w.sums.up = up;
    store_scales<S>(mem, ahead, up);
  }
  const bool next = is_there(p, ahead);
  w.there = uint32_t(ballot<32>(next));
  if (next) place_cell<S>(p, x, mem, ahead);
  if constexpr (S::codes) ask_for_scales<S>(p, x, next, ahead);
  ask_for_page(p, x, ahead);
  ask_for_id<S>(p, x, first + 3 * apart, ahead);
  cp_async_wait<1>();
  lanes_barrier<32>();  // k is there, and what has been stored above
  selected_logits<S> logits;
  multiply_keys<S>(mem, block.fragments(), p.head_dim, logits);
  if (more) copy_rows<S, 0>(p, mem, w.there);
  cp_async_commit();
  const int row = thread_index() % 32 / 4;
  const float row_factor[2] = {block.row_factor()[row], block.row_factor()[row + 8]};
  float factor[2];
  softmax<S>(there, row_factor, logits, w.sums, factor);
  mem.ahead() = ahead;
  factor[0] *= change, factor[1] *= change;
  cp_async_wait<1>();
  lanes_barrier<32>();  // v is there
  add_values<S>(mem, logits, factor, p.head_dim_v, w.sums);
  if (more) copy_rows<S, 1>(p, mem, w.there);
  cp_async_commit();
}

// The warp's sums relative to the largest logit of all warps, to shared memory.
template <class S> CQSA_DEVICE void store_warp(const block_memory_of<S>& mem, int warp, const warp_state<S>& w) {
  const int g = thread_index() % 32 / 4, l = thread_index() % 4;
  float* to = mem.warp(warp).sums();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = g + 8 * r;
    float top = mem.m(0)[row];
#pragma unroll
    for (int n = 1; n < S::warps; ++n) top = max_f32(top, mem.m(n)[row]);
    const float factor = exp2_f32(w.sums.m[r] - (top == -infinity() ? 0.0f : top)) * quotient(1.0f, w.sums.up);
#pragma unroll
    for (int group = 0; group < S::groups; ++group)
#pragma unroll
      for (int q = 0; q < 4; ++q) {  // four of the lane's sixteen channels of the group
        float4x out;
#pragma unroll
        for (int i = 0; i < 4; ++i) out.x[i] = w.sums.o[group][q % 2 * 4 + i][2 * r + q / 2] * factor;
        *reinterpret_cast<float4x*>(to + row * S::sum_pitch + 64 * group + 16 * l + 4 * q) = out;
      }
  }
}

// One thread for each row: its largest logit and sum over the warps; the sum takes the place of the first warp's.
template <class S> CQSA_DEVICE void close_row(const selected_params& p, const selected_place& x, const block_memory_of<S>& mem, int row) {
  float top = mem.m(0)[row], sum = 0.0f;
#pragma unroll
  for (int n = 1; n < S::warps; ++n) top = max_f32(top, mem.m(n)[row]);
  const float ref = top == -infinity() ? 0.0f : top;
#pragma unroll
  for (int n = 0; n < S::warps; ++n) sum = fma_f32(mem.l(n)[row], exp2_f32(mem.m(n)[row] - ref), sum);
  const bool empty = top == -infinity() && sum == 0.0f;
  mem.row_factor()[row] = empty ? 1.0f : sum;
  if (!p.lse.data || row >= x.heads) return;
  const double ln_2 = 0.6931471805599453;
  const float lse = empty ? -infinity() : float(double(top) * ln_2 + log_f64(double(sum)));
  store_u32(p.lse.data + 4 * offset_of(p.lse, 0, x.first_head + row, x.query, 0), bits_of(lse));
}

CQSA_DEVICE void store_quad(const gpu_view& x, int64_t at, const float4x& v) {
  if (x.kind == kind_f32) {
    *reinterpret_cast<float4x*>(x.data + 4 * at) = v;
    return;
  }
  word2x w;
#pragma unroll
  for (int i = 0; i < 2; ++i)
    w.x[i] = x.kind == kind_f16 ? pack_f16(v.x[2 * i], v.x[2 * i + 1]) : f32_to_bf16(v.x[2 * i]) | f32_to_bf16(v.x[2 * i + 1]) << 16;
  *reinterpret_cast<word2x*>(x.data + 2 * at) = w;
}

// Neighbouring threads have neighbouring channels, four each.
template <class S> CQSA_DEVICE void store_out(const selected_params& p, const selected_place& x, const block_memory_of<S>& mem) {
#pragma unroll 2
  for (int i = thread_index(); i < x.heads * (S::d / 4); i += S::warps * 32) {
    const int row = i / (S::d / 4), c = i % (S::d / 4) * 4;
    float4x out{{0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
    for (int n = 0; n < S::warps; ++n) {
      const float4x part = *reinterpret_cast<const float4x*>(mem.warp(n).sums() + row * S::sum_pitch + c);
#pragma unroll
      for (int k = 0; k < 4; ++k) out.x[k] += part.x[k];
    }
    if (c >= p.head_dim_v) continue;
    const float sum = mem.row_factor()[row];
#pragma unroll
    for (int k = 0; k < 4; ++k) out.x[k] = out.x[k] / sum;
    const int64_t at = offset_of(p.out, 0, x.first_head + row, x.query, 0);
    if (p.out.quads) {
      store_quad(p.out, at + c, out);
      continue;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (c + k < p.head_dim_v) store_element(p.out.data, p.out.kind, at + (c + k) * p.out.stride[3], out.x[k]);
  }
}

template <class S> CQSA_DEVICE void selected_block(const selected_params& p) {
  const block_memory_of<S> mem{shared_memory()};
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  if (thread_index() == 0) mem.place() = find_place(p);
  barrier();
  const selected_place& x = mem.place();
  warp_state<S> w;
  query_part<S> q;
  with_kind<true>(p.q.kind, [&](auto kind) { load_part<S, decltype(kind)::value>(p, x, q); });
  begin_warp<S>(p, x, mem.warp(warp), warp * S::cells, w);
  store_queries<S>(p, q, mem.fragments(), mem.row_factor());
  barrier();
  clear<S>(w.sums);
#pragma unroll 1
  for (uint32_t first = warp * S::cells; first < uint32_t(x.count); first += S::warps * S::cells) take_tile<S>(p, mem, warp, first, w);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float l = quad_sum(w.sums.l[r]);
    if (lane % 4 == 0) mem.m(warp)[lane / 4 + 8 * r] = w.sums.m[r], mem.l(warp)[lane / 4 + 8 * r] = l;
  }
  barrier();
  store_warp<S>(mem, warp, w);
  if (thread_index() < S::rows) close_row<S>(p, x, mem, thread_index());
  barrier();
  store_out<S>(p, x, mem);
}

}  // namespace cqsa::gpu::sm80
