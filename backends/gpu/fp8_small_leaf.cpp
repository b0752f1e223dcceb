// SPDX-License-Identifier: Apache-2.0
// Host part of the small operations of FP8.
#include "fp8.h"

#include "fp8_fill.h"

namespace cqsa::gpu {
namespace {

constexpr uint32_t threads = 256;

launch_shape shape_for(void* device, int64_t units, int64_t each, uint32_t shared_bytes = 0) {
  return {{uint32_t(fp8_blocks(facts_of(device), units, each, 8)), 1, 1}, threads, shared_bytes};
}

// One long row on both sides, and eight numbers with one scale.
bool is_plain(const fp8_dequantize_params& p) {
  const auto whole = [&](const fp8_matrix& m) {
    return aligned_to(m.data, 16) && m.stride[2] == 1 && (m.stride[1] == p.columns || p.batch * p.rows == 1) && (p.batch == 1 || m.stride[0] == p.rows * p.columns);
  };
  return !p.groups && (p.codes.kind == kind_e4m3 || p.codes.kind == kind_e5m2) && p.out.kind <= kind_bf16 && whole(p.codes) && whole(p.out) && p.columns % 8 == 0 &&
         (!p.scale_inv.data || p.block[1] >= p.columns || p.block[1] % 8 == 0) && p.batch * p.rows * p.columns < int64_t(1) << 34;
}

}  // namespace

cqsa_status portable_fp8_workspace_init(void* device, void* workspace, uint64_t bytes, void* stream) {
  if (bytes < 64) return CQSA_OK;  // nothing needs so little
  const fp8_init_params p{static_cast<char*>(workspace), bytes};
  return launch(device, kernel_id::cqsa_fp8_init, shape_for(device, int64_t(bytes / 4), 4 * threads), &p, sizeof p, stream);
}

cqsa_status portable_fp8_dequantize(void* device, const cqsa_fp8_dequantize_leaf* leaf, const cqsa_exec*, void* stream) {
  const cqsa_fp8_dequantize_leaf& a = *leaf;
  fp8_dequantize_params p{};
  p.batch = a.batch, p.rows = a.rows, p.columns = a.columns;
  p.codes = matrix_of(a.codes), p.out = matrix_of(a.out), p.scale_inv = grid_of(a.scale_inv);
  p.block[0] = larger(a.scale_inv.block[0], 1), p.block[1] = larger(a.scale_inv.block[1], 1), p.grid_columns = a.scale_inv.columns;
  p.groups = a.groups, p.groups_stride = a.groups_stride, p.num_groups = a.num_groups, p.groups_bytes = a.groups_dtype == CQSA_DTYPE_I64 ? 8 : 4;
  p.per_group = a.per_group;
  p.chunks = divide_up(a.columns, 8);
  const int64_t bytes = p.out.kind == kind_f32 ? 4 : 2;
  p.codes.aligned = a.codes.stride[2] == 1 && aligned_to(a.codes.data, 8) && a.codes.stride[1] % 8 == 0 && (a.batch == 1 || a.codes.stride[0] % 8 == 0);
  p.out.aligned = a.out.stride[2] == 1 && aligned_to(a.out.data, 16) && a.out.stride[1] * bytes % 16 == 0 && (a.batch == 1 || a.out.stride[0] * bytes % 16 == 0);
  if (a.batch * a.rows < 1 || a.columns < 1) return CQSA_OK;
  p.plain = is_plain(p);
  const int64_t each = p.plain ? 4 * threads : threads, blocks = fp8_blocks(facts_of(device), a.batch * a.rows * p.chunks, each, p.plain ? int64_t(1) << 20 : 8);  // no block stays and loops where all are alike
  return launch(device, kernel_id::cqsa_fp8_decode, {{uint32_t(blocks), 1, 1}, threads, 0}, &p, sizeof p, stream);
}

cqsa_status portable_fp8_scale(void* device, const cqsa_fp8_scale_leaf* leaf, const cqsa_exec*, void* stream) {
  const cqsa_fp8_scale_leaf& a = *leaf;
  fp8_scale_params p{};
  p.amax = grid_of(a.amax), p.scale_inv_in = grid_of(a.scale_inv_in), p.scale = grid_of(a.scale), p.scale_inv = grid_of(a.scale_inv);
  const cqsa_scale_grid& from = a.amax.data ? a.amax : a.scale_inv_in;
  p.rows = from.rows, p.columns = from.columns;
  p.format = a.format, p.margin = a.margin, p.pow2 = a.pow2 || powers_only(a.scale_inv), p.eps = a.eps, p.amax_limit = a.amax_limit;
  if (p.rows < 1 || p.columns < 1) return CQSA_OK;
  return launch(device, kernel_id::cqsa_fp8_scale, shape_for(device, p.rows * p.columns, threads), &p, sizeof p, stream);
}

cqsa_status portable_fp8_transpose(void* device, const cqsa_fp8_transpose_leaf* leaf, const cqsa_exec*, void* stream) {
  const cqsa_fp8_transpose_leaf& a = *leaf;
  fp8_transpose_params p{reinterpret_cast<const char*>(a.x), reinterpret_cast<char*>(a.out), a.rows, a.columns, {a.x_stride[0], a.x_stride[1]},
                         {a.out_stride[0], a.out_stride[1]}, 0, 0, 0};
  p.aligned_in = a.x_stride[1] == 1 && aligned_to(a.x, 4) && a.x_stride[0] % 4 == 0;
  p.aligned_out = a.out_stride[0] == 1 && aligned_to(a.out, 4) && a.out_stride[1] % 4 == 0;
  if (a.rows < 1 || a.columns < 1) return CQSA_OK;
  p.plain = a.x_stride[1] == 1 && a.out_stride[0] == 1 && aligned_to(a.x, 8) && aligned_to(a.out, 16) && a.x_stride[0] % 8 == 0 && a.out_stride[1] % 16 == 0 &&
            a.rows % 16 == 0 && a.columns % 8 == 0 && divide_up(a.rows, 128) * divide_up(a.columns, 128) < int64_t(1) << 30;
  if (p.plain) {
    const int64_t blocks = fp8_blocks(facts_of(device), divide_up(a.rows, 128) * divide_up(a.columns, 128), 1, int64_t(1) << 20);
    return launch(device, kernel_id::cqsa_fp8_turn, {{uint32_t(blocks), 1, 1}, threads, fp8_tile_size * fp8_tile_size}, &p, sizeof p, stream);
  }
  const int64_t tiles = divide_up(a.rows, 64) * divide_up(a.columns, 64);
  return launch(device, kernel_id::cqsa_fp8_turn, shape_for(device, tiles, 1, 64 * 68), &p, sizeof p, stream);
}

cqsa_status portable_fp8_rings(void* device, const cqsa_fp8_ring_leaf* leaf, const cqsa_exec*, void* stream) {
  const cqsa_fp8_ring_leaf& a = *leaf;
  const int32_t lanes = facts_of(device).lanes, each = int32_t(threads) / lanes;
  fp8_rings_params p{};
  p.what = a.what, p.amaxes_stride = a.amaxes_stride, p.amax = a.amax;
  for (int64_t first = 0; first < a.count; first += most_fp8_rings) {
    p.count = int32_t(smaller(a.count - first, most_fp8_rings));
    p.amaxes = a.amaxes ? a.amaxes + first * a.amaxes_stride : nullptr;
    for (int32_t n = 0; n < p.count; ++n) p.rings[n] = ring_place_of(a.rings[first + n], false);
    const launch_shape shape{{uint32_t(divide_up(p.count, each)), 1, 1}, threads, fp8_control_bytes};
    if (const cqsa_status status = launch(device, kernel_id::cqsa_fp8_rings, shape, &p, sizeof p, stream); status != CQSA_OK) return status;
  }
  return CQSA_OK;
}

}  // namespace cqsa::gpu
