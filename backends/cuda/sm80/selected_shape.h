// SPDX-License-Identifier: Apache-2.0
// Sizes of the sm_80 kernels of selected-cell attention.
#pragma once

#include <cstdint>

namespace cqsa::gpu::sm80 {

// D: head_dim and head_dim_v are filled up to it. Codes: int8 with scales, otherwise f16. Split: q and p as sums of two halves.
template <int D, bool Codes, bool Split> struct selected_tile {
  static constexpr int d = D, groups = D / 64;          // a group: 64 channels, whose products are summed by themselves
  static constexpr bool codes = Codes, split = Split;
  static constexpr int warps = 4, rows = 16;
  static constexpr int bytes = Codes ? 1 : 2;           // of an element
  static constexpr int chunks = D * bytes / 16;         // 16-byte pieces of a row
  static constexpr int pitch = chunks < 8 ? 128 : D * bytes;
  static constexpr int cells = Codes ? 32 : 16;         // of a warp's tile
  static constexpr int tile_bytes = cells * pitch;      // of k, and of v
  static constexpr int scale_bytes = Codes ? 4 * groups * cells : 0;
  static constexpr int place_bytes = 8 * cells;
  static constexpr int ahead_bytes = 32 * 32;           // what the lanes have looked up
  static constexpr int loop_bytes = 2 * (tile_bytes + scale_bytes + place_bytes) + ahead_bytes;
  static constexpr int sum_pitch = D + 4;               // floats; a warp's sums take the place of its tiles in the end
  static constexpr int sum_bytes = 4 * rows * sum_pitch;
  static constexpr int warp_bytes = (loop_bytes > sum_bytes ? loop_bytes : sum_bytes) + 15 & ~15;
  static constexpr int q_bytes = 2 * rows * D;          // fragments of q, and as many of its low parts
  static constexpr int row_bytes = 4 * rows * (1 + 2 * warps) + 32;  // .. and the block's place
  static constexpr int shared_bytes = warps * warp_bytes + q_bytes * (Split ? 2 : 1) + row_bytes;
  static constexpr int blocks = D > 128 ? 2 : D > 64 ? 3 : 4;  // on a multiprocessor, as registers allow
};

}  // namespace cqsa::gpu::sm80
