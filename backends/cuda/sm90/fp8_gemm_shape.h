// SPDX-License-Identifier: Apache-2.0
// Tiles of the Hopper FP8 product and what its host part tells it, for host and device.
#pragma once

#include "backends/gpu/fp8_gemm_params.h"
#include "tensor_map.h"

#if !defined(CQSA_EVERYWHERE)
#if defined(__CUDACC__)
#define CQSA_EVERYWHERE __host__ __device__ __forceinline__
#else
#define CQSA_EVERYWHERE inline
#endif
#endif

namespace cqsa::gpu::sm90 {

// How sums are made. fast: all of k in the matrix unit. plain: promoted every 128 of k, scales of rows and columns at the end. blocks: scales of a
// for each row and 128 of k, of b for 128 columns and 128 of k. columns: .. of b for each column and 128 of k.
enum class gemm_form { fast, plain, blocks, columns };

// Two warpgroups compute, each `waves` times 64 rows and `columns` columns; a third one loads. `cluster` blocks beside each other share the rows
// of a, of which each loads its part for all of them; or, over each other, those of b.
template <int Waves, int Columns, int Cluster, bool ShareB = false> struct gemm_shape {
  static constexpr int waves = Waves, columns = Columns, cluster = Cluster;
  static constexpr bool share_a = Cluster > 1 && !ShareB, share_b = Cluster > 1 && ShareB;
  static constexpr int rows = 128 * Waves, threads = 384, warps = 8;  // warps that compute
  static constexpr int depth = 128;                                    // of k in a stage: a row of shared memory
  static constexpr int a_bytes = rows * depth, b_bytes = columns * depth, stage_bytes = a_bytes + b_bytes;
  static constexpr int stages = 196608 / stage_bytes;
  // Rows that one copy brings: that part of a tile that a block of a cluster loads.
  static constexpr int a_box = share_a ? rows / Cluster : rows, b_box = share_b ? Columns / Cluster : Columns;
  static_assert(a_box == 128, "one box of a for each block");
  static constexpr int staging_each = 16 * 36 * 4, staging_bytes = warps * staging_each;  // f32: 16 rows of 32 columns for each warp, padded
  static constexpr int scale_bytes = stages * columns * 4, factor_bytes = 2 * 2 * columns * 4, barrier_bytes = 256;
  static constexpr int shared_bytes = stages * stage_bytes + staging_bytes + scale_bytes + factor_bytes + barrier_bytes + 1024;
  static_assert(16 * stages <= barrier_bytes && shared_bytes <= 232448, "what a block has");
};
using gemm_large = gemm_shape<2, 128, 2>;
// The same 256 x 256 of a cluster, cut the other way: for sums without promotion, which have the registers for 256 columns at once. The matrix
// unit reads 80 bytes a clock of shared memory then, not 96.
using gemm_wide = gemm_shape<1, 256, 2, true>;
static_assert(gemm_large::a_box == gemm_wide::a_box && gemm_large::b_box == gemm_wide::b_box, "the host part need not know which of both it is");
using gemm_medium = gemm_shape<1, 128, 1>;
using gemm_small = gemm_shape<1, 64, 1>;

struct gemm_launch {
  tensor_map map_a, map_b;
  gemm_params g;        // its tiles: of a cluster
  int32_t a_item, b_item;  // coordinates of a batch item
  int32_t group;        // rows of tiles that are walked through together, column by column
  int32_t clusters;
};

// Number `tile` in units of clusters. Some rows of tiles together, column by column: what clusters work on at the same time should have few rows
// of a and of b.
struct gemm_unit {
  int32_t batch, row, column;
};
CQSA_EVERYWHERE gemm_unit find_gemm_unit(int32_t rows, int32_t columns, int32_t at_once, int32_t tile) {
  const int32_t all = rows * columns, batch = tile / all, rest = tile - batch * all, per_group = at_once * columns, group = rest / per_group;
  const int32_t first = group * at_once, left = rows - first, size = left < at_once ? left : at_once, within = rest - group * per_group;
  const int32_t column = within / size;
  return {batch, first + within - column * size, column};
}

}  // namespace cqsa::gpu::sm90
