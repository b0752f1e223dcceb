// SPDX-License-Identifier: Apache-2.0
// The tile of the FP8 product by f16 matrix instructions, for host and device.
#pragma once

namespace cqsa::gpu::sm80 {

// Two rows of four warps, each with 64 x 32 sums; 64 of k at a time.
struct gemm_tile {
  static constexpr int rows = 128, columns = 128, depth = 64, threads = 256;
  static constexpr int pitch = 2 * depth + 16;  // bytes of a row: ldmatrix finds rows in different banks
  static constexpr int shared_bytes = (rows + columns) * pitch;
};

}  // namespace cqsa::gpu::sm80
