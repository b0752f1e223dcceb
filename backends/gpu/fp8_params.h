// SPDX-License-Identifier: Apache-2.0
// What fp8_leaf.cpp tells the kernels of FP8, section 13 of cqsa.h. Plain data, passed by value at launch.
#pragma once

#include "attention_params.h"

namespace cqsa::gpu {

// Kinds beyond element_kind.
enum fp8_kind : int32_t { kind_e4m3fnuz = 7, kind_e5m2fnuz = 8 };

struct fp8_matrix {
  char* data;         // null: absent
  int64_t stride[3];  // elements: batch, row, column
  int32_t kind;       // of numbers: element_kind; of codes that are written: CQSA_DTYPE_*
  int32_t aligned;    // wide accesses are possible: see the kernel
};

struct fp8_grid {
  char* data;         // null: absent
  int64_t stride[2];  // elements
  int32_t layout;     // CQSA_FP8_SCALES_*
  int32_t bytes;      // strided: E8M0; otherwise f32
};

// One output and its scales.
struct fp8_side {
  fp8_matrix codes;
  fp8_grid scale_in, scale, scale_inv;
  int64_t rows, columns;  // of the grids
  int64_t block[2];
  int32_t format;         // CQSA_DTYPE_*
  int32_t pow2;
  float ratio;
  int32_t single;         // one scale for all
  int32_t per_group;      // one for each group of rows
  int32_t reserved;
};

struct fp8_ring_place {
  char* state;  // null: none
  int32_t hist_len, format, margin, algorithm, pow2;
  int32_t stage;
};

// The third side is block_amax: its scale grid takes amaxes.
constexpr int32_t amax_side = 2;

struct fp8_job {
  int64_t batch, rows, columns;  // rows: of a batch
  fp8_matrix x, up;
  fp8_grid x_scale_inv;
  int64_t x_block[2];
  fp8_side side[3];
  int32_t first_side;            // the one that counters and amax go with; 3: none
  int32_t source;                // CQSA_FP8_*
  int32_t ignore_nan, margin, saturate, backward;
  float eps, amax_limit;
  float *amax, *column_sum;
  int64_t column_sum_stride;
  int64_t* counters;
  int64_t counters_stride;
  const int32_t* skip;
  const int64_t* rng;
  int64_t rng_stride;
  const void* groups;
  int64_t groups_stride, num_groups;
  int32_t groups_bytes, per_group;  // per_group: a side has a scale for each group
  fp8_ring_place ring;
  uint32_t* words;               // of the workspace: amax of all, then of each group; null: no amax is wanted
  int64_t first_block, blocks;   // of the grid
};

// Launches of a call: everything in one, or first the amax of the tensor, then the codes.
enum fp8_phase : int32_t { phase_all = 0, phase_amax = 1, phase_codes = 2 };

constexpr int32_t most_fp8_jobs = 3;

template <int Jobs> struct fp8_params_of {
  fp8_job jobs[Jobs];
  char* workspace;   // null: not needed
  uint32_t* ticket;  // in it
  int32_t count, phase;
};
using fp8_params = fp8_params_of<most_fp8_jobs>;
using fp8_one_params = fp8_params_of<1>;  // of kernels for one job: a launch with fewer bytes begins earlier
static_assert(sizeof(fp8_params) <= 4000, "one launch takes it");

// Blocks of 256 threads on a multiprocessor, of which a launch has as many as fit; each thread has 64 bytes of numbers on their way. More
// blocks, or one for each piece, were slower in every way: a block's begin and end cost as much as a round.
constexpr int32_t fp8_stream_blocks = 4, fp8_group_blocks = 4, fp8_row_blocks = 4;
// Before sm_80 compilers keep more in registers, and shared memory is short.
constexpr int32_t fp8_tile_blocks(bool new_chip) { return new_chip ? 3 : 2; }

// Tiles of fp8_tile.cuh, and what they take of shared memory.
constexpr int32_t fp8_tile_size = 128, fp8_tile_bytes = 16384 + 4096 + 1024;

constexpr int32_t fp8_quick_tile_bytes = (fp8_tile_size * (fp8_tile_size / 4 + 1) + fp8_tile_size / 8 * 2) * 4;

// Strips of fp8_columns.cuh.
constexpr int32_t fp8_columns_threads = 1024, fp8_columns_bytes = 32 * 8 * 16 + 64 * 4;

// Shared memory that begins with what head and end of every kernel use.
constexpr int32_t fp8_control_bytes = 256;

struct fp8_dequantize_params {
  int64_t batch, rows, columns;
  fp8_matrix codes, out;
  fp8_grid scale_inv;
  int64_t block[2], grid_columns;
  const void* groups;
  int64_t groups_stride, num_groups;
  int32_t groups_bytes, per_group;
  int64_t chunks;  // of 8 columns, in a row
  int32_t plain;   // eight codes stand together everywhere and have one scale
};

struct fp8_scale_params {
  fp8_grid amax, scale_inv_in, scale, scale_inv;
  int64_t rows, columns;
  int32_t format, margin, pow2, reserved;
  float eps, amax_limit;
};

struct fp8_transpose_params {
  const char* x;
  char* out;
  int64_t rows, columns, x_stride[2], out_stride[2];
  int32_t aligned_in, aligned_out;
  int32_t plain;  // rows of x and of out: neighbours stand together, eight bytes in and sixteen out are whole and aligned
};

constexpr int32_t most_fp8_rings = 90;
struct fp8_rings_params {
  fp8_ring_place rings[most_fp8_rings];
  float* amaxes;
  int64_t amaxes_stride;
  int32_t what, count;
  float amax;
};
static_assert(sizeof(fp8_rings_params) <= 4000, "one launch takes it");

struct fp8_init_params {
  char* workspace;
  uint64_t bytes;
};

}  // namespace cqsa::gpu
