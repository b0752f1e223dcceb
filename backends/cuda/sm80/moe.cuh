// SPDX-License-Identifier: Apache-2.0
// Products of a mixture of experts by mma.m16n8k16: weights become halves in the registers of the threads that multiply them, activations come by cp.async.
// A tile has up to 64 tokens of an expert, 8 at a time as many as there are. A sum goes by k alone.
#pragma once

#include "backends/cuda/sm80/mma.cuh"
#include "moe_rows.cuh"

namespace cqsa::gpu::sm80 {

struct moe_block_memory {
  unsigned char* base;
  CQSA_DEVICE unsigned char* stage(int n) const { return base + n * moe_shape::stage_bytes; }
  CQSA_DEVICE int32_t* rows() const { return reinterpret_cast<int32_t*>(base + moe_shape::stages * moe_shape::stage_bytes); }
  CQSA_DEVICE float* scales() const { return reinterpret_cast<float*>(rows() + moe_shape::tokens); }
};

// Of a warp: 2 operands of 16 lines, 8 times 8 tokens.
struct moe_sums {
  float x[2][32];
};

// 128 of k of the tokens of a tile: 16 bytes a thread at a time. Tokens past the last, up to a multiple of 8, are zeros.
CQSA_DEVICE void send_tokens(const moe_multiply_params& p, const moe_block_memory& mem, int slot, int count, int64_t k) {
  const int chunk = thread_index() % 16;
#pragma unroll 1
  for (int token = thread_index() / 16; token < (count + 7) / 8 * 8; token += moe_shape::threads / 16) {
    const int32_t row = mem.rows()[token];
    const unsigned short* from = p.x.half + int64_t(row < 0 ? 0 : row) * p.x.padded + k + 8 * chunk;
    cp_async_16(mem.stage(slot) + token * moe_shape::pitch + 16 * chunk, from, row < 0 ? 0 : 16);
  }
}

// 16 of k, by 8 Tokens tokens.
template <int Tokens> CQSA_DEVICE void multiply_step(const unsigned char* panel, int step, const uint32_t (&a)[4], float (&c)[32]) {
  const int lane = thread_index() % 32, j = lane / 8, r = lane % 8;
#pragma unroll
  for (int n = 0; n < Tokens; n += 2) {
    uint32_t b[4];
    // Of the last one of an odd number only half is used.
    ldmatrix_x4(b, panel + (8 * (n + (n + 1 < Tokens ? j / 2 : 0)) + r) * moe_shape::pitch + 32 * step + 16 * (j % 2));
#pragma unroll
    for (int i = 0; i < 2 && n + i < Tokens; ++i) {
      const uint32_t two[2] = {b[2 * i], b[2 * i + 1]};
      mma_m16n8k16_f16(reinterpret_cast<float(&)[4]>(c[4 * (n + i)]), a, two);
    }
  }
}
// Half of a panel, 64 of k.
template <int Tokens> CQSA_DEVICE void multiply_64(const unsigned char* panel, int h, const uint32_t (&low)[8], const uint32_t (&high)[8], float (&c)[32]) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const uint32_t a[4] = {low[2 * step], high[2 * step], low[2 * step + 1], high[2 * step + 1]};
    multiply_step<Tokens>(panel, 4 * h + step, a, c);
  }
}
CQSA_DEVICE void multiply_any(const unsigned char* panel, int eights, int h, const uint32_t (&low)[8], const uint32_t (&high)[8], float (&c)[32]) {
  if (eights == 1) multiply_64<1>(panel, h, low, high, c);
  else if (eights == 2) multiply_64<2>(panel, h, low, high, c);
  else if (eights <= 4) multiply_64<4>(panel, h, low, high, c);
  else multiply_64<8>(panel, h, low, high, c);
}

template <class Walk> CQSA_DEVICE void run_tile(const moe_multiply_params& p, const moe_block_memory& mem, int count, Walk& walk, moe_sums& sums) {
  const int64_t n = p.up.row_elements, pieces = n / 32, l = thread_index() % 4;
  const int steps = int((n + 127) / 128), eights = (count + 7) / 8;
#pragma unroll
  for (int i = 0; i < 64; ++i) sums.x[i / 32][i % 32] = 0.0f;
  send_tokens(p, mem, 0, count, 0);
  cp_async_commit();
  if (steps > 1) send_tokens(p, mem, 1, count, 128);
  cp_async_commit();
#pragma unroll
  for (int m = 0; m < 2; ++m) walk.load(m, min_i64(l, pieces - 1));
#pragma unroll 1
  for (int s = 0; s < steps; ++s) {
    cp_async_wait<1>();
    barrier();
    if (s + 2 < steps) send_tokens(p, mem, (s + 2) % moe_shape::stages, count, 128 * int64_t(s + 2));
    cp_async_commit();
    const unsigned char* const panel = mem.stage(CQSA_MUTANT(81) ? 0 : s % moe_shape::stages);
    const int64_t next = min_i64(4 * int64_t(s + 1) + l, pieces - 1);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      walk.begin(m);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint32_t low[8], high[8];
        walk.halves(m, h, low, high);
        if (h == 1) walk.load(m, next);
        multiply_any(panel, eights, h, low, high, sums.x[m]);
      }
    }
  }
}

template <class Format> CQSA_DEVICE void moe_block(const moe_multiply_params& p) {
  const moe_block_memory mem{shared_memory()};
  const int64_t units = count_of_tiles(p.tiles) * p.row_blocks, warp = thread_index() / 32;
  for (int64_t unit = block_index_x(); unit < units; unit += grid_size_x()) {
    const moe_tile tile = tile_of(p.tiles, unit / p.row_blocks);
    const int64_t first = unit % p.row_blocks * (moe_shape::rows / 16 * outputs_of_operand(p)) + warp * 2 * outputs_of_operand(p);
    barrier();  // the last tile is done with what is in shared memory
    if (thread_index() < moe_shape::tokens) {
      const int token = thread_index();
      const int32_t row = token < tile.count ? row_of_token(p, tile, token) : -1;
      mem.rows()[token] = row;
      mem.scales()[token] = row < 0 ? 0.0f : p.x.half_scale[row];
    }
    barrier();
    row_walk<Format, 2> walk;
    take_rows(p, tile.expert, first, 2, walk);
    moe_sums sums;
    run_tile(p, mem, tile.count, walk, sums);
    cp_async_wait<0>();
    end_sums<8>(p, tile, first, [&](int token) { return mem.scales()[token]; }, sums.x);
  }
}

}  // namespace cqsa::gpu::sm80
