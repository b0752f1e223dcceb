// SPDX-License-Identifier: Apache-2.0
// Exact attention of one tile of query rows over all its keys with the matrix instructions of sm_80, f16 and bf16, sums in f32.
//
// For each tile of keys a warp multiplies its rows of q with k, turns the logits in its registers into p with a running maximum, and
// multiplies p, rounded to halves, with v. The next keys and values travel meanwhile. docs/kernels/NOTES-attention-sm80.md has the
// reasons and the figures.
//
// A row's sums run over keys in tiles that begin at multiples of the tile from the first key of a range, in an order that neither
// its place in the block nor its neighbours change.
#pragma once

#include "attention_general.cuh"
#include "attention_plain.cuh"
#include "attention_rows.cuh"

namespace cqsa::gpu::sm80 {

// One thread. The number of the range is in shared memory: registers are for the sums.
template <class S> CQSA_DEVICE void start_range(const attention_params& p, const tile_memory<S>& mem) {
  block_facts& f = mem.facts();
  if (f.gone >= uint32_t(f.num_ranges)) return;
  begin_range(p, f, f.gone, S::keys);
  if constexpr (!S::general) plan_range<S>(p, mem);
}
template <class S> CQSA_DEVICE void next_range(const attention_params& p, const tile_memory<S>& mem) {
  ++mem.facts().gone;
  start_range<S>(p, mem);
}

template <class S> CQSA_DEVICE void send_first_of_range(const attention_params& p, const tile_memory<S>& mem) {
  const block_facts& f = mem.facts();
  if constexpr (!S::general) {
    if (f.gone < uint32_t(f.num_ranges) && f.first < f.end) send_first<S>(p, mem);
  }
}

template <class S, int Kind> CQSA_DEVICE void attention_block(const attention_params& p) {
  const tile_memory<S> mem{shared_memory()};
  block_facts& f = mem.facts();
  const int t = thread_now();
  if (t == 0) {
    begin_block(p, f);
    f.bad[0] = 0;
    f.gone = 0;
    start_range<S>(p, mem);
  }
  barrier();
  if (f.rows == 0) return;
  send_first_of_range<S>(p, mem);
  for (int x = t; x < S::rows; x += S::threads) begin_row<S>(p, mem, x);
  barrier();
  const int warp = thread_now() / 32;
  row_sums<S> sums;
  clear_sums<S>(mem, warp, sums);
  if (p.flags & flag_state_in) {
    exchange_state<S, false>(p, mem, warp, sums);
    barrier();  // the state came by way of the room for q
  }
  load_queries<S, Kind>(p, mem);
  cp_async_commit();
  while (f.gone < uint32_t(f.num_ranges)) {  // once at least
    if (f.first < f.end) {
      if constexpr (S::general) run_range_general<S, Kind>(p, mem, sums);
      else run_range_plain<S, Kind>(p, mem, sums);
    }
    cp_async_wait<0>();  // q, where there was no key: its room takes the sums in the end
    barrier();           // this range's facts and tiles are in use
    if (t == 0) next_range<S>(p, mem);
    barrier();
    send_first_of_range<S>(p, mem);
  }
  finish_rows<S>(p, mem, warp, sums);
}

}  // namespace cqsa::gpu::sm80
