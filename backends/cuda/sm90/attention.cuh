// SPDX-License-Identifier: Apache-2.0
// Exact attention with the matrix unit and the copy engine of Hopper, f16 and bf16, sums in f32: one warpgroup loads, two or three
// compute. docs/kernels/hopper-attention.md has a picture of the schedule, the reasons and the figures.
#pragma once

#include "attention_epilogue.cuh"
#include "attention_loader.cuh"
#include "attention_mainloop.cuh"

namespace cqsa::gpu::sm90 {

template <class S, int Kind> CQSA_DEVICE void compute_block(const params& p, const tile_memory<S>& mem) {
  block_barriers<S>& b = mem.barriers();
  const int group = shuffle<32>(thread_index() / 128, 0) - 1;
  begin_turns<S>(group);
  uint32_t queries = 0;
  progress_of_group<S> at;
  at.group = group, at.n = 0;
  for (at.unit = 0;; ++at.unit) {
    wait_phase(b.full_facts[at.unit % 2], at.unit / 2 % 2);
    const unit_facts& facts = mem.facts(at.unit);
    if (facts.state == int32_t(unit_state::done)) return;
    float o[S::dv / 2];
    begin_rows<S>(p, facts.f, at.rows, o);
    if (facts.state == int32_t(unit_state::busy)) {
      wait_phase(b.full_q[group], queries++ % 2);
      run_keys<S, Kind>(p, mem, at, o);
    }
    end_rows<S>(p, facts.f, at.rows, o);
    warp_arrives(b.empty_facts[at.unit % 2]);
  }
}

template <class S, int Kind> CQSA_DEVICE void attention_block(const params& p) {
  const tile_memory<S> mem = memory_of_block<S>();
  if (thread_index() == 0) {
    prefetch_map(p.q), prefetch_map(p.k), prefetch_map(p.v);
    begin_barriers<S>(mem);
  }
  barrier();
  if (thread_index() < 128) {
    give_registers<S::loader_registers>();
    const int warp = shuffle<32>(thread_index() / 32, 0);
    if (warp == 0) {
      if (lane_now() == 0) load_block<S>(p, mem);
    } else {
      check_block<S, Kind>(p, mem, warp - 1);
    }
  } else {
    take_registers<S::registers>();
    compute_block<S, Kind>(p, mem);
  }
}

}  // namespace cqsa::gpu::sm90

// CQSA_SM90_ATTENTION(f16 | bf16, head_dim, head_dim_v, usual | lengthy): one kernel. Tensor maps are read where the parameters
// are.
#define CQSA_SM90_ATTENTION(kind, d, dv, length)                                                                               \
  extern "C" __global__ void __launch_bounds__((cqsa::gpu::sm90::tile_shape<d, dv, cqsa::gpu::sm90::form::length>::threads), 1) \
      cqsa_sm90_attention_##kind##_d##d##_##length(const __grid_constant__ cqsa::gpu::sm90::params p) {                        \
    using namespace cqsa::gpu;                                                                                                 \
    sm90::attention_block<sm90::tile_shape<d, dv, sm90::form::length>, kind_##kind>(p);                                        \
  }
