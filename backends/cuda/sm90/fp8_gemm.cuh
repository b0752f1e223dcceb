// SPDX-License-Identifier: Apache-2.0
// d = a b^T of FP8 codes with the matrix unit and the copy engine of Hopper: one warpgroup loads, two compute, blocks stay and take one tile after
// the other. docs/kernels/NOTES-fp8-gemm.md has the schedule, the reasons and the figures.
#pragma once

#include "fp8_gemm_direct.cuh"
#include "fp8_gemm_epilogue.cuh"
#include "fp8_gemm_loader.cuh"

namespace cqsa::gpu::sm90 {

template <class S, gemm_form Form, int KindA, int KindB> CQSA_DEVICE void compute_tiles(const gemm_launch& p, const gemm_memory<S>& mem, int group) {
  const int32_t tiles = tiles_of(p);
  const bool direct = ends_directly(p.g.end);
  step s{0, 0};
  uint32_t largest = 0;
#pragma unroll 1
  for (int32_t tile = first_tile<S>(); tile < tiles; tile += p.clusters) {
    const tile_place at = tile_at<S>(p, tile);
    tile_factors<S> factors{};
    if (direct) fetch_factors<S, Form>(p, at, group, factors);
    tile_sums<S> total;
    if constexpr (Form == gemm_form::fast) run_fast<S, KindA, KindB>(p, mem, group, s, total);
    else run_promoted<S, Form, KindA, KindB>(p, mem, at, group, s, total);
    if (direct) {
      end_directly<S, Form>(p, mem, at, group, total, factors);
      continue;
    }
    const uint32_t of_tile = end_tile<S, Form>(p, mem, at, group, total);
    if (of_tile > largest) largest = of_tile;
  }
  if (p.g.end.d_amax) sm80::tell_warp(p.g.end, largest, gridDim.x * S::warps);
}

template <class S, gemm_form Form, int KindA, int KindB> CQSA_DEVICE void gemm_block(const gemm_launch& p) {
  const gemm_memory<S> mem = gemm_memory_of_block<S>();
  if (thread_index() == 0) {
    prefetch_map(p.map_a), prefetch_map(p.map_b);
    begin_gemm_barriers<S, Form>(mem);
  }
  if constexpr (S::cluster > 1) meet_cluster();
  else barrier();
  if (thread_index() < 128) {
    give_registers<40>();
    const int warp = shuffle<32>(thread_index() / 32, 0);
    if (warp == 0 && thread_index() == 0) send_tiles<S>(p, mem);
    if (Form == gemm_form::columns && warp == 1) bring_scales<S>(p, mem);
  } else {
    take_registers<232>();
    compute_tiles<S, Form, KindA, KindB>(p, mem, shuffle<32>(thread_index() / 128, 0) - 1);
  }
  if constexpr (S::cluster > 1) meet_cluster();  // nobody arrives at a block that has ended
}

}  // namespace cqsa::gpu::sm90

#define CQSA_SM90_FP8_BOUNDS_1 __launch_bounds__(384, 1)
#define CQSA_SM90_FP8_BOUNDS_2 __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
// CQSA_SM90_FP8(format of a, format of b, large | medium | small, its cluster, fast | plain | blocks | columns, shape): one kernel.
#define CQSA_SM90_FP8(a, b, size, cluster, form, shape)                                                                                   \
  extern "C" __global__ void CQSA_SM90_FP8_BOUNDS_##cluster cqsa_sm90_fp8_##a##_##b##_##size##_##form(                                      \
      const __grid_constant__ cqsa::gpu::sm90::gemm_launch p) {                                                                           \
    using namespace cqsa::gpu;                                                                                                            \
    sm90::gemm_block<sm90::shape, sm90::gemm_form::form, gemm_##a, gemm_##b>(p);                                                    \
  }
#define CQSA_SM90_FP8_LARGE(a, b)                        \
  CQSA_SM90_FP8(a, b, large, 2, fast, gemm_wide)           \
  CQSA_SM90_FP8(a, b, large, 2, plain, gemm_large)         \
  CQSA_SM90_FP8(a, b, large, 2, blocks, gemm_large)        \
  CQSA_SM90_FP8(a, b, large, 2, columns, gemm_large)
#define CQSA_SM90_FP8_OTHERS(a, b)                   \
  CQSA_SM90_FP8(a, b, medium, 1, plain, gemm_medium)   \
  CQSA_SM90_FP8(a, b, medium, 1, columns, gemm_medium) \
  CQSA_SM90_FP8(a, b, small, 1, plain, gemm_small)     \
  CQSA_SM90_FP8(a, b, small, 1, columns, gemm_small)
