// SPDX-License-Identifier: Apache-2.0
// The tile of the mixture of experts by mma.m16n8k16, for host and device.
#pragma once

namespace cqsa::gpu::sm80 {

// Four warps of 32 rows of weights each, by up to 64 tokens of an expert; 128 of k at a time.
struct moe_shape {
  static constexpr int threads = 128, warps = 4, warp_rows = 32, rows = warps * warp_rows, tokens = 64, depth = 128, stages = 3;
  static constexpr int pitch = 2 * depth + 16;  // bytes of a token: ldmatrix finds rows in different banks
  static constexpr int stage_bytes = tokens * pitch;
  static constexpr int shared_bytes = stages * stage_bytes + tokens * 8;  // and of each token its row and its scale
};

constexpr float moe_weight_factor = 64.0f;  // of weights as halves: most are far below 1

}  // namespace cqsa::gpu::sm80
