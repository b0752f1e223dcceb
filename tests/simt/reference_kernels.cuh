// SPDX-License-Identifier: Apache-2.0
// Small kernels in the manner of the real ones, right as they stand, each with places where one thing can be damaged. That every
// damage is noticed (test_mutants.cpp) is the proof that the harness bites.
#pragma once

#include "backends/cuda/sm70/mma.cuh"
#include "backends/cuda/sm80/mma.cuh"

namespace cqsa::gpu {

enum mutant_number {
  none = 0,
  sum_no_barrier = 11, sum_short_shuffle, sum_wrong_mask, sum_behind_the_end, sum_thread_leaves, sum_barrier_in_branch, sum_half_ballot,
  transpose_no_barrier = 21, transpose_read_swizzle, transpose_write_swizzle, transpose_swapped_block, transpose_behind_the_end,
  copy_no_wait = 31, copy_weak_wait, copy_no_barrier, copy_no_last_barrier, copy_no_commit, copy_wrong_buffer, copy_reads_too_much,
  copy_early_use, copy_misaligned,
  mma16_no_barrier = 41, mma16_a_rows, mma16_a_swapped, mma16_b_not_trans, mma16_b_swapped, mma16_swizzle, mma16_c_row, mma16_c_col,
  mma16_no_wait, mma16_lane_skips, mma16_row_behind_the_end,
  mma8_no_barrier = 61, mma8_a_swapped, mma8_b_trans, mma8_c_row,
  mma884_a_half = 71, mma884_b_half, mma884_pair, mma884_layout, mma884_c_row, mma884_c_col, mma884_no_barrier
};

// ---- a sum over each block, any lane count

struct sum_params {
  const int32_t* in;
  int64_t* out;  // one a block
};

template <int Lanes> CQSA_DEVICE void sum_kernel(const sum_params& p) {
  auto* part = reinterpret_cast<int64_t*>(shared_memory());
  const int t = thread_index(), warps = block_threads() / Lanes;
  if (CQSA_MUTANT(sum_thread_leaves) && t == 5) return;
  int64_t x = p.in[block_index_x() * block_threads() + t];
  for (int mask = CQSA_MUTANT(sum_short_shuffle) ? Lanes / 4 : Lanes / 2; mask > 0; mask /= 2)
    x += shuffle_xor<Lanes>(x, CQSA_MUTANT(sum_wrong_mask) && mask == 4 ? 2 : mask);
  if (t % Lanes == 0) part[t / Lanes + (CQSA_MUTANT(sum_behind_the_end) ? 1 : 0)] = x;
  if (CQSA_MUTANT(sum_barrier_in_branch) ? t >= Lanes : !CQSA_MUTANT(sum_no_barrier)) barrier();
  // Every thread adds, each beginning elsewhere, so that all of them depend on the barrier.
  int64_t all = 0;
  for (int i = 0; i < warps; ++i) all += part[(i + t) % warps];
  uint64_t odd = 0;
  if (!CQSA_MUTANT(sum_half_ballot) || t % Lanes < Lanes / 2) odd = ballot<Lanes>((all & 1) != 0);
  if (t == 0) p.out[block_index_x()] = all;
  if (odd != 0 && odd != ~0ull >> (64 - Lanes)) p.out[block_index_x()] = -1;
}

// ---- transposition of n x n by 32 x 32 tiles whose columns are exchanged by exclusive or, so that rows and columns are both
// free of bank conflicts

struct transpose_params {
  const float* in;
  float* out;
  int64_t n;
};

CQSA_DEVICE int transpose_slot(int row, int col, bool damaged) { return 32 * row + (damaged ? col : col ^ row); }

template <int Lanes> CQSA_DEVICE void transpose_kernel(const transpose_params& p) {
  auto* tile = reinterpret_cast<float*>(shared_memory());
  const int t = thread_index();
  const int64_t row0 = 32 * block_index_y(), col0 = 32 * block_index_x();
  for (int i = t; i < 1024; i += block_threads()) {
    const int row = i / 32, col = i % 32;
    tile[transpose_slot(row, col, CQSA_MUTANT(transpose_write_swizzle)) + (CQSA_MUTANT(transpose_behind_the_end) ? 1 : 0)] =
        p.in[(row0 + row) * p.n + col0 + col];
  }
  if (!CQSA_MUTANT(transpose_no_barrier)) barrier();
  for (int i = t; i < 1024; i += block_threads()) {
    const int row = i / 32, col = i % 32;
    const int64_t to = CQSA_MUTANT(transpose_swapped_block) ? (row0 + row) * p.n + col0 + col : (col0 + row) * p.n + row0 + col;
    p.out[to] = tile[transpose_slot(col, row, CQSA_MUTANT(transpose_read_swizzle))];
  }
}

// ---- c = a b in f32: tiles of 32 x 32, 16 of k at a time, the next ones copied while these are used

struct matmul_params {
  const float *a, *b;  // m x k, k x n, compact
  float* c;
  int64_t m, n, k;     // m and n multiples of 32, k of 4
};
constexpr int matmul_shared_bytes = 2 * (32 * 16 + 16 * 32) * 4;

CQSA_DEVICE void matmul_issue(const matmul_params& p, float* stage, int64_t k0) {
  const int t = thread_index();  // 256 threads: the first 128 copy a, the others b, 16 bytes each
  const int64_t row0 = 32 * block_index_y(), col0 = 32 * block_index_x();
  if (t < 128) {
    const int row = t / 4, k = t % 4 * 4;
    const int64_t left = p.k - k0 - k;
    const int valid = left >= 4 || CQSA_MUTANT(copy_reads_too_much) ? 16 : left > 0 ? int(left) * 4 : 0;
    cp_async_16(stage + 16 * row + k + (CQSA_MUTANT(copy_misaligned) && t == 3 ? 1 : 0), p.a + (row0 + row) * p.k + (valid ? k0 + k : 0), valid);
  } else {
    const int k = (t - 128) / 8, col = (t - 128) % 8 * 4;
    const bool inside = k0 + k < p.k;
    cp_async_16(stage + 32 * 16 + 32 * k + col, p.b + (inside ? k0 + k : 0) * p.n + col0 + col, inside || CQSA_MUTANT(copy_reads_too_much) ? 16 : 0);
  }
}

CQSA_DEVICE void matmul_use(const float* stage, float (&sum)[4]) {
  const int row = thread_index() / 8, col = thread_index() % 8 * 4;
  for (int k = 0; k < 16; ++k)
    for (int i = 0; i < 4; ++i) sum[i] = fma_f32(stage[16 * row + k], stage[32 * 16 + 32 * k + col + i], sum[i]);
}

CQSA_DEVICE void matmul_kernel(const matmul_params& p) {
  auto* stages = reinterpret_cast<float*>(shared_memory());
  const int64_t steps = (p.k + 15) / 16;
  float sum[4] = {};
  matmul_issue(p, stages, 0);
  cp_async_commit();
  for (int64_t step = 0; step < steps; ++step) {
    float* now = stages + 1024 * (step % 2);
    if (step + 1 < steps) matmul_issue(p, stages + 1024 * ((step + (CQSA_MUTANT(copy_wrong_buffer) ? 0 : 1)) % 2), 16 * (step + 1));
    if (!CQSA_MUTANT(copy_no_commit)) cp_async_commit();
    if (CQSA_MUTANT(copy_early_use)) matmul_use(now, sum);
    if (CQSA_MUTANT(copy_weak_wait)) cp_async_wait<2>();
    else if (!CQSA_MUTANT(copy_no_wait)) cp_async_wait<1>();
    if (!CQSA_MUTANT(copy_no_barrier)) barrier();
    if (!CQSA_MUTANT(copy_early_use)) matmul_use(now, sum);
    if (!CQSA_MUTANT(copy_no_last_barrier)) barrier();
  }
  const int64_t row = 32 * block_index_y() + thread_index() / 8, col = 32 * block_index_x() + thread_index() % 8 * 4;
  for (int i = 0; i < 4; ++i) p.c[row * p.n + col + i] = sum[i];
}

// ---- c = a b from halves by mma_m16n8k16: 128 threads, 4 warps, a tile of 64 x 32, all of k = 64 in shared memory. Rows of
// eight 16-byte pieces, piece i of row r at place i ^ (r % 8).

struct mma_params {
  const uint16_t *a, *b;  // 64 x 64 and 64 x 32 halves, compact
  float* c;               // 64 x 32 for each block; all blocks do the same
  int bf16;
};
constexpr int mma_shared_bytes = 64 * 128 + 64 * 64;

CQSA_DEVICE unsigned char* mma_a_piece(int row, int piece) { return shared_memory() + 128 * row + 16 * (piece ^ (row % 8)); }
// Rows of b have four pieces only.
CQSA_DEVICE unsigned char* mma_b_piece(int row, int piece) { return shared_memory() + 64 * 128 + 64 * row + 16 * (piece ^ (row / 2 % 4)); }

CQSA_DEVICE void mma_load(const mma_params& p) {
  for (int i = thread_index(); i < 64 * 8; i += block_threads()) cp_async_16(mma_a_piece(i / 8, i % 8), p.a + 64 * (i / 8) + 8 * (i % 8));
  for (int i = thread_index(); i < 64 * 4; i += block_threads()) cp_async_16(mma_b_piece(i / 4, i % 4), p.b + 32 * (i / 4) + 8 * (i % 4));
  cp_async_commit();
  if (!CQSA_MUTANT(mma16_no_wait)) cp_async_wait<0>();
  if (!CQSA_MUTANT(mma16_no_barrier) && !CQSA_MUTANT(mma8_no_barrier)) barrier();
}

CQSA_DEVICE void mma_store(const mma_params& p, const float (&c)[4], int row0, int col0) {
  const int g = thread_index() % 32 / 4, l = thread_index() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + (CQSA_MUTANT(mma16_c_row) || CQSA_MUTANT(mma8_c_row) ? 8 * (1 - i / 2) : 8 * (i / 2));
    const int col = CQSA_MUTANT(mma16_c_col) ? l + 4 * (i % 2) : 2 * l + i % 2;
    p.c[64 * 32 * block_index_x() + (row0 + row) * 32 + col0 + col] = c[i];
  }
}

