// SPDX-License-Identifier: Apache-2.0
// Codes back to numbers, and codes transposed.
#include "fp8_element.h"
#include "fp8_float_mode.h"
#include "fp8_job.h"
#include "fp8_lines.h"

#include <algorithm>
#include <atomic>

namespace cqsa::cpu {
namespace {

constexpr int64_t tile_rows = 128, tile_columns = 512;
constexpr int64_t many_bytes = 1 << 24;  // that no cache keeps for their reader
constexpr scalar_ops conversions = {[](uint16_t x) { return f16_to_f32(x); }, [](float x) { return f32_to_f16(x); }};

int64_t tiles(int64_t n, int64_t size) { return (n + size - 1) / size; }

cqsa_status run_tasks(const cqsa_exec* exec, int64_t elements, int64_t count, void (*task)(void*, int64_t), void* data) {
  const int64_t workers = exec && exec->run && elements > (1 << 15) ? std::min(exec->num_workers, count) : 1;
  if (workers > 1) return exec->run(exec->user, workers, task, data);
  task(data, 0);
  return CQSA_OK;
}

// ---- dequantize -------------------------------------------------------------------------------------------------------------

struct decoding {
  const fp8_target& target;
  const cqsa_fp8_dequantize_leaf& leaf;
  fp8_groups groups;
  bool per_group;
  int64_t top, bottom;
  std::atomic<int64_t> next{0};
};

struct decode_scratch {
  alignas(64) float x[tile_columns];
  alignas(64) char raw[4 * tile_columns];
  alignas(64) uint8_t tile[tile_rows * tile_columns];  // 64 KiB
  int64_t group = 0;
};

int64_t scale_row(const decoding& d, int64_t i, decode_scratch* mem) {
  if (!d.per_group) return i / d.leaf.scale_inv.block[0];
  if (i < d.groups.begin(mem->group)) mem->group = 0;
  while (i >= d.groups.end(mem->group)) ++mem->group;
  return mem->group;
}

void apply_scales(const decoding& d, int64_t i, int64_t j, int64_t n, decode_scratch* mem) {
  const cqsa_scale_grid& g = d.leaf.scale_inv;
  if (!g.data) return;
  const int64_t r = scale_row(d, i, mem);
  for (int64_t k = 0; k < n;) {
    const int64_t c = (j + k) / g.block[1], end = std::min(n, (c + 1) * g.block[1] - j);
    d.target.multiply(mem->x + k, load_scale(g, r, c), end - k);
    k = end;
  }
}

// f32 and bf16 where they belong; the rest by way of f32.
bool is_plain(const cqsa_matrix& out) {
  const bool known = out.dtype == CQSA_DTYPE_F32 || out.dtype == CQSA_DTYPE_BF16;
  return known && out.stride[2] == 1 && reinterpret_cast<uintptr_t>(out.data) % uintptr_t(bytes_of(out.dtype)) == 0;
}

void decode_line(const decoding& d, const uint8_t* codes, int64_t i, int64_t j, int64_t n, decode_scratch* mem) {
  const cqsa_scale_grid& g = d.leaf.scale_inv;
  const cqsa_matrix& out = d.leaf.out;
  char* const to = matrix_address(out, d.leaf.rows, i, j);
  const int64_t r = g.data ? scale_row(d, i, mem) : 0;
  for (int64_t k = 0; k < n;) {
    const int64_t c = g.data ? (j + k) / g.block[1] : 0, end = g.data ? std::min(n, (c + 1) * g.block[1] - j) : n;
    d.target.decode(codes + k, d.leaf.codes.dtype, end - k, g.data ? load_scale(g, r, c) : 1.0f, out.dtype, to + k * bytes_of(out.dtype));
    k = end;
  }
}

// Codes that lie column by column are turned first.
bool is_upright(const cqsa_fp8_dequantize_leaf& leaf) {
  return leaf.codes.stride[2] == 1 || leaf.codes.stride[1] != 1 || (leaf.batch > 1 && leaf.codes.stride[0] != leaf.rows);
}

void decode_tile(const decoding& d, int64_t top, int64_t rows, int64_t left, decode_scratch* mem) {
  const cqsa_fp8_dequantize_leaf& leaf = d.leaf;
  const int64_t n = std::min(tile_columns, leaf.columns - left);
  const bool upright = is_upright(leaf), plain = is_plain(leaf.out) && (!upright || leaf.codes.stride[2] == 1);
  const char* const corner = matrix_address(leaf.codes, leaf.rows, top, left);
  if (!upright) d.target.transpose(reinterpret_cast<const uint8_t*>(corner), leaf.codes.stride[2], n, rows, false, mem->tile, tile_columns);
  for (int64_t i = top; i < top + rows; ++i) {
    const char* const from = upright ? matrix_address(leaf.codes, leaf.rows, i, left) : reinterpret_cast<char*>(mem->tile + (i - top) * tile_columns);
    if (plain) {
      decode_line(d, reinterpret_cast<const uint8_t*>(from), i, left, n, mem);
      continue;
    }
    d.target.load(from, leaf.codes.dtype, upright ? leaf.codes.stride[2] : 1, n, mem->raw, mem->x);
    apply_scales(d, i, left, n, mem);
    d.target.save(mem->x, leaf.out.dtype, leaf.out.stride[2], n, &conversions, mem->raw, matrix_address(leaf.out, leaf.rows, i, left));
  }
}

// Units: some rows of upright codes, which are read in order; else tiles.
int64_t rows_of_unit(const cqsa_fp8_dequantize_leaf& leaf) {
  return is_upright(leaf) ? std::clamp<int64_t>((1 << 15) / leaf.columns, 1, tile_rows) : tile_rows;
}

int64_t unit_count(const decoding& d) {
  return tiles(d.bottom - d.top, rows_of_unit(d.leaf)) * (is_upright(d.leaf) ? 1 : tiles(d.leaf.columns, tile_columns));
}

void decode_unit(const decoding& d, int64_t n, decode_scratch* mem) {
  const int64_t rows = rows_of_unit(d.leaf), across = tiles(d.leaf.columns, tile_columns);
  if (!is_upright(d.leaf)) {
    const int64_t top = d.top + n / across * rows;
    return decode_tile(d, top, std::min(rows, d.bottom - top), n % across * tile_columns, mem);
  }
  const int64_t top = d.top + n * rows, bottom = std::min(top + rows, d.bottom);
  for (int64_t i = top; i < bottom; ++i)
    for (int64_t j = 0; j < d.leaf.columns; j += tile_columns) decode_tile(d, i, 1, j, mem);
}

// ---- transpose --------------------------------------------------------------------------------------------------------------

struct turning {
  const fp8_target& target;
  const cqsa_fp8_transpose_leaf& leaf;
  std::atomic<int64_t> next{0};
};

void turn_tile(const turning& t, int64_t top, int64_t left) {
  const cqsa_fp8_transpose_leaf& leaf = t.leaf;
  const int64_t rows = std::min(tile_rows, leaf.rows - top), columns = std::min(tile_columns, leaf.columns - left);
  const bool streams = leaf.rows * leaf.columns >= many_bytes;
  const uint8_t* const x = leaf.x + top * leaf.x_stride[0] + left * leaf.x_stride[1];
  uint8_t* const out = leaf.out + top * leaf.out_stride[0] + left * leaf.out_stride[1];
  if (leaf.x_stride[1] == 1 && leaf.out_stride[0] == 1) return t.target.transpose(x, leaf.x_stride[0], rows, columns, streams, out, leaf.out_stride[1]);
  if (leaf.x_stride[0] == 1 && leaf.out_stride[1] == 1) return t.target.transpose(x, leaf.x_stride[1], columns, rows, streams, out, leaf.out_stride[0]);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) out[i * leaf.out_stride[0] + j * leaf.out_stride[1]] = x[i * leaf.x_stride[0] + j * leaf.x_stride[1]];
}

}  // namespace

