// SPDX-License-Identifier: Apache-2.0
// Tiles of the sm_80 attention and how a block's shared memory is divided, for host and device.
//
// Plain kernels take what most calls are: 16-bit operands in rows of aligned 16 bytes, causal or windowed or not, any form of call.
// General ones take the rest (8-bit keys and values, pages, bias, masks, ALiBi, softcap, odd strides) with 16 rows a warp, which
// leaves them the registers for it.
#pragma once

#include <cstdint>

namespace cqsa::gpu::sm80 {

// D channels of q and k, Dv of v and the output; smaller sizes are padded with zeros in shared memory.
#ifndef V_QREG
#define V_QREG 0
#endif
#ifndef V_W256
#define V_W256 4
#endif
#ifndef V_B256
#define V_B256 2
#endif
#ifndef V_K256
#define V_K256 64
#endif
#ifndef V_K128
#define V_K128 64
#endif
#ifndef V_K64
#define V_K64 128
#endif
#ifndef V_W64
#define V_W64 4
#endif
#ifndef V_B64
#define V_B64 2
#endif
#ifndef V_AHEAD
#define V_AHEAD 128
#endif
template <int D, int Dv, bool General> struct tile_shape {
  static constexpr int d = D, dv = Dv;
  static constexpr bool general = General;
  static constexpr int warps = General ? 4 : D > 192 ? V_W256 : D == 64 ? V_W64 : 4;
  static constexpr int threads = 32 * warps;
  static constexpr int m_tiles = General || warps == 8 || D > 192 ? 1 : 2;  // of 16 rows that a warp has: two share each fragment of k and v
  static constexpr int rows = 16 * m_tiles * warps;
  static constexpr int keys = General && D > 128 ? 32 : !General && D == 64 ? V_K64 : !General && D == 128 ? V_K128 : !General && D == 256 ? V_K256 : 64;
  // Whether the next tile's keys and values travel while this one is multiplied, or each only when its place has become free.
  static constexpr bool ahead = !General && D <= V_AHEAD;
  static constexpr int stages = ahead ? 2 : 1;
  static constexpr bool q_in_registers = !General && D <= 64 && V_QREG;
  static constexpr int blocks = General ? (D <= 64 ? 3 : 2) : D > 192 ? V_B256 : D == 64 ? V_B64 : 2;  // on a multiprocessor

  // Bytes of the parts of shared memory, in this order.
  static constexpr int q_bytes = 2 * rows * D;
  static constexpr int k_bytes = 2 * keys * D, v_bytes = 2 * keys * Dv;  // of one stage
  static constexpr int row_bytes = rows * (8 + 4 * 5);                   // offset of q; query, head, slope, m, l
  static constexpr int lane_bytes = threads * m_tiles * 8;               // of each lane, what it adds to l of its rows
  static constexpr int facts_bytes = 256;
  static constexpr int addend_bytes = General ? 4 * rows * keys : 0;
  static constexpr int key_bytes = General ? 2 * keys * (4 * 8 + 4 * 4) : 0;  // two tiles: four offsets; factor and addend of k, factor of v, -
  static constexpr int shared_bytes = q_bytes + stages * (k_bytes + v_bytes) + row_bytes + lane_bytes + facts_bytes + addend_bytes + key_bytes;
};

}  // namespace cqsa::gpu::sm80
