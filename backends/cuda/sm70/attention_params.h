// SPDX-License-Identifier: Apache-2.0
// What the host parts of the sm_70 attention tell its kernels, and the shape of a block. Plain data, passed by value at launch.
#pragma once

#include "backends/gpu/attention_params.h"

namespace cqsa::gpu {

// Dense: the fields of `a` alone. Selected cells: every query is a problem of its own whose keys are what its list names; batch is 1,
// and a row of page_table belongs to a query.
struct sm70_params {
  attention_params a;
  const char *cells, *counts;
  int64_t cells_stride[2], counts_stride;
  int64_t capacity, pages;  // entries of a row of cells, and of page_table
};

// Dim: channels of k and of v, with padding. A warp has 64 of them: of q k^T it adds up its channels, of p v it has its channels of the
// output. Dim / 64 warps are a team, which has 16 * Blocks rows of its own; all teams of a block share its keys.
// Split: q and p are sums of two f16 each.
template <int Dim, int Teams, int Blocks, bool Split> struct sm70_shape {
  static constexpr int dim = Dim, teams = Teams, blocks = Blocks;
  static constexpr int parts = Split ? 2 : 1;
  static constexpr int warps = Dim / 64;                // of a team
  static constexpr int threads = 32 * warps * Teams;
  static constexpr int team_rows = 16 * Blocks;
  static constexpr int rows = team_rows * Teams;
  static constexpr int keys = 32;                       // of a tile
  static constexpr int pieces = keys * Dim / 8 / threads;  // of a tile, 8 channels each, that a thread brings
  static constexpr int groups = Dim / 32;               // scales are kept for 32 channels
  // Bytes of the parts of shared memory, in this order. Before the first tile q lies where k, v and the logits are later.
  static constexpr int tile_bytes = keys * Dim * 2;
  static constexpr int logit_bytes = Teams * warps * team_rows * keys * 4;
  static constexpr int scale_bytes = 3 * groups * keys * 4;
  static constexpr int key_bytes = keys * 4 * 8;
  static constexpr int row_bytes = rows * (8 + 7 * 4);
  static constexpr int facts_bytes = 256 + 16 + 2 * 64;
  static constexpr int shared_bytes = 2 * tile_bytes + logit_bytes + scale_bytes + key_bytes + row_bytes + facts_bytes;
  static_assert(rows * Dim * 2 * parts <= 2 * tile_bytes + logit_bytes, "q has room");
  static_assert(shared_bytes <= 96 * 1024, "what a block of sm_70 may have");
};

// Blocks of dense problems: as many rows as registers allow, since all of them share what a block reads of k and v.
template <int Dim, bool Split> struct sm70_dense : sm70_shape<Dim, Dim == 64 ? 4 : 2, Split ? 1 : 2, Split> {};
// .. and of selected cells, where the rows are the heads of one query.
template <int Dim, bool Split> struct sm70_selected : sm70_shape<Dim, 1, 1, Split> {};

}  // namespace cqsa::gpu
