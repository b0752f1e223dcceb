// SPDX-License-Identifier: Apache-2.0
// Blocks of a cluster: their numbers, barriers in each other's shared memory, and copies that go to several of them. PTX ISA, "barrier.cluster",
// "mapa" and "cp.async.bulk.tensor".
#pragma once

#include "copy.cuh"

namespace cqsa::gpu::sm90 {

CQSA_DEVICE uint32_t rank_in_cluster() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of the cluster that have not ended.
CQSA_DEVICE void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Arrives at the barrier that stands at this place in the shared memory of block `rank`. Says nothing of what this thread has written: a release
// for the cluster would be a fence of the whole device.
CQSA_DEVICE void arrive_at(block_barrier& b, uint32_t rank) {
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [there];\n}\n" ::"r"(shared_address(&b)),
               "r"(rank)
               : "memory");
}

// copy_box() to the same place in every block of the mask, each of which is told by its own barrier there.
CQSA_DEVICE void copy_box_to(uint32_t blocks, void* shared, const tensor_map& map, block_barrier& b, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(
          shared_address(shared)),
      "l"(&map), "r"(shared_address(&b)), "r"(x), "r"(y), "r"(z), "r"(w), "h"(uint16_t(blocks))
      : "memory");
}

}  // namespace cqsa::gpu::sm90
