// SPDX-License-Identifier: Apache-2.0
// Host part of the operations that a mixture of experts is made of, each by itself.
#include "moe.h"
#include "moe_fill.h"

namespace cqsa::gpu {
namespace {

uint32_t blocks_for(void* device, int64_t units, int64_t each) {
  return uint32_t(larger(1, smaller(units, larger(facts_of(device).compute_units, 1) * each)));
}

}  // namespace

cqsa_status portable_moe_route(void* device, const cqsa_moe_route_leaf* leaf, const cqsa_exec*, void* stream) {
  const cqsa_moe_route_leaf& a = *leaf;
  moe_route_params p{};
  p.logits = moe_view_of(a.logits, a.tokens, a.num_experts), p.ids = moe_view_of(a.ids, a.tokens, a.topk), p.weights = moe_view_of(a.weights, a.tokens, a.topk);
  p.bias = reinterpret_cast<const char*>(a.bias), p.bias_stride = a.bias_stride;
  p.tokens = a.tokens, p.num_experts = a.num_experts, p.topk = a.topk;
  p.scoring = a.scoring, p.group_score = a.group_score, p.num_groups = a.num_groups, p.topk_groups = a.topk_groups;
  p.renormalise = a.renormalise, p.scale = a.scale;
  p.by_logits = !a.bias && (a.topk_groups == a.num_groups || a.group_score == CQSA_MOE_GROUP_MAX);
  if (a.tokens < 1) return CQSA_OK;
  const uint32_t shared = uint32_t(4 * (16 + 2 * a.num_experts + a.num_groups));
  return launch(device, kernel_id::cqsa_gpu_moe_route, {{blocks_for(device, a.tokens, 16), 1, 1}, 128, shared}, &p, sizeof p, stream);
}

cqsa_status portable_moe_group(void* device, const cqsa_moe_group_leaf* leaf, const cqsa_exec*, void* stream) {
  const cqsa_moe_group_leaf& a = *leaf;
  moe_group_params p{};
  p.ids = {moe_view_of(a.ids, a.tokens, a.topk), a.expert_map, a.expert_map_stride, a.num_ids, a.num_experts, a.topk, a.counters, a.counters_stride};
  p.slots = a.tokens * a.topk, p.num_experts = a.num_experts, p.each = moe_group_each(a.num_experts, facts_of(device).compute_units);
  p.offsets = static_cast<char*>(a.offsets), p.order = static_cast<char*>(a.order), p.counts = static_cast<char*>(a.counts), p.places = static_cast<char*>(a.places);
  p.offsets_stride = a.offsets_stride, p.order_stride = a.order_stride, p.counts_stride = a.counts_stride;
  p.places_stride[0] = a.places_stride[0], p.places_stride[1] = a.places_stride[1];
  p.bytes = a.dtype == CQSA_DTYPE_I64 ? 8 : 4, p.fill = 1;
  const uint32_t teams = 256 / uint32_t(facts_of(device).lanes), shared = uint32_t(4 * (int64_t(teams) * p.each + teams + 1));
  return launch(device, kernel_id::cqsa_gpu_moe_group, {{uint32_t(divide_up(a.num_experts, p.each)), 1, 1}, 256, shared}, &p, sizeof p, stream);
}

cqsa_status portable_moe_quantize(void* device, const cqsa_moe_quantize_leaf* leaf, const cqsa_exec*, void* stream) {
  const cqsa_moe_quantize_leaf& a = *leaf;
  moe_quantize_params p{};
  p.x = moe_view_of(a.x, a.rows, a.row_elements), p.codes = moe_view_of(a.codes, a.rows, a.row_elements), p.scales = moe_view_of(a.scales, a.rows, a.row_elements / 32);
  p.rows = a.rows, p.elements = a.row_elements;
  if (a.rows < 1 || a.row_elements < 1) return CQSA_OK;
  const int64_t units = divide_up(a.rows * (a.row_elements / 4), 256);
  return launch(device, kernel_id::cqsa_gpu_moe_quantize, {{blocks_for(device, units, 16), 1, 1}, 256, 0}, &p, sizeof p, stream);
}

cqsa_status portable_moe_combine(void* device, const cqsa_moe_combine_leaf* leaf, const cqsa_exec*, void* stream) {
  const cqsa_moe_combine_leaf& a = *leaf;
  moe_combine_params p{};
  p.y = moe_view_of(a.y, a.tokens * a.topk, a.hidden), p.weights = moe_view_of(a.weights, a.tokens, a.topk), p.out = moe_view_of(a.out, a.tokens, a.hidden);
  if (a.ids.data) p.ids.ids = moe_view_of(a.ids, a.tokens, a.topk);
  p.tokens = a.tokens, p.topk = a.topk, p.hidden = a.hidden;
  if (a.tokens < 1 || a.hidden < 1) return CQSA_OK;
  const int64_t units = divide_up(a.tokens * divide_up(a.hidden, 4), 256);
  return launch(device, kernel_id::cqsa_gpu_moe_combine, {{blocks_for(device, units, 16), 1, 1}, 256, 0}, &p, sizeof p, stream);
}

}  // namespace cqsa::gpu
