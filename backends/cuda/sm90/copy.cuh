// SPDX-License-Identifier: Apache-2.0
// Hopper's copy engine (TMA) and the barriers in shared memory on which it reports. PTX ISA, "cp.async.bulk.tensor" and "mbarrier".
#pragma once

#include "tensor_map.h"
#include "backends/cuda/sm80/mma.cuh"

namespace cqsa::gpu::sm90 {

// A phase ends when all that are expected have arrived and all announced bytes have come. Phases are told apart by their parity: 0 for
// the first, then 1, 0, ..
struct block_barrier {
  uint64_t word;
};

CQSA_DEVICE void init_barrier(block_barrier& b, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&b)), "r"(arrivals) : "memory");
}
// Makes the barriers known to the copy engine; then the block meets.
CQSA_DEVICE void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
CQSA_DEVICE void arrive(block_barrier& b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&b)) : "memory");
}
// .. and announces bytes that the copy engine will bring.
CQSA_DEVICE void arrive_and_expect(block_barrier& b, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&b)), "r"(bytes) : "memory");
}
// Until the phase of this parity has ended.
CQSA_DEVICE void wait_phase(block_barrier& b, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra over;\nbra again;\nover:\n}\n" ::"r"(
          shared_address(&b)),
      "r"(parity)
      : "memory");
}

// What ordinary stores put into shared memory, for instructions of the copy engine and the matrix unit that follow.
CQSA_DEVICE void publish_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

CQSA_DEVICE void prefetch_map(const tensor_map& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }
// A box from global memory to shared memory, coordinates innermost first. Elements outside of the tensor become 0.
CQSA_DEVICE void copy_box(void* shared, const tensor_map& map, block_barrier& b, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
                   shared_address(shared)),
               "l"(&map), "r"(shared_address(&b)), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

// A barrier of `threads` threads, some of which only arrive. Numbers 1 to 15.
CQSA_DEVICE void meet(int number, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory"); }
CQSA_DEVICE void pass(int number, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory"); }

CQSA_DEVICE uint32_t sum_of_warp(uint32_t x) { return __reduce_add_sync(0xffffffffu, x); }
CQSA_DEVICE uint32_t largest_of_warp(uint32_t x) { return __reduce_max_sync(0xffffffffu, x); }

// The registers of each thread of this warpgroup from here on, a multiple of 8.
template <int Count> CQSA_DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count)); }
template <int Count> CQSA_DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count)); }

}  // namespace cqsa::gpu::sm90
