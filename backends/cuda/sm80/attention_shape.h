// SPDX-License-Identifier: Apache-2.0
// Tiles of the sm_80 attention and how a block's shared memory is divided, for host and device.
//
// Plain kernels take what most calls are: 16-bit operands in rows of aligned 16 bytes, causal or windowed or not, any form of call.
// General ones take the rest (8-bit keys and values, pages, bias, masks, ALiBi, softcap, odd strides) with 16 rows a warp, which
// leaves them the registers for it.
#pragma once

#include <cstdint>

namespace cqsa::gpu::sm80 {

// What a block knows of its rows. m and, but for `ahead`, the offset of q, query, head and slope, each of its own. With two stages
// there is the query in a byte; offsets have been used when the second stage is first written, where they stand; the head follows from
// row and query; and 64 bytes are for the plan of a range, which has the place of slopes otherwise.
constexpr int row_table_bytes(int rows, bool ahead) { return rows * 4 + (ahead ? rows + 64 : rows * (8 + 4 * 3)); }

// D channels of q and k, Dv of v and the output; smaller sizes are padded with zeros in shared memory.
template <int D, int Dv, bool General> struct tile_shape {
  static constexpr int d = D, dv = Dv;
  static constexpr bool general = General;
  static constexpr int warps = 4, threads = 32 * warps;
  static constexpr int m_tiles = General || D > 192 ? 1 : 2;  // of 16 rows that a warp has: two share each fragment of k and v
  static constexpr int rows = 16 * m_tiles * warps;
  static constexpr int keys = General ? (D <= 128 ? 64 : D <= 192 ? 32 : 16) : D <= 64 ? 128 : D == 192 ? 48 : 64;
  // Whether the next tile's keys and values travel while this one is multiplied, or each only when its place has become free.
  static constexpr bool ahead = !General && D <= 128;
  static constexpr int stages = ahead ? 2 : 1;
  static constexpr int blocks = General && D <= 64 ? 3 : 2;  // on a multiprocessor

  // Bytes of the parts of shared memory, in this order.
  static constexpr int q_bytes = 2 * rows * D;
  static constexpr int k_bytes = 2 * keys * D, v_bytes = 2 * keys * Dv;  // of one stage
  static constexpr int row_bytes = row_table_bytes(rows, ahead);
  static constexpr int lane_bytes = threads * m_tiles * 8;               // of each lane, what it adds to l of its rows
  static constexpr int facts_bytes = 256;
  static constexpr int addend_bytes = General ? 4 * rows * keys : 0;
  static constexpr int key_bytes = General ? 2 * keys * (4 * 8 + 4 * 4) : 0;  // two tiles: four offsets; factor and addend of k, factor of v, -
  static constexpr int shared_bytes = q_bytes + stages * (k_bytes + v_bytes) + row_bytes + lane_bytes + facts_bytes + addend_bytes + key_bytes;
};

static_assert(tile_shape<128, 128, false>::shared_bytes <= 99 * 1024, "what sm_86 and sm_89 have");

}  // namespace cqsa::gpu::sm80
