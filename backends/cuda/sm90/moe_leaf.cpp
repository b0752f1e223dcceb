// SPDX-License-Identifier: Apache-2.0
// Host part of the mixture of experts on Hopper. Where experts have few tokens, and where a token's bits must not go by the others, the kernels of sm_80.
#include "backends/cuda/sm80/moe_products.h"
#include "backends/cuda/sm80/moe_shape.h"
#include "backends/cuda/tuned.h"
#include "moe_shape.h"

#include <cstdio>

namespace cqsa::gpu {
namespace {

using sm90::moe_shape;

constexpr double rows_for_wgmma = 24;  // tokens of an expert, on average, from which on its tiles are the better ones

// Tokens of a tile for so many of an expert: what tiles of them take, and for each of them what is done once.
int32_t tokens_of_tile(double mean) {
  int32_t best = 0;
  double least = 0;
  for (const int32_t n : {64, 96, 128}) {
    const double tiles = double(int64_t(1.1 * mean / n) + 1), time = tiles * (n + 32);
    if (best == 0 || time < least) best = n, least = time;
  }
  return best;
}

struct sm90_plan {
  moe_plan plan;
  bool wgmma;
};
sm90_plan plan_of(const cqsa_moe_leaf& a) {
  sm90_plan out{moe_plan_of(a, sm80::moe_shape::tokens), false};
  out.plan.order = moe_order_of({&a.gate, &a.up, &a.shared_gate, &a.shared_up});
  out.plan.few_of_q2 = takes_few_of_q2(a, out.plan);
  const double mean = double(out.plan.tokens * a.topk) / double(a.num_experts);
  if (out.plan.way != moe_way::tuned || (a.flags & CQSA_MOE_BATCH_INVARIANT) || mean < rows_for_wgmma) return out;
  const bool all_q2 = out.plan.order && moe_order_of({&a.down, &a.shared_down});
  out.plan.most = tokens_of_tile(mean), out.wgmma = true;
  if (!all_q2 && out.plan.most == 96) out.plan.most = 128;
  return out;
}

cqsa_status probe(void*, const cqsa_moe_leaf* leaf, char* reason, uint64_t size) {
  const char* text = leaf->chip.tier != 90 ? "the device is not of sm_90" : why_no_halves(*leaf);
  if (text && reason && size) std::snprintf(reason, size, "%s", text);
  return text ? CQSA_ERROR_UNSUPPORTED : CQSA_OK;
}
uint64_t workspace(const cqsa_moe_leaf* leaf, int64_t) {
  moe_memory unused{};
  return moe_carve(*leaf, plan_of(*leaf).plan, nullptr, &unused);
}

kernel_id kernel_of(int32_t order, int32_t most) {
  if (order) return most == 64 ? kernel_id::cqsa_sm90_moe_q2_0_n64 : most == 96 ? kernel_id::cqsa_sm90_moe_q2_0_n96 : kernel_id::cqsa_sm90_moe_q2_0_n128;
  return most == 64 ? kernel_id::cqsa_sm90_moe_any_n64 : kernel_id::cqsa_sm90_moe_any_n128;
}

cqsa_status multiply(const moe_call& c, const moe_layer& l, bool gate_up, int32_t order) {
  moe_multiply_params p = moe_multiply_of(c, l, gate_up);
  p.row_blocks = divide_up(p.outputs, gate_up && l.gate->num_experts ? moe_shape::rows / 2 : moe_shape::rows);
  const int64_t units = moe_most_tiles(c, l, c.plan.most) * p.row_blocks, blocks = smaller(units, larger(facts_of(c.device).compute_units, 1));
  const kernel_id kernel = kernel_of(order, c.plan.most);
  return launch(c.device, kernel, {{uint32_t(blocks), 1, 1}, moe_shape::threads, moe_shape::shared_bytes}, &p, sizeof p, c.stream);
}
cqsa_status products(const moe_call& c, const moe_layer& l) {
  const int32_t order = moe_order_of({l.down});
  cqsa_status status = multiply(c, l, true, c.plan.order);
  if (status == CQSA_OK) status = moe_halves_of_h(c, l, order);
  return status == CQSA_OK ? multiply(c, l, false, order) : status;
}

cqsa_status launch_leaf(void* device, const cqsa_moe_leaf* leaf, void* memory, uint64_t bytes, const cqsa_exec*, void* stream) {
  const sm90_plan p = plan_of(*leaf);
  const moe_products how = p.plan.way != moe_way::tuned ? moe_portable_products : p.wgmma ? products : sm80_moe_products;
  return moe_run(device, *leaf, p.plan, memory, bytes, stream, how);
}

}  // namespace

extern const cqsa_moe_impl sm90_moe = {"cuda_sm90", "sm_90; weights of blocks become f16", probe, workspace, launch_leaf};

}  // namespace cqsa::gpu
