// SPDX-License-Identifier: Apache-2.0
// Shared memory of a block of the Hopper FP8 product, the barriers by which its warpgroups hand stages to each other, and the order of tiles.
#pragma once

#include "backends/gpu/fp8_gemm_end.cuh"
#include "cluster.cuh"
#include "fp8_gemm_shape.h"

namespace cqsa::gpu::sm90 {

// Step number n, counted over all tiles of the block, is in slot n % stages, and its barriers are in phase n / stages there.
template <class S> struct gemm_memory {
  unsigned char* base;
  CQSA_DEVICE unsigned char* a(uint32_t slot) const { return base + slot * S::stage_bytes; }
  CQSA_DEVICE unsigned char* b(uint32_t slot) const { return base + slot * S::stage_bytes + S::a_bytes; }
  CQSA_DEVICE float* staging(int warp) const { return reinterpret_cast<float*>(base + S::stages * S::stage_bytes + warp * S::staging_each); }
  CQSA_DEVICE float* scales(uint32_t slot) const {
    return reinterpret_cast<float*>(base + S::stages * S::stage_bytes + S::staging_bytes) + slot * S::columns;
  }
  // What a warpgroup needs for each column at the end of a tile: a factor and the bias.
  CQSA_DEVICE float* factors(int group) const {
    return reinterpret_cast<float*>(base + S::stages * S::stage_bytes + S::staging_bytes + S::scale_bytes) + group * 2 * S::columns;
  }
  CQSA_DEVICE block_barrier* barriers() const {
    return reinterpret_cast<block_barrier*>(base + S::stages * S::stage_bytes + S::staging_bytes + S::scale_bytes + S::factor_bytes);
  }
  CQSA_DEVICE block_barrier& full(uint32_t slot) const { return barriers()[slot]; }
  CQSA_DEVICE block_barrier& empty(uint32_t slot) const { return barriers()[S::stages + slot]; }
};

template <class S> CQSA_DEVICE gemm_memory<S> gemm_memory_of_block() {
  extern __shared__ __align__(1024) unsigned char cqsa_hopper_shared[];
  const uint32_t at = shared_address(cqsa_hopper_shared);
  return {cqsa_hopper_shared + ((at + 1023) / 1024 * 1024 - at)};  // the same in all blocks of a cluster
}

// full: the thread that sends for a stage and, with scales of columns, the warp that brings them. empty: each computing warp of the cluster.
template <class S, gemm_form Form> CQSA_DEVICE void begin_gemm_barriers(const gemm_memory<S>& mem) {
  for (uint32_t n = 0; n < S::stages; ++n) {
    init_barrier(mem.full(n), Form == gemm_form::columns ? 2 : 1);
    init_barrier(mem.empty(n), S::warps * S::cluster);
  }
  publish_barriers();
}

struct step {
  uint32_t slot, parity;
};
template <class S> CQSA_DEVICE void advance(step& s) {
  if (++s.slot == S::stages) s.slot = 0, s.parity ^= 1;
}

template <class S> CQSA_DEVICE void wait_empty(const gemm_memory<S>& mem, const step& s) {
  wait_phase(mem.empty(s.slot), s.parity ^ 1);
}
// This warp is through with a stage.
template <class S> CQSA_DEVICE void release(const gemm_memory<S>& mem, uint32_t slot) {
  const uint32_t lane = uint32_t(thread_index()) % 32;
  if constexpr (S::cluster > 1) {
    if (lane < S::cluster) arrive_at(mem.empty(slot), lane);
  } else {
    if (lane == 0) arrive(mem.empty(slot));
  }
}

// The first row and column of tile number `tile` of this block, and its batch item.
struct tile_place {
  int32_t batch, row, column;
};
template <class S> CQSA_DEVICE tile_place tile_at(const gemm_launch& p, int32_t tile) {
  const gemm_unit u = find_gemm_unit(int32_t(p.g.row_tiles), int32_t(p.g.column_tiles), p.group, tile);
  const int32_t rank = S::cluster > 1 ? int32_t(rank_in_cluster()) : 0;
  if constexpr (S::share_b) return {u.batch, (u.row * S::cluster + rank) * S::rows, u.column * S::columns};
  else return {u.batch, u.row * S::rows, (u.column * S::cluster + rank) * S::columns};
}
template <class S> CQSA_DEVICE int32_t first_tile() { return int32_t(blockIdx.x) / S::cluster; }
CQSA_DEVICE int32_t tiles_of(const gemm_launch& p) { return int32_t(p.g.batch * p.g.row_tiles * p.g.column_tiles); }
CQSA_DEVICE int32_t steps_of(const gemm_launch& p) { return int32_t((p.g.k + 127) / 128); }

}  // namespace cqsa::gpu::sm90
