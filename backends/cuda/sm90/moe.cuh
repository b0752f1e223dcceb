// SPDX-License-Identifier: Apache-2.0
// Products of a mixture of experts by wgmma: weights become halves in the registers of the threads that multiply them, once for all tokens of a tile; a
// warpgroup brings the tokens' activations, two others compute and do not wait for each other. docs/kernels/NOTES-moe.md has the reasons.
#pragma once

#include "backends/cuda/sm80/moe_rows.cuh"
#include "copy.cuh"
#include "moe_shape.h"
#include "wgmma.cuh"

namespace cqsa::gpu::sm90 {

using sm80::row_walk;

// Stage number n, counted over all tiles of the block, is in slot n % stages, and its barriers are in phase n / stages there.
struct moe_shared {
  unsigned char* base;
  CQSA_DEVICE unsigned char* stage(uint32_t slot) const { return base + slot * moe_shape::stage_bytes; }
  CQSA_DEVICE block_barrier* barriers() const { return reinterpret_cast<block_barrier*>(base + moe_shape::stages * moe_shape::stage_bytes); }
  CQSA_DEVICE block_barrier& full(uint32_t slot) const { return barriers()[slot]; }
  CQSA_DEVICE block_barrier& empty(uint32_t slot) const { return barriers()[moe_shape::stages + slot]; }
  CQSA_DEVICE int32_t* rows() const { return reinterpret_cast<int32_t*>(barriers() + 2 * moe_shape::stages); }
};
CQSA_DEVICE moe_shared moe_shared_of_block() {
  extern __shared__ __align__(1024) unsigned char cqsa_hopper_shared[];
  const uint32_t at = shared_address(cqsa_hopper_shared);
  return {cqsa_hopper_shared + ((at + 1023) / 1024 * 1024 - at)};
}
CQSA_DEVICE void begin_moe_barriers(const moe_shared& mem) {
  for (uint32_t n = 0; n < moe_shape::stages; ++n) init_barrier(mem.full(n), 128), init_barrier(mem.empty(n), 8);
  publish_barriers();
}

struct moe_step {
  uint32_t slot, parity;
};
CQSA_DEVICE void advance(moe_step& s) {
  if (++s.slot == moe_shape::stages) s.slot = 0, s.parity ^= 1;
}

struct moe_unit {
  moe_tile tile;
  int64_t first;  // of h or y
};
// Units are counted in 32 bits: a division of 64 takes the registers of a loader.
CQSA_DEVICE moe_unit unit_at(const moe_multiply_params& p, uint32_t unit) {
  const uint32_t blocks = uint32_t(p.row_blocks);
  return {tile_of(p.tiles, unit / blocks), int64_t(unit % blocks) * (moe_shape::rows / 16 * sm80::outputs_of_operand(p))};
}
CQSA_DEVICE uint32_t units_of(const moe_multiply_params& p) { return uint32_t(count_of_tiles(p.tiles)) * uint32_t(p.row_blocks); }
CQSA_DEVICE int steps_of(const moe_multiply_params& p) { return int((p.up.row_elements + 127) / 128); }

// ---- tokens -------------------------------------------------------------------------------------------------------------------

// A stage: chunks of 16 bytes where the matrix unit looks for them.
CQSA_DEVICE void send_stage(const moe_multiply_params& p, const moe_shared& mem, uint32_t slot, int count, int64_t k) {
  const int chunk = thread_index() % 16;
  unsigned char* const panel = mem.stage(slot) + chunk / 8 * moe_shape::panel_bytes;
#pragma unroll 2
  for (int token = thread_index() / 16; token < count; token += 8)
    cp_async_16(panel + token * 128 + ((chunk % 8 ^ token % 8) << 4), p.x.half + int64_t(mem.rows()[token]) * p.x.padded + k + 8 * chunk);
}

// What the copies of all but the newest `Pending` stages brought is told when it is there.
CQSA_DEVICE void tell_stage(const moe_shared& mem, uint32_t slot) {
  publish_stores();
  arrive(mem.full(slot));
}

CQSA_DEVICE void bring_tokens(const moe_multiply_params& p, const moe_shared& mem) {
  const uint32_t units = units_of(p);
  const int steps = steps_of(p);
  moe_step s{0, 0};
  uint32_t before = 0;
  bool waiting = false;
#pragma unroll 1
  for (uint32_t unit = uint32_t(block_index_x()); unit < units; unit += uint32_t(grid_size_x())) {
    const moe_tile tile = unit_at(p, unit).tile;
    meet(1, 128);
    if (thread_index() < tile.count) mem.rows()[thread_index()] = sm80::row_of_token(p, tile, thread_index());
    meet(1, 128);
#pragma unroll 1
    for (int n = 0; n < steps; ++n, advance(s)) {
      wait_phase(mem.empty(s.slot), s.parity ^ 1);
      send_stage(p, mem, s.slot, tile.count, 128 * int64_t(n));
      cp_async_commit();
      if (waiting) cp_async_wait<1>(), tell_stage(mem, before);
      before = s.slot, waiting = true;
    }
  }
  if (waiting) cp_async_wait<0>(), tell_stage(mem, before);
}

// ---- sums ---------------------------------------------------------------------------------------------------------------------

CQSA_DEVICE void release_stage(const moe_shared& mem, uint32_t slot) {
  if (thread_index() % 32 == 0) arrive(mem.empty(slot));
}

// A panel: 64 of k, four steps.
template <int N> CQSA_DEVICE void multiply_panel(const moe_shared& mem, uint32_t slot, int h, const uint32_t (&low)[8], const uint32_t (&high)[8], float (&c)[N / 2]) {
  const matrix_place panel(shared_address(mem.stage(slot)) + h * moe_shape::panel_bytes, 16);
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    const uint32_t a[4] = {low[2 * s], high[2 * s], low[2 * s + 1], high[2 * s + 1]};
    wgmma_instruction<N, kind_f16, 0>::registers(c, a, panel.at(32 * s));
  }
  wgmma_commit();
}