CQSA_DEVICE void mma16_kernel(const mma_params& p) {
  mma_load(p);
  const int lane = thread_index() % 32, row0 = thread_index() / 32 * 16;
  for (int n = 0; n < 4; ++n) {
    float c[4] = {};
    for (int k = 0; k < 4; ++k) {
      // a: matrices in the order (rows 0-7, k 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15).
      uint32_t a[4], b[2];
      const int a_row = row0 + (CQSA_MUTANT(mma16_a_rows) ? lane % 8 + lane / 16 * 8 : lane % 16) + (CQSA_MUTANT(mma16_row_behind_the_end) ? 48 : 0);
      const int piece = 2 * k + (CQSA_MUTANT(mma16_a_rows) ? lane / 8 % 2 : lane / 16);
      ldmatrix_x4(a, CQSA_MUTANT(mma16_swizzle) ? mma_a_piece(a_row, piece) + (piece % 2 ? -16 : 16) : mma_a_piece(a_row, piece));
      // b lies by rows of k, so it is transposed on the way.
      const void* b_at = mma_b_piece(16 * k + lane % 16, n);
      if (CQSA_MUTANT(mma16_b_not_trans)) ldmatrix_x2(b, b_at);
      else ldmatrix_x2_trans(b, b_at);
      if (CQSA_MUTANT(mma16_a_swapped)) { const uint32_t x = a[1]; a[1] = a[2], a[2] = x; }
      if (CQSA_MUTANT(mma16_b_swapped)) { const uint32_t x = b[0]; b[0] = b[1], b[1] = x; }
      if (CQSA_MUTANT(mma16_lane_skips) && lane == 17 && k == 2) continue;
      if (p.bf16) mma_m16n8k16_bf16(c, a, b);
      else mma_m16n8k16_f16(c, a, b);
    }
    mma_store(p, c, row0, 8 * n);
  }
}

