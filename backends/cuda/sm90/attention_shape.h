// SPDX-License-Identifier: Apache-2.0
// The Hopper attention kernels: one row of this table each, for host and device. docs/kernels/hopper-attention.md has the reasons.
#pragma once

#include "attention_walk.h"
#include "backends/gpu/attention_params.h"
#include "tensor_map.h"

namespace cqsa::gpu::sm90 {

// For which lengths a kernel is, where sizes have more than one.
enum class form { usual, lengthy };

// D channels of q and k, Dv of v and the output; smaller sizes are padded with zeros by the copy engine.
//   groups        warpgroups of 64 query rows that compute
//   keys, stages  of a tile, and how many tiles of k and of v are in shared memory
//   registers of a thread of those, and of the warpgroup that loads: together what the launch reserves, a multiple of 8 for each thread
template <int D, int Dv, form Form = form::usual> struct tile_config;
template <> struct tile_config<64, 64> { static constexpr int groups = 3, keys = 128, stages = 2, registers = 160, loader_registers = 32; };
template <> struct tile_config<96, 96> { static constexpr int groups = 2, keys = 128, stages = 2, registers = 232, loader_registers = 40; };
template <> struct tile_config<128, 128> { static constexpr int groups = 2, keys = 128, stages = 2, registers = 232, loader_registers = 40; };
template <> struct tile_config<128, 128, form::lengthy> { static constexpr int groups = 2, keys = 176, stages = 2, registers = 232, loader_registers = 40; };
template <> struct tile_config<192, 128> { static constexpr int groups = 2, keys = 112, stages = 2, registers = 232, loader_registers = 40; };
template <> struct tile_config<256, 256> { static constexpr int groups = 2, keys = 80, stages = 2, registers = 232, loader_registers = 40; };

// What the loader tells of a tile of keys. Row with query n sees its keys lo + n <= j < min(hi + n, keys).
struct key_tile {
  int32_t keys, lo, hi;
  int32_t flags;    // tile_*, and from gone_from on a bit for each 16 keys on a missing page
  int64_t row;      // of k and v, of the first key
};
enum tile_flag : int32_t {
  tile_last = 1,    // of this tile of queries
  tile_ragged = 2,  // hides a key from some query
  tile_wild = 4,    // .. and v has NaN or Inf in it, which has been made 0 in shared memory
  tile_early = 8,   // of the first range of keys: no tile in front of it has later ones
  tile_late = 16    // of the last range: no tile behind it has earlier ones
};
constexpr int gone_from = 16, gone_keys = 16;

// Of a tile of queries: whether there is one, and whether its queries see keys.
enum class unit_state : int32_t { done, empty, busy };

template <int D, int Dv, form Form = form::usual> struct tile_shape {
  using config = tile_config<D, Dv, Form>;
  static constexpr int d = D, dv = Dv;
  static constexpr int groups = config::groups, keys = config::keys, stages = config::stages;
  static constexpr int registers = config::registers, loader_registers = config::loader_registers;
  static constexpr int rows = 64 * groups;
  static constexpr int threads = 128 * (groups + 1);  // the loading warpgroup is the first one
  static constexpr int reserved = 65536 / threads / 8 * 8;
  static_assert(registers * groups + loader_registers <= reserved * (groups + 1), "more would be waited for for ever");

  // Panels of 64 channels.
  static constexpr int panels = (D + 63) / 64, v_panels = (Dv + 63) / 64;
  static constexpr int q_panel = 128 * 64, k_panel = 128 * keys;  // of q: of a warpgroup's rows
  static constexpr int q_group_bytes = panels * q_panel, q_bytes = groups * q_group_bytes, k_bytes = panels * k_panel, v_bytes = v_panels * k_panel;
  // Bytes of the parts of shared memory, in this order, from a multiple of 1024 on.
  static constexpr int tiles_bytes = q_bytes + stages * (k_bytes + v_bytes);
  static constexpr int facts_bytes = 2 * 320, info_bytes = 2 * stages * 32, barrier_bytes = 8 * (5 + 2 * groups + 5 * stages), place_bytes = 16;
  static constexpr int page_parts = keys / gone_keys, pages_bytes = 2 * 4 * page_parts;
  static_assert(keys % gone_keys == 0 && page_parts <= 32 - gone_from, "a bit each");
  static_assert((stages & (stages - 1)) == 0, "slots are found by masks");
  static constexpr int shared_bytes = tiles_bytes + facts_bytes + info_bytes + barrier_bytes + place_bytes + pages_bytes + 1024;
  static_assert(shared_bytes <= 232448, "of a block on Hopper");
};

// The parameters of a kernel.
struct params {
  tensor_map q, k, v;
  attention_params a;
  // Coordinates of a row of q, k, v: batch item and head, or 0 where all share one.
  int32_t q_item, q_head, k_item, k_head, v_item, v_head;
  int32_t q_box_bytes;    // of a panel of a warpgroup's rows
  int32_t group_queries;  // queries of a warpgroup
  int32_t page_part;      // keys of a tile that are on the same page, a multiple of gone_keys; 0: keys are not on pages
  unit_order order;
};

}  // namespace cqsa::gpu::sm90
