// SPDX-License-Identifier: Apache-2.0
// The sums of a tile of the Hopper FP8 product. docs/kernels/NOTES-fp8-gemm.md has the reasons.
#pragma once

#include "fp8_gemm_memory.cuh"
#include "wgmma_fp8.cuh"

namespace cqsa::gpu::sm90 {

template <class S> using wave_sums = float[S::columns / 2];
template <class S> struct tile_sums {
  float x[S::waves][S::columns / 2];
};

// Products of one wave and one stage: 128 of k.
template <class S, int KindA, int KindB> CQSA_DEVICE void multiply(float (&c)[S::columns / 2], const matrix_place& a, const matrix_place& b, int add) {
#pragma unroll
  for (int i = 0; i < 4; ++i) wgmma_fp8<S::columns, KindA, KindB>::shared(c, a.at(32 * i), b.at(32 * i), add || i > 0);
}
template <class S> CQSA_DEVICE matrix_place place_of_a(const gemm_memory<S>& mem, uint32_t slot, int group, int wave) {
  return matrix_place(shared_address(mem.a(slot)) + (group * S::waves + wave) * 64 * S::depth, 16);
}
template <class S> CQSA_DEVICE matrix_place place_of_b(const gemm_memory<S>& mem, uint32_t slot) { return matrix_place(shared_address(mem.b(slot)), 16); }

// ---------------------------------------------------------------------------------------------------------- without promotion

template <class S, int KindA, int KindB>
CQSA_DEVICE void run_fast(const gemm_launch& p, const gemm_memory<S>& mem, int group, step& s, tile_sums<S>& total) {
  const int32_t steps = steps_of(p);
  uint32_t before = 0;
#pragma unroll 1
  for (int32_t n = 0; n < steps; ++n, advance<S>(s)) {
    wait_phase(mem.full(s.slot), s.parity);
    wgmma_fence();
#pragma unroll
    for (int w = 0; w < S::waves; ++w) multiply<S, KindA, KindB>(total.x[w], place_of_a<S>(mem, s.slot, group, w), place_of_b<S>(mem, s.slot), n > 0);
    wgmma_commit();
    wgmma_wait<1>();
    if (n > 0) release<S>(mem, before);
    before = s.slot;
  }
  wgmma_wait<0>();
#pragma unroll
  for (int w = 0; w < S::waves; ++w) after_wait(total.x[w]);
  release<S>(mem, before);
}

// ------------------------------------------------------------------------------------------------------------- with promotion

// Scales of this thread's rows, two for each wave, and of the 128 columns, for one step.
template <class S> struct step_scales {
  float row[S::waves][2], column;
};
// Where they are for step 0.
template <class S> struct scale_walk {
  const float* row[S::waves][2];
  const float* column;
};
template <class S> CQSA_DEVICE void begin_scales(const gemm_launch& p, const tile_place& at, int group, scale_walk<S>& walk) {
  const int lane = thread_index() % 32, warp = thread_index() / 32 % 4;
#pragma unroll
  for (int w = 0; w < S::waves; ++w)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      walk.row[w][i] = scale_row(p.g.scale_a, at.batch, min_i64(at.row + (group * S::waves + w) * 64 + 16 * warp + lane / 4 + 8 * i, p.g.m - 1));
  walk.column = scale_row(p.g.scale_b, at.batch, min_i64(at.column, p.g.n - 1));
}
template <class S, gemm_form Form> CQSA_DEVICE void load_scales(const gemm_launch& p, const scale_walk<S>& walk, int64_t n, step_scales<S>& out) {
#pragma unroll
  for (int w = 0; w < S::waves; ++w)
#pragma unroll
    for (int i = 0; i < 2; ++i) out.row[w][i] = p.g.scale_a.data ? walk.row[w][i][n * p.g.scale_a.stride[2]] : 1.0f;
  if (Form == gemm_form::blocks) out.column = p.g.scale_b.data ? walk.column[n * p.g.scale_b.stride[2]] : 1.0f;
}

template <class S, gemm_form Form>
CQSA_DEVICE void add_up(const float (&c)[S::columns / 2], const step_scales<S>& scales, const float* columns, int w, float (&total)[S::columns / 2]) {
  const int l = thread_index() % 4;
  const float low = Form == gemm_form::blocks ? scales.row[w][0] * scales.column : scales.row[w][0];
  const float high = Form == gemm_form::blocks ? scales.row[w][1] * scales.column : scales.row[w][1];
#pragma unroll
  for (int n = 0; n < S::columns / 8; ++n) {
    float2x of_columns{{1.0f, 1.0f}};
    if (Form == gemm_form::columns) of_columns = *reinterpret_cast<const float2x*>(columns + 8 * n + 2 * l);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (Form == gemm_form::plain) total[4 * n + i] += c[4 * n + i];
      else total[4 * n + i] = fma_f32(c[4 * n + i], Form == gemm_form::columns ? (i < 2 ? low : high) * of_columns.x[i % 2] : i < 2 ? low : high, total[4 * n + i]);
    }
  }
}

template <class S, gemm_form Form, int KindA, int KindB>
CQSA_DEVICE void run_promoted(const gemm_launch& p, const gemm_memory<S>& mem, const tile_place& at, int group, step& s, tile_sums<S>& total) {
  const int32_t steps = steps_of(p);
#pragma unroll
  for (int w = 0; w < S::waves; ++w)
#pragma unroll
    for (int i = 0; i < S::columns / 2; ++i) total.x[w][i] = 0.0f;
  scale_walk<S> walk;
  step_scales<S> now, next;
  if (Form != gemm_form::plain) begin_scales<S>(p, at, group, walk), load_scales<S, Form>(p, walk, 0, next);
#pragma unroll 1
  for (int32_t n = 0; n < steps; ++n, advance<S>(s)) {
    now = next;
    if (Form != gemm_form::plain && n + 1 < steps) load_scales<S, Form>(p, walk, n + 1, next);
    wait_phase(mem.full(s.slot), s.parity);
#pragma unroll
    for (int w = 0; w < S::waves; ++w) {
      float c[S::columns / 2];
      wgmma_fence();
      multiply<S, KindA, KindB>(c, place_of_a<S>(mem, s.slot, group, w), place_of_b<S>(mem, s.slot), 0);
      wgmma_commit();
      wgmma_wait<0>();
      after_wait(c);
      if (Form != gemm_form::columns && w == S::waves - 1) release<S>(mem, s.slot);
      add_up<S, Form>(c, now, mem.scales(s.slot), w, total.x[w]);
      // Asks what it knows, for the branch in it: ptxas would wait for the next products first and add then.
      if (w + 1 < S::waves) wait_phase(mem.full(s.slot), s.parity);
    }
    if (Form == gemm_form::columns) {
      lanes_barrier<32>();  // all lanes have read the scales
      release<S>(mem, s.slot);
    }
  }
}

}  // namespace cqsa::gpu::sm90