// The same with the instruction of sm_75.
CQSA_DEVICE void mma8_kernel(const mma_params& p) {
  mma_load(p);
  const int lane = thread_index() % 32, row0 = thread_index() / 32 * 16;
  for (int n = 0; n < 4; ++n) {
    float c[4] = {};
    for (int k = 0; k < 8; ++k) {
      uint32_t a[2], b[1];
      ldmatrix_x2(a, mma_a_piece(row0 + lane % 16, k));
      if (CQSA_MUTANT(mma8_b_trans)) ldmatrix_x1(b, mma_b_piece(8 * k + lane % 8, n));
      else ldmatrix_x1_trans(b, mma_b_piece(8 * k + lane % 8, n));
      if (CQSA_MUTANT(mma8_a_swapped)) { const uint32_t x = a[0]; a[0] = a[1], a[1] = x; }
      mma_m16n8k8_f16(c, a, b[0]);
    }
    mma_store(p, c, row0, 8 * n);
  }
}

// ---- the same by mma_m8n8k4, for operands in any order: a warp does 16 x 16, its quad pairs the quarters

struct mma884_params {
  const uint16_t *a, *b;  // 16 x 32 and 32 x 16 halves; by columns where the order says so
  float* c;               // 16 x 16
};
constexpr int mma884_shared_bytes = 2 * 16 * 32 * 2;

