// SPDX-License-Identifier: Apache-2.0
// From a leaf to the parameters of a kernel: shared by the portable attention and the tuned ones, which differ in the tile and in
// what they accept.
#pragma once

#include "attention_params.h"
#include "port.h"

namespace cqsa::gpu {

constexpr int64_t most_units = int64_t(1) << 30;  // blocks of a launch: a grid ends at 2^31 - 1

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int32_t kind_of(cqsa_dtype t);
bool is_float(cqsa_dtype t);  // f32, f16, bf16
bool is_kv(cqsa_dtype t);     // .. int8, e4m3fn, e5m2

// FAST asks for the matrix units; a type that those of the chip do not have must not quietly be computed by something slower.
const char* why_no_fast(const cqsa_chip& chip, int32_t precision, cqsa_dtype q);

// Reasons that hold for every kernel of a GPU; nullptr: none.
const char* why_no_gpu(const cqsa_attention_leaf& leaf);

// sizes: of the leading three axes. The stride of an axis with one entry does not matter. `run`: elements that are read at once;
// has_runs, and quads of the view, tell whether they may be.
bool has_runs(const cqsa_view& x, int64_t batch, int64_t heads, int64_t rows, int64_t channels, int64_t run);
gpu_view view_of(const cqsa_view& x, int64_t batch, int64_t heads, int64_t rows, int64_t channels, int64_t run = 4);
gpu_view plain_view(const cqsa_view& x);

// Everything but tiles and rectangles. quads of q, k, v and out: whether `run` channels may be read or written at once.
void fill_params(const cqsa_attention_leaf& leaf, attention_params* out, int64_t run = 4);

// Bytes of the list of rectangles in the workspace: none when there is only one, which travels with the parameters.
uint64_t list_bytes(const cqsa_attention_leaf& leaf);

// Rows of a tile, where heads are packed into each part by itself.
struct tile_rows {
  int32_t part, parts = 1;
};

// Tiles of so many rows over the whole problem or over the rectangles, whose list goes to `memory`. Returns how many blocks there
// are in *units.
cqsa_status fill_tiles(void* device, const cqsa_attention_leaf& leaf, tile_rows rows, void* memory, uint64_t bytes, void* stream,
                       attention_params* out, int64_t* units);

// A kernel with one block for each tile of fill_tiles().
struct tile_kernel {
  kernel_id kernel;
  int32_t threads, shared_bytes;
};

// Launches it over all units, with params whose part `first` is; then clear_tail().
cqsa_status launch_tiles(void* device, const cqsa_attention_leaf& leaf, const tile_kernel& kernel, const void* params, size_t params_bytes,
                         attention_params* first, int64_t units, void* stream);

// With CQSA_LEAF_CLEAR_TAIL: out = 0 and lse = -inf in the rows past the last segment, which only the device knows.
cqsa_status clear_tail(void* device, const cqsa_attention_leaf& leaf, void* stream);

}  // namespace cqsa::gpu
