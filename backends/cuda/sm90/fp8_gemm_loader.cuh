// SPDX-License-Identifier: Apache-2.0
// The loading warpgroup of the Hopper FP8 product: one thread sends for codes, one warp brings scales of columns.
#pragma once

#include "fp8_gemm_memory.cuh"

namespace cqsa::gpu::sm90 {

// Rows of an operand from `row` on; of shared ones this block's part, for all blocks of the cluster.
template <bool Shared, int Cluster, int Box>
CQSA_DEVICE void send_operand(unsigned char* to, const tensor_map& map, block_barrier& full, int32_t k, int32_t row, int32_t item) {
  if constexpr (Shared) {
    const int32_t part = int32_t(rank_in_cluster()) * Box;
    copy_box_to((1u << Cluster) - 1, to + part * 128, map, full, k, row + part, item, 0);
  } else {
    copy_box(to, map, full, k, row, item, 0);
  }
}

template <class S> CQSA_DEVICE void send_stage(const gemm_launch& p, const gemm_memory<S>& mem, const tile_place& at, int32_t k, uint32_t slot) {
  block_barrier& full = mem.full(slot);
  arrive_and_expect(full, S::stage_bytes);
  send_operand<S::share_a, S::cluster, S::a_box>(mem.a(slot), p.map_a, full, k, at.row, at.batch * p.a_item);
  send_operand<S::share_b, S::cluster, S::b_box>(mem.b(slot), p.map_b, full, k, at.column, at.batch * p.b_item);
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

// Scales of this lane's columns, one step after the other; the last ones again once there are no more.
template <class S> struct column_walk {
  static constexpr int each = S::columns / 32;
  const float* from[each];
  int32_t left;
  CQSA_DEVICE void next(const gemm_scales& s, float (&value)[each]) {
    --left;
#pragma unroll
    for (int i = 0; i < each; ++i) {
      value[i] = s.data ? *from[i] : 1.0f;
      if (left > 0) from[i] += s.stride[2];
    }
  }
};
template <class S> CQSA_DEVICE column_walk<S> walk_columns(const gemm_launch& p, const tile_place& at) {
  column_walk<S> walk;
  walk.left = steps_of(p);
#pragma unroll
  for (int i = 0; i < walk.each; ++i) walk.from[i] = scale_row(p.g.scale_b, at.batch, min_i64(at.column + thread_index() % 32 + 32 * i, p.g.n - 1));
  return walk;
}
template <class S> CQSA_DEVICE void tell_scales(const gemm_memory<S>& mem, uint32_t slot, const float (&value)[S::columns / 32]) {
  const int lane = thread_index() % 32;
#pragma unroll
  for (int i = 0; i < S::columns / 32; ++i) mem.scales(slot)[lane + 32 * i] = value[i];
  lanes_barrier<32>();
  if (lane == 0) arrive(mem.full(slot));
}

// Scales of b, one for each column of a tile, for one stage after the other; those of some steps are under way, as memory takes about as long as a
// step.
template <class S> CQSA_DEVICE void bring_scales(const gemm_launch& p, const gemm_memory<S>& mem) {
  constexpr int ahead = 2, each = S::columns / 32;
  const int32_t tiles = tiles_of(p), steps = steps_of(p);
  step s{0, 0};
  for (int32_t tile = first_tile<S>(); tile < tiles; tile += p.clusters) {
    column_walk<S> walk = walk_columns<S>(p, tile_at<S>(p, tile));
    float value[ahead + 1][each];
#pragma unroll
    for (int j = 0; j < ahead; ++j) walk.next(p.g.scale_b, value[j]);
#pragma unroll 1
    for (int32_t n = 0; n < steps; ++n, advance<S>(s)) {
      walk.next(p.g.scale_b, value[ahead]);
      wait_empty<S>(mem, s);
      tell_scales<S>(mem, s.slot, value[0]);
#pragma unroll
      for (int j = 0; j < ahead; ++j)
#pragma unroll
        for (int i = 0; i < each; ++i) value[j][i] = value[j + 1][i];
    }
  }
}

}  // namespace cqsa::gpu::sm90