// Four halves at [row][col ..] of a matrix whose rows have `length`, as two registers.
CQSA_DEVICE void load_four(uint32_t (&to)[2], const uint16_t* from) {
  to[0] = from[0] | uint32_t(from[1]) << 16, to[1] = from[2] | uint32_t(from[3]) << 16;
}

template <order A, order B> CQSA_DEVICE void mma884_kernel(const mma884_params& p) {
  auto* a_tile = reinterpret_cast<uint16_t*>(shared_memory());
  uint16_t* b_tile = a_tile + 16 * 32;
  const int lane = thread_index() % 32;
  for (int i = lane; i < 512; i += 32) a_tile[i] = p.a[i], b_tile[i] = p.b[i];
  if (!CQSA_MUTANT(mma884_no_barrier)) barrier();
  const int pair = CQSA_MUTANT(mma884_pair) ? lane / 8 : lane / 4 % 4, l = lane % 4, h = lane / 16 * 4;
  const int row0 = pair / 2 * 8, col0 = pair % 2 * 8, ha = CQSA_MUTANT(mma884_a_half) ? 4 - h : h, hb = CQSA_MUTANT(mma884_b_half) ? 4 - h : h;
  float c[8] = {};
  for (int k = 0; k < 32; k += 4) {
    uint32_t a[2], b[2];
    load_four(a, A == order::row ? a_tile + (row0 + l + ha) * 32 + k : a_tile + (k + l) * 16 + row0 + ha);
    load_four(b, B == order::row ? b_tile + (k + l) * 16 + col0 + hb : b_tile + (col0 + l + hb) * 32 + k);
    if (CQSA_MUTANT(mma884_layout)) mma_m8n8k4<A == order::row ? order::col : order::row, B>(c, a, b);
    else mma_m8n8k4<A, B>(c, a, b);
  }
  for (int i = 0; i < 8; ++i) {
    const int row = (CQSA_MUTANT(mma884_c_row) ? (l & 2) + (i & 1) : (l & 1) + (i & 2)) + h;
    const int col = CQSA_MUTANT(mma884_c_col) ? i : (i & 4) + (l & 2) + (i & 1);
    p.c[(row0 + row) * 16 + col0 + col] = c[i];
  }
}

}  // namespace cqsa::gpu