cqsa_status fp8_dequantize_on(const fp8_target& target, const cqsa_fp8_dequantize_leaf* leaf, const cqsa_exec* exec) {
  const fp8_groups groups{leaf->groups, leaf->groups_dtype, leaf->groups_stride, leaf->num_groups, leaf->batch * leaf->rows};
  decoding d{target, *leaf, groups, leaf->per_group != 0, 0, groups.rows};
  if (leaf->groups) d.top = groups.begin(0), d.bottom = std::max(groups.begin(leaf->num_groups), d.top);
  if (d.bottom <= d.top || leaf->columns == 0) return CQSA_OK;
  return run_tasks(exec, (d.bottom - d.top) * leaf->columns, unit_count(d), [](void* data, int64_t) {
    const plain_floats mode;
    decoding& d = *static_cast<decoding*>(data);
    decode_scratch mem;
    const int64_t count = unit_count(d);
    for (int64_t n; (n = d.next.fetch_add(1, std::memory_order_relaxed)) < count;) decode_unit(d, n, &mem);
  }, &d);
}

cqsa_status fp8_transpose_on(const fp8_target& target, const cqsa_fp8_transpose_leaf* leaf, const cqsa_exec* exec) {
  turning t{target, *leaf};
  if (leaf->rows == 0 || leaf->columns == 0) return CQSA_OK;
  return run_tasks(exec, leaf->rows * leaf->columns, tiles(leaf->rows, tile_rows) * tiles(leaf->columns, tile_columns), [](void* data, int64_t) {
    turning& t = *static_cast<turning*>(data);
    const int64_t across = tiles(t.leaf.columns, tile_columns);
    for (int64_t n; (n = t.next.fetch_add(1, std::memory_order_relaxed)) < tiles(t.leaf.rows, tile_rows) * across;)
      turn_tile(t, n / across * tile_rows, n % across * tile_columns);
    t.target.finish();
  }, &t);
}

cqsa_status fp8_dequantize(void*, const cqsa_fp8_dequantize_leaf* leaf, const cqsa_exec* exec, void*) { return fp8_dequantize_on(fp8_best(), leaf, exec); }
cqsa_status fp8_transpose(void*, const cqsa_fp8_transpose_leaf* leaf, const cqsa_exec* exec, void*) { return fp8_transpose_on(fp8_best(), leaf, exec); }

}  // namespace cqsa::cpu
