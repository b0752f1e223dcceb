// SPDX-License-Identifier: Apache-2.0
// Tiles of the sm_75 attention, whose source is that of sm_80 (sm80/attention_shape.h says what the members are). A multiprocessor of
// Turing has 64 KiB of shared memory: smaller tiles, one stage of keys, and another block to compute while one loads.
#pragma once

#include "backends/cuda/sm80/attention_shape.h"

namespace cqsa::gpu::sm75 {

template <int D, int Dv, bool General> struct tile_shape {
  static constexpr int d = D, dv = Dv;
  static constexpr bool general = General;
  static constexpr int warps = D > 128 ? 2 : 4;
  static constexpr int threads = 32 * warps;
  static constexpr int m_tiles = 1;
  static constexpr int rows = 16 * m_tiles * warps;
  static constexpr int keys = General || D > 64 ? 32 : 64;
  static constexpr bool ahead = false;
  static constexpr int stages = 1;
  static constexpr bool q_in_registers = false;
  static constexpr int blocks = D > 64 ? 1 : 2;  // on a multiprocessor

  static constexpr int q_bytes = 2 * rows * D;
  static constexpr int k_bytes = 2 * keys * D, v_bytes = 2 * keys * Dv;
  static constexpr int row_bytes = sm80::row_table_bytes(rows, ahead);
  static constexpr int lane_bytes = threads * m_tiles * 8;
  static constexpr int facts_bytes = 256;
  static constexpr int addend_bytes = General ? 4 * rows * keys : 0;
  static constexpr int key_bytes = General ? 2 * keys * (4 * 8 + 4 * 4) : 0;
  static constexpr int shared_bytes =
      q_bytes + stages * (k_bytes + v_bytes) + row_bytes + lane_bytes + facts_bytes + addend_bytes + key_bytes;
};
static_assert(tile_shape<256, 256, false>::shared_bytes <= 65536, "what Turing has");
static_assert(tile_shape<128, 128, true>::shared_bytes <= 65536 && tile_shape<64, 64, true>::shared_bytes <= 32768, "what Turing has");

}  // namespace cqsa::gpu::sm75