template <int N, class Format>
CQSA_DEVICE void run_moe_tile(const moe_multiply_params& p, const moe_shared& mem, const moe_unit& at, int64_t first, moe_step& s) {
  const int64_t pieces = p.up.row_elements / 32, l = thread_index() % 4;
  const int steps = steps_of(p);
  row_walk<Format, 2> walk;
  sm80::take_rows(p, at.tile.expert, first, 2, walk);
#pragma unroll
  for (int m = 0; m < 2; ++m) walk.load(m, min_i64(l, pieces - 1));
  float c[2][N / 2];
#pragma unroll
  for (int i = 0; i < N; ++i) c[i / (N / 2)][i % (N / 2)] = 0.0f;
  uint32_t before = 0, low[2][8], high[2][8];
#pragma unroll 1
  for (int n = 0; n < steps; ++n, advance(s)) {
    const int64_t next = min_i64(4 * int64_t(n + 1) + l, pieces - 1);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      if constexpr (row_walk<Format, 2>::takes_registers) wgmma_wait<0>();  // those of the weights that are being multiplied
      walk.begin(m);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        // The products before the last ones are done: they had the other registers for weights, and with m 0 and h 1 they were the last of a stage.
        wgmma_wait<1>();
        if (n > 0 && m == 0 && h == 1) release_stage(mem, before);
        walk.halves(m, h, low[h], high[h]);
        if (h == 1) walk.load(m, next);
        if (m == 0 && h == 0) wait_phase(mem.full(s.slot), s.parity);
        multiply_panel<N>(mem, s.slot, h, low[h], high[h], c[m]);
      }
    }
    before = s.slot;
  }
  wgmma_wait<0>();
  after_wait(c[0]), after_wait(c[1]);
  release_stage(mem, before);
  sm80::end_sums<N / 8>(p, at.tile, first, [&](int token) { return p.x.half_scale[sm80::row_of_token(p, at.tile, token)]; }, c);
}

template <int N, class Format> CQSA_DEVICE void compute_units(const moe_multiply_params& p, const moe_shared& mem, int warp) {
  const uint32_t units = units_of(p);
  moe_step s{0, 0};
#pragma unroll 1
  for (uint32_t unit = uint32_t(block_index_x()); unit < units; unit += uint32_t(grid_size_x())) {
    const moe_unit at = unit_at(p, unit);
    const int64_t first = at.first + int64_t(warp) * 2 * sm80::outputs_of_operand(p);
    run_moe_tile<N, Format>(p, mem, at, first, s);
  }
}

// N: most tokens of a tile. One kernel for each: where one had several, ptxas would not let their products overlap.
template <int N, class Format> CQSA_DEVICE void moe_block(const moe_multiply_params& p) {
  const moe_shared mem = moe_shared_of_block();
  if (thread_index() == 0) begin_moe_barriers(mem);
  barrier();
  const int warp = shuffle<32>(thread_index() / 32, 0);
  if (warp < 4) {
    give_registers<40>();
    bring_tokens(p, mem);
  } else {
    take_registers<232>();
    compute_units<N, Format>(p, mem, warp - 4);
  }
}

}  // namespace cqsa::gpu::sm90

#define CQSA_SM90_MOE(format, n, type) \
  CQSA_TUNED_KERNEL(384, 1, cqsa_sm90_moe_##format##_n##n, cqsa::gpu::moe_multiply_params) { cqsa::gpu::sm90::moe_block<n, cqsa::gpu::type>(p); }
