// SPDX-License-Identifier: Apache-2.0
// Host part of the mixture of experts by mma.m16n8k16.
#include "backends/cuda/tuned.h"
#include "backends/gpu/moe_fill.h"
#include "moe_products.h"
#include "moe_shape.h"

#include <cstdio>

namespace cqsa::gpu {
namespace {

using sm80::moe_shape;

moe_plan plan_of(const cqsa_moe_leaf& a) {
  moe_plan plan = moe_plan_of(a, moe_shape::tokens);
  plan.order = moe_order_of({&a.gate, &a.up, &a.shared_gate, &a.shared_up}), plan.few_of_q2 = takes_few_of_q2(a, plan);
  return plan;
}

cqsa_status probe(void*, const cqsa_moe_leaf* leaf, char* reason, uint64_t size) {
  const char* text = leaf->chip.tier < 80 ? "the device has no code for matrix instructions of sm_80 or newer" : why_no_halves(*leaf);
  if (text && reason && size) std::snprintf(reason, size, "%s", text);
  return text ? CQSA_ERROR_UNSUPPORTED : CQSA_OK;
}
uint64_t workspace(const cqsa_moe_leaf* leaf, int64_t) {
  moe_memory unused{};
  return moe_carve(*leaf, plan_of(*leaf), nullptr, &unused);
}
cqsa_status launch_leaf(void* device, const cqsa_moe_leaf* leaf, void* memory, uint64_t bytes, const cqsa_exec*, void* stream) {
  const moe_plan plan = plan_of(*leaf);
  return moe_run(device, *leaf, plan, memory, bytes, stream, plan.way == moe_way::tuned ? sm80_moe_products : moe_portable_products);
}

cqsa_status multiply(const moe_call& c, const moe_layer& l, bool gate_up, int32_t order) {
  moe_multiply_params p = moe_multiply_of(c, l, gate_up);
  const int64_t rows = gate_up && l.gate->num_experts ? moe_shape::rows / 2 : moe_shape::rows;
  p.row_blocks = divide_up(p.outputs, rows);
  const int64_t units = moe_most_tiles(c, l, c.plan.most) * p.row_blocks, blocks = smaller(units, larger(facts_of(c.device).compute_units, 1) * 3);
  const kernel_id kernel = order ? kernel_id::cqsa_sm80_moe_q2_0 : kernel_id::cqsa_sm80_moe_any;
  return launch(c.device, kernel, {{uint32_t(blocks), 1, 1}, moe_shape::threads, moe_shape::shared_bytes}, &p, sizeof p, c.stream);
}

}  // namespace

const char* why_no_halves(const cqsa_moe_leaf& a) {
  if (moe_has_plain(a)) return "weights of F32, F16 or BF16";
  if (larger(a.hidden, larger(a.inter, a.shared_inter)) > (1 << 20)) return "rows of more than 2^20 elements";  // units are counted in 32 bits
  return why_no_moe(a);
}

int32_t moe_order_of(std::initializer_list<const cqsa_moe_set*> sets) {
  for (const cqsa_moe_set* s : sets)
    if (s->num_experts && s->format != CQSA_QUANT_Q2_0) return 0;
  return 1;
}

bool takes_few_of_q2(const cqsa_moe_leaf& a, const moe_plan& plan) {
  return plan.way == moe_way::slots && a.precision == CQSA_MOE_PRECISION_Q8 &&
         moe_order_of({&a.gate, &a.up, &a.down, &a.shared_gate, &a.shared_up, &a.shared_down}) == 1;
}

cqsa_status sm80_moe_products(const moe_call& c, const moe_layer& l) {
  const int32_t order = moe_order_of({l.down});
  cqsa_status status = multiply(c, l, true, c.plan.order);
  if (status == CQSA_OK) status = moe_halves_of_h(c, l, order);
  return status == CQSA_OK ? multiply(c, l, false, order) : status;
}

extern const cqsa_moe_impl sm80_moe = {"cuda_f16", "sm_80 and newer; weights of blocks become f16", probe, workspace, launch_leaf};

}  // namespace cqsa::gpu
