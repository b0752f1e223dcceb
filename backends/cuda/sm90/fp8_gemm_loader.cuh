// SPDX-License-Identifier: Apache-2.0
// The loading warpgroup of the Hopper FP8 product: one thread sends for codes, one warp brings scales of columns.
#pragma once

#include "fp8_gemm_memory.cuh"

namespace cqsa::gpu::sm90 {

template <class S> CQSA_DEVICE void send_stage(const gemm_launch& p, const gemm_memory<S>& mem, const tile_place& at, int32_t k, uint32_t slot) {
  block_barrier& full = mem.full(slot);
  arrive_and_expect(full, S::stage_bytes);
  if constexpr (S::cluster > 1) {
    const int32_t part = int32_t(rank_in_cluster()) * S::a_box;
    copy_box_to((1u << S::cluster) - 1, mem.a(slot) + part * S::depth, p.map_a, full, k, at.row + part, at.batch * p.a_item, 0);
  } else {
    copy_box(mem.a(slot), p.map_a, full, k, at.row, at.batch * p.a_item, 0);
  }
  copy_box(mem.b(slot), p.map_b, full, k, at.column, at.batch * p.b_item, 0);
}

template <class S> CQSA_DEVICE void send_tiles(const gemm_launch& p, const gemm_memory<S>& mem) {
  const int32_t tiles = tiles_of(p), steps = steps_of(p);
  step s{0, 0};
  for (int32_t tile = first_tile<S>(); tile < tiles; tile += p.clusters) {
    const tile_place at = tile_at<S>(p, tile);
#pragma unroll 1
    for (int32_t n = 0; n < steps; ++n, advance<S>(s)) {
      wait_empty<S>(mem, s);
      send_stage<S>(p, mem, at, n * S::depth, s.slot);
    }
  }
}

// Scales of b, one for each column of a tile, for one stage after the other.
template <class S> CQSA_DEVICE void bring_scales(const gemm_launch& p, const gemm_memory<S>& mem) {
  const int32_t tiles = tiles_of(p), steps = steps_of(p), lane = thread_index() % 32;
  step s{0, 0};
  for (int32_t tile = first_tile<S>(); tile < tiles; tile += p.clusters) {
    const tile_place at = tile_at<S>(p, tile);
    const float* from[S::columns / 32];
#pragma unroll
    for (int i = 0; i < S::columns / 32; ++i) from[i] = scale_row(p.g.scale_b, at.batch, min_i64(at.column + lane + 32 * i, p.g.n - 1));
#pragma unroll 1
    for (int32_t n = 0; n < steps; ++n, advance<S>(s)) {
      float value[S::columns / 32];
#pragma unroll
      for (int i = 0; i < S::columns / 32; ++i) value[i] = p.g.scale_b.data ? from[i][n * p.g.scale_b.stride[2]] : 1.0f;
      wait_empty<S>(mem, s);
#pragma unroll
      for (int i = 0; i < S::columns / 32; ++i) mem.scales(s.slot)[lane + 32 * i] = value[i];
      lanes_barrier<32>();
      if (lane == 0) arrive(mem.full(s.slot));
    }
  }
}

}  // namespace cqsa::gpu::sm90
