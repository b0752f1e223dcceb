// SPDX-License-Identifier: Apache-2.0
// Shared memory of a block of the Hopper attention, and the barriers by which its warpgroups hand tiles to each other.
#pragma once

#include "attention_shape.h"
#include "backends/cuda/attention_parts.cuh"
#include "backends/gpu/attention_block.cuh"
#include "copy.cuh"

namespace cqsa::gpu::sm90 {

// A tile of queries: what the loader found out about it.
struct unit_facts {
  block_facts f;
  int32_t state;  // unit_state
};

// The next tile of queries, from the warp that walks over lengths.
struct found_place {
  unit_place at;
  uint32_t found;
};

// Tile number n of k and of v, counted over all tiles of queries of the block, is in slot n % (its number of slots), and its barriers
// are in phase n / slots there. So are the facts of a tile of queries; q has one slot for each warpgroup.
template <class S> struct block_barriers {
  block_barrier full_facts[2], empty_facts[2];
  block_barrier full_place;  // the loader has read the one before when it tells of the tile that it was
  block_barrier full_q[S::groups], empty_q[S::groups];
  block_barrier full_k[S::stages], empty_k[S::stages];
  block_barrier full_v[S::stages], seen_v[S::stages], empty_v[S::stages];  // seen: looked through for NaN and Inf
};

template <class S> struct tile_memory {
  unsigned char* base;
  CQSA_DEVICE unsigned char* q(int group) const { return base + group * S::q_group_bytes; }
  CQSA_DEVICE unsigned char* k(uint32_t n) const { return base + S::q_bytes + n % S::stages * S::k_bytes; }
  CQSA_DEVICE unsigned char* v(uint32_t n) const { return base + S::q_bytes + S::stages * S::k_bytes + n % S::stages * S::v_bytes; }
  CQSA_DEVICE unit_facts& facts(uint32_t unit) const {
    static_assert(sizeof(unit_facts) <= S::facts_bytes / 2, "its place");
    return *reinterpret_cast<unit_facts*>(base + S::tiles_bytes + unit % 2 * (S::facts_bytes / 2));
  }
  // What tile n of k, and of v, is like.
  CQSA_DEVICE key_tile& about_k(uint32_t n) const { return about(n % S::stages); }
  CQSA_DEVICE key_tile& about_v(uint32_t n) const { return about(S::stages + n % S::stages); }
  CQSA_DEVICE block_barriers<S>& barriers() const {
    static_assert(sizeof(block_barriers<S>) <= S::barrier_bytes, "its place");
    return *reinterpret_cast<block_barriers<S>*>(base + S::tiles_bytes + S::facts_bytes + S::info_bytes);
  }
  CQSA_DEVICE found_place& place() const {
    static_assert(sizeof(found_place) <= S::place_bytes, "its place");
    return *reinterpret_cast<found_place*>(base + S::tiles_bytes + S::facts_bytes + S::info_bytes + S::barrier_bytes);
  }

  // Pages of the parts of tile n, of which those of two are there.
  CQSA_DEVICE int32_t* pages(uint32_t n) const {
    return reinterpret_cast<int32_t*>(base + S::tiles_bytes + S::facts_bytes + S::info_bytes + S::barrier_bytes + S::place_bytes) + n % 2 * S::page_parts;
  }

  CQSA_DEVICE key_tile& about(uint32_t slot) const {
    static_assert(sizeof(key_tile) <= 32, "its place");
    return *reinterpret_cast<key_tile*>(base + S::tiles_bytes + S::facts_bytes + slot * 32);
  }
};

template <class S> CQSA_DEVICE tile_memory<S> memory_of_block() {
  extern __shared__ __align__(1024) unsigned char cqsa_hopper_shared[];
  const uint32_t at = shared_address(cqsa_hopper_shared);
  return {cqsa_hopper_shared + ((at + 1023) / 1024 * 1024 - at)};  // the swizzle counts from there
}

// One arrival for each warp that reads.
constexpr int checkers = 3;  // warps of the loading warpgroup that look through values
template <class S> CQSA_DEVICE void begin_barriers(const tile_memory<S>& mem) {
  constexpr int warps = 4 * S::groups;
  block_barriers<S>& b = mem.barriers();
  for (int n = 0; n < 2; ++n) init_barrier(b.full_facts[n], 1), init_barrier(b.empty_facts[n], warps + checkers);
  init_barrier(b.full_place, 1);
  for (int n = 0; n < S::groups; ++n) init_barrier(b.full_q[n], 1), init_barrier(b.empty_q[n], 4);
  for (int n = 0; n < S::stages; ++n) {
    init_barrier(b.full_k[n], 1);
    init_barrier(b.empty_k[n], warps);
    init_barrier(b.full_v[n], 1);
    init_barrier(b.seen_v[n], checkers);
    init_barrier(b.empty_v[n], warps + checkers);
  }
  publish_barriers();
}

// Page number `page` of a batch item, or -1: the table is the user's, and ids outside of the pool hide their keys.
CQSA_DEVICE int32_t page_at(const attention_params& p, int64_t batch, uint32_t page) {
  const int32_t id = reinterpret_cast<const int32_t*>(p.page_table)[batch * p.page_table_stride[0] + page * p.page_table_stride[1]];
  return id < p.num_pages ? id : -1;
}

template <class S> CQSA_DEVICE uint32_t slot_of(uint32_t n) { return n % S::stages; }
template <class S> CQSA_DEVICE uint32_t parity_of(uint32_t n) { return n / S::stages & 1; }
CQSA_DEVICE uint32_t lane_now() { return uint32_t(thread_index()) % 32; }
// Everything of this warp in front of it is done.
CQSA_DEVICE void warp_arrives(block_barrier& b) {
  lanes_barrier<32>();
  if (lane_now() == 0) arrive(b);
}

}  // namespace cqsa::gpu::sm90
