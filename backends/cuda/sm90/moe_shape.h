// SPDX-License-Identifier: Apache-2.0
// The tile of the mixture of experts on Hopper, for host and device.
#pragma once

namespace cqsa::gpu::sm90 {

// Two computing warpgroups of 128 rows of weights each, by up to 128 tokens of an expert; 128 of k at a time, as two panels of 64.
struct moe_shape {
  static constexpr int threads = 384, rows = 256, tokens = 128, depth = 128, stages = 4;
  static constexpr int panel_bytes = tokens * 128, stage_bytes = 2 * panel_bytes;
  static constexpr int shared_bytes = 1024 + stages * stage_bytes + 2 * stages * 8 + tokens * 4;
};

}  // namespace cqsa::gpu::sm90
