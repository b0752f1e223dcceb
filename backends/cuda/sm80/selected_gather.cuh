// SPDX-License-Identifier: Apache-2.0
// From the list of a query to tiles of k and v in a warp's shared memory. One lane for each entry of the tile looks up ahead where its
// cell is: ids three tiles ahead, the page two, scales one; then all lanes copy the rows, 16 bytes each.
//
// Pieces of a row are exchanged by an XOR of their number, so that the reads of the products do not meet in a bank: in k, where
// eight lanes read four pieces of rows 2 n and 2 n + 1, by 4 in odd rows; in v, where they read two pieces of rows 2 l + .. for l
// from 0 to 3, by 2 l.
#pragma once

#include "backends/cuda/sm80/selected_shape.h"
#include "backends/cuda/sm80/words.cuh"
#include "backends/gpu/selected_cells.cuh"

namespace cqsa::gpu::sm80 {

// What a lane has asked for and not looked at yet: looking would wait for memory. While v is multiplied it waits in shared memory.
struct alignas(16) entry_ahead {
  int32_t id, before;  // of the tile after the next one
  int32_t page, row;   // of the next tile
  uint32_t scales[2][2];  // .. as halves, of k and v
};

template <class S> struct warp_memory {
  unsigned char* base;
  CQSA_DEVICE unsigned char* tile(int n) const { return base + n * S::tile_bytes; }  // 0: k, 1: v
  CQSA_DEVICE int64_t* place(int n) const { return reinterpret_cast<int64_t*>(base + 2 * S::tile_bytes + n * S::place_bytes); }
  CQSA_DEVICE float* scale(int n) const {  // [group][cell]
    return reinterpret_cast<float*>(base + 2 * (S::tile_bytes + S::place_bytes) + n * S::scale_bytes);
  }
  // Of cells 8 n + 2 l and the next, in a group of channels.
  CQSA_DEVICE float2x cell_scales(int which, int group, int n) const {
    return *reinterpret_cast<const float2x*>(scale(which) + group * S::cells + 8 * n + thread_index() % 4 * 2);
  }
  CQSA_DEVICE entry_ahead& ahead() const {  // the lane's
    unsigned char* at = base + 2 * (S::tile_bytes + S::place_bytes + S::scale_bytes);
    return reinterpret_cast<entry_ahead*>(at)[thread_index() % 32];
  }
  CQSA_DEVICE float* sums() const { return reinterpret_cast<float*>(base); }
};

CQSA_DEVICE int key_exchange(int row) { return (row & 1) << 2; }
CQSA_DEVICE int value_exchange(int row) { return (row >> 1 & 3) << 1; }

template <class S> CQSA_DEVICE void ask_for_id(const selected_params& p, const selected_place& x, int64_t first, entry_ahead& e) {
  const int lane = thread_index() % 32;
  const int64_t n = first + lane;
  e.id = -1, e.before = -1;
  if (lane >= S::cells || n >= x.count) return;
  const char* at = p.cells + 4 * (x.query * p.cells_stride[0] + n * p.cells_stride[1]);
  e.id = int32_t(load_u32(at));
  if (n > 0) e.before = int32_t(load_u32(at - 4 * p.cells_stride[1]));
  else e.before = INT32_MIN;
}

CQSA_DEVICE void ask_for_page(const selected_params& p, const selected_place& x, entry_ahead& e) {
  const uint32_t size = uint32_t(p.page_size), number = uint32_t(e.id) / size;
  const bool skipped = e.id < 0 || (e.id <= e.before && !CQSA_MUTANT(1)) || number >= p.pages;
  e.page = -1;
  e.row = int32_t(uint32_t(e.id) - number * size);
  if (!skipped) e.page = int32_t(load_u32(p.page_table + 4 * (x.query * p.page_table_stride[0] + number * p.page_table_stride[1])));
}

// Scales of the 64-channel groups of a row as pairs of halves; 0 past the last channel.
template <class S> CQSA_DEVICE void load_scales(const selected_params& p, const gpu_view& x, int64_t at, int dim, uint32_t (&out)[2]) {
  if (x.quads) {
    if constexpr (S::groups == 4) {
      const word2x w = *reinterpret_cast<const word2x*>(x.data + 2 * at);
      out[0] = w.x[0], out[1] = w.x[1];
      return;
    } else if constexpr (S::groups == 2) {
      out[0] = *reinterpret_cast<const uint32_t*>(x.data + 2 * at);
      return;
    }
  }
#pragma unroll
  for (int g = 0; g < S::groups; ++g)
    if (64 * g < dim) out[g / 2] |= load_u16(x.data + 2 * (at + (p.kv_group == 64 ? g : g / 2) * x.stride[3])) << 16 * (g & 1);
}

template <class S> CQSA_DEVICE void ask_for_scales(const selected_params& p, const selected_place& x, bool there, entry_ahead& e) {
  e.scales[0][0] = e.scales[0][1] = e.scales[1][0] = e.scales[1][1] = 0;
  if (!there) return;
  load_scales<S>(p, p.k_scale, offset_of(p.k_scale, e.page, x.kv_head, e.row, 0), p.head_dim, e.scales[0]);
  load_scales<S>(p, p.v_scale, offset_of(p.v_scale, e.page, x.kv_head, e.row, 0), p.head_dim_v, e.scales[1]);
}

CQSA_DEVICE bool is_there(const selected_params& p, const entry_ahead& e) { return e.page >= 0 && e.page < p.num_pages; }

// The places of the lane's cell, in bytes, to shared memory.
template <class S>
CQSA_DEVICE void place_cell(const selected_params& p, const selected_place& x, const warp_memory<S>& mem, const entry_ahead& e) {
  const int lane = thread_index() % 32;
  mem.place(0)[lane] = S::bytes * offset_of(p.k, e.page, x.kv_head, e.row, 0);
  mem.place(1)[lane] = S::bytes * offset_of(p.v, e.page, x.kv_head, e.row, 0);
}

// 16 bytes of a row element by element, zeros past `dim`.
template <class S> CQSA_DEVICE void copy_elements(unsigned char* to, const gpu_view& x, const char* row, int first, int dim) {
#pragma unroll 1
  for (int i = 0; i < 16 / S::bytes; ++i) {
    const char* at = row + (first + i) * x.stride[3] * S::bytes;
    if constexpr (S::codes) to[i] = first + i < dim ? uint8_t(*at) : 0;
    else *reinterpret_cast<uint16_t*>(to + 2 * i) = first + i < dim ? uint16_t(load_u16(at)) : 0;
  }
}

// The rows of k (Which 0) or v (1) of the tile whose places are in shared memory; bits of `there`: those that are.
template <class S, int Which> CQSA_DEVICE void copy_rows(const selected_params& p, const warp_memory<S>& mem, uint32_t there) {
  constexpr int rows_at_once = 32 / S::chunks, steps = S::cells / rows_at_once;
  const gpu_view& view = Which ? p.v : p.k;
  const int dim = Which ? p.head_dim_v : p.head_dim;
  const int lane = thread_index() % 32, c = lane % S::chunks, row0 = lane / S::chunks;
  const auto to = [&](int row) { return mem.tile(Which) + row * S::pitch + 16 * (c ^ (Which ? value_exchange(row) : key_exchange(row))); };
  if (view.quads && there == uint32_t((uint64_t(1) << S::cells) - 1) && dim == S::d) {  // mostly: nothing to ask
    const char* from = view.data + 16 * c;
    constexpr int batch = steps < 8 ? steps : 8;  // places are read ahead of the copies, which no compiler moves a read across
#pragma unroll
    for (int first = 0; first < steps; first += batch) {
      int64_t at[batch];
#pragma unroll
      for (int i = 0; i < batch; ++i) at[i] = mem.place(Which)[(first + i) * rows_at_once + row0];
#pragma unroll
      for (int i = 0; i < batch; ++i) cp_async_16(to((first + i) * rows_at_once + row0), from + at[i]);
    }
    return;
  }
  const int left = dim * S::bytes - 16 * c, most = left < 0 ? 0 : left < 16 ? left : 16;
#pragma unroll 1
  for (int row = row0; row < S::cells; row += rows_at_once) {
    const bool here = there >> row & 1;
    const char* from = view.data + (here ? mem.place(Which)[row] : 0);
    if (view.quads) cp_async_16(to(row), from + (here && most > 0 ? 16 * c : 0), here ? most : 0);
    else copy_elements<S>(to(row), view, from, 16 * c / S::bytes, here ? dim : 0);
  }
}

// Of powers of two.
CQSA_DEVICE float quotient(float a, float b) { return float_of(bits_of(a) - bits_of(b) + 0x3f800000u); }

// The power of two by which scales of v, and with them p v, are multiplied: it only goes down, so that none of the products that are
// rounded to halves gets near the largest half. Returns it, `up` is the one before.
template <class S> CQSA_DEVICE float next_up(const entry_ahead& e, float up) {
  float top = 0.0f;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float a = low_half(e.scales[1][n] & 0x7fffu), b = low_half(e.scales[1][n] >> 16 & 0x7fffu);
    top = max_f32(top, max_f32(a <= 65504.0f ? a : 0.0f, b <= 65504.0f ? b : 0.0f));
  }
  if (ballot<32>(top * up > 32768.0f) == 0) return up;
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) top = max_f32(top, shuffle_xor<32>(top, mask));
  return float_of((127 + 14 + 127 - (bits_of(top) >> 23)) << 23);  // 2^14 / 2^exponent(top)
}

// The scales of the lane's cell to shared memory, those of v times `up`.
template <class S> CQSA_DEVICE void store_scales(const warp_memory<S>& mem, const entry_ahead& e, float up) {
  const int lane = thread_index() % 32;
#pragma unroll
  for (int g = 0; g < S::groups; ++g) {
    mem.scale(0)[g * S::cells + lane] = g % 2 ? high_half(e.scales[0][g / 2]) : low_half(e.scales[0][g / 2]);
    mem.scale(1)[g * S::cells + lane] = up * (g % 2 ? high_half(e.scales[1][g / 2]) : low_half(e.scales[1][g / 2]));
  }
}

}  // namespace cqsa::gpu::sm80
