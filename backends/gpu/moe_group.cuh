// SPDX-License-Identifier: Apache-2.0
// Slots by their experts, in order, without memory of its own: every block looks at all slots and places those of its experts. Nothing depends on which
// block is first, but who writes the list of tiles: the last one.
#pragma once

#include "moe_small.cuh"

namespace cqsa::gpu {

CQSA_DEVICE int32_t grouped_expert(const moe_group_params& p, int64_t slot) {
  return p.experts ? p.experts[slot] : expert_at(p.ids, slot / p.ids.topk, slot % p.ids.topk);
}

CQSA_DEVICE int count_bits(uint64_t x) {
  x -= x >> 1 & 0x5555555555555555u;
  x = (x & 0x3333333333333333u) + (x >> 2 & 0x3333333333333333u);
  return int(((x + (x >> 4)) & 0x0f0f0f0f0f0f0f0fu) * 0x0101010101010101u >> 56);
}
CQSA_DEVICE int lowest_bit(uint64_t x) { return count_bits((x & (0 - x)) - 1); }

// Counts of this block: [team][expert of the block], then the number of slots of lower experts, by team.
struct group_memory {
  uint32_t* count;
  uint32_t* below;
};

// Slots first .. end - 1 of a team of lanes.
template <int Lanes, class F> CQSA_DEVICE void each_slot(const moe_group_params& p, const F& f) {
  const int64_t teams = block_threads() / Lanes, each = (p.slots + teams * Lanes - 1) / (teams * Lanes) * Lanes, first = thread_index() / Lanes * each;
  const int64_t end = min_i64(first + each, p.slots);
#pragma unroll 4
  for (int64_t i = first; i < end; i += Lanes) {
    const int64_t slot = i + thread_index() % Lanes;
    f(slot, slot < end ? grouped_expert(p, slot) : int32_t(moe::not_here));
  }
}

template <int Lanes> CQSA_DEVICE void count_slots(const moe_group_params& p, int64_t low, const group_memory& mem) {
  uint32_t below = 0;
  uint32_t* const mine = mem.count + thread_index() / Lanes * p.each;
  each_slot<Lanes>(p, [&](int64_t, int32_t e) {
    below += e >= 0 && e < low;
    if (e >= low && e < low + p.each) atomic_add(mine + (e - low), 1u);
  });
#pragma unroll
  for (int mask = Lanes / 2; mask > 0; mask /= 2) below += shuffle_xor<Lanes>(below, mask);
  if (thread_index() % Lanes == 0) mem.below[thread_index() / Lanes] = below;
}

// Counts become first places. Returns the first place of the block and, of the last block, where the last slot ends.
CQSA_DEVICE void place_experts(const moe_group_params& p, int64_t low, int teams, const group_memory& mem) {
  if (thread_index() != 0) return;
  uint32_t place = 0;
  for (int i = 0; i < teams; ++i) place += mem.below[i];
  for (int64_t r = 0; r < p.each && low + r < p.num_experts; ++r) {
    const uint32_t begin = place;
    for (int i = 0; i < teams; ++i) {
      const uint32_t n = mem.count[i * p.each + r];
      mem.count[i * p.each + r] = place;
      place += n;
    }
    store_index(p.offsets, p.bytes, (low + r) * p.offsets_stride, begin);
    if (p.counts) store_index(p.counts, p.bytes, (low + r) * p.counts_stride, place - begin);
  }
  if (low + p.each >= p.num_experts) store_index(p.offsets, p.bytes, p.num_experts * p.offsets_stride, place);
  mem.below[0] = place;
}

template <int Lanes> CQSA_DEVICE void place_slots(const moe_group_params& p, int64_t low, const group_memory& mem) {
  uint32_t* const next = mem.count + thread_index() / Lanes * p.each;
  const int lane = thread_index() % Lanes;
  each_slot<Lanes>(p, [&](int64_t slot, int32_t e) {
    const bool mine = e >= low && e < low + p.each;
    uint64_t left = ballot<Lanes>(mine);
    while (left) {
      const int32_t leader = shuffle<Lanes>(e, lowest_bit(left));
      const uint64_t same = ballot<Lanes>(e == leader);
      if (e == leader) {
        const int64_t place = int64_t(next[e - low]) + count_bits(same & ((uint64_t{1} << lane) - 1));
        store_index(p.order, p.bytes, place * p.order_stride, slot);
        if (p.places) store_index(p.places, p.bytes, slot / p.ids.topk * p.places_stride[0] + slot % p.ids.topk * p.places_stride[1], place);
      }
      lanes_barrier<Lanes>();
      if (lane == lowest_bit(same)) next[leader - low] += uint32_t(count_bits(same));
      lanes_barrier<Lanes>();
      left &= ~same;
    }
  });
}

// What only the block of the last experts does, where the caller wants it.
template <int Lanes> CQSA_DEVICE void finish_order(const moe_group_params& p, const group_memory& mem) {
  const int64_t end = mem.below[0];
  for (int64_t i = end + thread_index(); p.fill && i < p.slots; i += block_threads()) store_index(p.order, p.bytes, i * p.order_stride, -1);
  if (!p.places && !p.ids.counters) return;
  for (int64_t slot = thread_index(); slot < p.slots; slot += block_threads()) {
    const int32_t e = grouped_expert(p, slot);
    if (e == moe::out_of_range) count_skipped(p.ids, 0);
    if (e < 0 && p.places) store_index(p.places, p.bytes, slot / p.ids.topk * p.places_stride[0] + slot % p.ids.topk * p.places_stride[1], -1);
  }
}

// ---- tiles --------------------------------------------------------------------------------------------------------------------

CQSA_DEVICE int64_t offset_at(const moe_group_params& p, int64_t e) { return load_u32(p.offsets + p.bytes * e * p.offsets_stride); }

// Experts of a thread are neighbours, so tiles come in the order of places. Shared memory: a word for each thread.
CQSA_DEVICE void list_tiles(const moe_group_params& p, uint32_t* memory) {
  const int64_t each = (p.num_experts + block_threads() - 1) / block_threads(), begin = min_i64(thread_index() * each, p.num_experts);
  const int64_t end = min_i64(begin + each, p.num_experts);
  uint32_t count = 0, at = 0;
  for (int64_t e = begin; e < end; ++e) count += uint32_t((offset_at(p, e + 1) - offset_at(p, e) + p.most - 1) / p.most);
  barrier();
  memory[thread_index()] = count;
  barrier();
  for (int i = 0; i < thread_index(); ++i) at += memory[i];
  for (int64_t e = begin; e < end; ++e) {
    const int64_t first = offset_at(p, e), last = offset_at(p, e + 1);
    for (int64_t i = first; i < last; i += p.most) p.tiles[at++] = {int32_t(e), int32_t(i), int32_t(min_i64(p.most, last - i)), 0};
  }
  if (thread_index() == block_threads() - 1) *p.num_tiles = at;
}

CQSA_DEVICE bool is_last_block(const moe_group_params& p, uint32_t* memory) {
  device_fence();
  barrier();
  if (thread_index() == 0) memory[0] = atomic_add(p.ticket, 1u);
  barrier();
  const bool last = memory[0] + 1 == uint32_t(grid_size_x());
  device_fence();
  return last;
}

template <int Lanes> CQSA_DEVICE void group_block(const moe_group_params& p) {
  const int teams = block_threads() / Lanes;
  uint32_t* const words = reinterpret_cast<uint32_t*>(shared_memory());
  const group_memory mem{words, words + teams * p.each};
  const int64_t low = block_index_x() * p.each;
  for (int64_t i = thread_index(); i < teams * p.each; i += block_threads()) mem.count[i] = 0;
  barrier();
  count_slots<Lanes>(p, low, mem);
  barrier();
  place_experts(p, low, teams, mem);
  barrier();
  place_slots<Lanes>(p, low, mem);
  if (low + p.each >= p.num_experts) finish_order<Lanes>(p, mem);
  if (p.tiles && is_last_block(p, mem.below + teams)) list_tiles(p, words);
}

}  // namespace cqsa::gpu
