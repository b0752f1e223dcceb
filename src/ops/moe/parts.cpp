// SPDX-License-Identifier: Apache-2.0
#include "ops/moe/parts.h"

#include <cinttypes>
#include <cmath>

#include "abi_struct.h"
#include "backends/moe_rules.h"
#include "ops/moe/moe.h"

namespace cqsa::moe {

namespace {

using fp8::operand;
using fp8::operand_list;

constexpr uint32_t first_route = sizeof(cqsa_moe_route_args), first_group = sizeof(cqsa_moe_group_args), first_combine = sizeof(cqsa_moe_combine_args);

template <class Leaf> cqsa_status run(const cqsa_context& context, cqsa_status (*work)(void*, const Leaf*, const cqsa_exec*, void*), const Leaf& leaf,
                                      const char* what, void* stream) {
  if (work == nullptr) return fp8::no_leaf(context, what);
  const cqsa_exec exec = plain_exec(context);
  return fp8::report(context, work(context.device, &leaf, context.is_host() ? &exec : nullptr, stream), what);
}

cqsa_status check_index_dtype(const char* name, const cqsa_tensor& t) {
  if (t.dtype == CQSA_DTYPE_I32 || t.dtype == CQSA_DTYPE_I64) return CQSA_OK;
  return fp8::wrong_dtype(name, t, "i32 or i64");
}

// Floats of [tokens, k] or the like, whose sizes are known.
cqsa_status take_matrix(operand_list& list, const cqsa_tensor* t, const char* name, bool is_output, const int64_t* wanted, const char* const* axes,
                        cqsa_moe_rows& out) {
  CQSA_TRY(is_output ? list.output(t, name, 2, 2) : list.input(t, name, 2, 2));
  CQSA_TRY(check_shape(*t, name, wanted, 2, false, axes));
  out = rows_of(list, *t);
  return CQSA_OK;
}

const char* const token_axes[] = {"tokens", "k"};

// ---- route ------------------------------------------------------------------------------------------------------------------

cqsa_status check_groups(const cqsa_moe_route_args& a, int64_t experts) {
  if (a.num_groups == 0 && a.topk_groups == 0) return CQSA_OK;
  if (a.num_groups < 1 || experts % a.num_groups != 0)
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->num_groups is %" PRId32 ", wanted a divisor of num_experts, which is %" PRId64, a.num_groups, experts);
  if (a.topk_groups < 1 || a.topk_groups > a.num_groups)
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->topk_groups is %" PRId32 ", wanted 1 to %" PRId32 " (num_groups)", a.topk_groups, a.num_groups);
  return CQSA_OK;
}

cqsa_status check_route_numbers(const cqsa_moe_route_args& a) {
  if (a.scoring < CQSA_MOE_SOFTMAX || a.scoring > CQSA_MOE_SIGMOID)
    return fail(CQSA_ERROR_UNKNOWN_FLAG, "args->scoring is %" PRId32 ", wanted CQSA_MOE_SOFTMAX or CQSA_MOE_SIGMOID", a.scoring);
  if (a.group_score < CQSA_MOE_GROUP_MAX || a.group_score > CQSA_MOE_GROUP_TOP2)
    return fail(CQSA_ERROR_UNKNOWN_FLAG, "args->group_score is %" PRId32 ", wanted CQSA_MOE_GROUP_MAX or CQSA_MOE_GROUP_TOP2", a.group_score);
  if (!std::isfinite(a.scale)) return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->scale is %g, wanted a finite number", static_cast<double>(a.scale));
  return a.reserved == 0 ? CQSA_OK : fail(CQSA_ERROR_INVALID_ARGUMENT, "args->reserved is %" PRId32 ", wanted 0", a.reserved);
}

cqsa_status take_logits(operand_list& list, const cqsa_moe_route_args& a, cqsa_moe_route_leaf& leaf) {
  CQSA_TRY(list.input(a.logits, "args->logits", 2, 2));
  CQSA_TRY(fp8::check_float("args->logits", *a.logits));
  leaf.tokens = a.logits->shape[0], leaf.num_experts = a.logits->shape[1];
  leaf.logits = rows_of(list, *a.logits);
  if (leaf.num_experts < 1 || leaf.num_experts > most_experts)
    return fail(CQSA_ERROR_SHAPE, "args->logits has shape %s, wanted [tokens, num_experts] with 1 to %" PRId64 " experts", shape_text(a.logits->shape, 2).text,
                most_experts);
  if (a.bias == nullptr) return CQSA_OK;
  CQSA_TRY(fp8::take_row(list, a.bias, "args->bias", leaf.num_experts, "num_experts", false));
  CQSA_TRY(fp8::check_dtype("args->bias", *a.bias, CQSA_DTYPE_F32));
  strides_of(*a.bias, &leaf.bias_stride);
  leaf.bias = static_cast<const float*>(list.first(*a.bias));
  return CQSA_OK;
}

cqsa_status take_chosen(operand_list& list, const cqsa_moe_route_args& a, cqsa_moe_route_leaf& leaf) {
  const int64_t open = leaf.num_experts / leaf.num_groups * leaf.topk_groups, most = open < most_topk ? open : most_topk;
  CQSA_TRY(list.output(a.topk_ids, "args->topk_ids", 2, 2));
  CQSA_TRY(check_index_dtype("args->topk_ids", *a.topk_ids));
  leaf.topk = a.topk_ids->shape[1];
  if (leaf.topk < 1 || leaf.topk > most || a.topk_ids->shape[0] != leaf.tokens)
    return fail(CQSA_ERROR_SHAPE, "args->topk_ids has shape %s, wanted [%" PRId64 ", k] with k of 1 to %" PRId64 ": %" PRId64 " experts may be chosen",
                shape_text(a.topk_ids->shape, 2).text, leaf.tokens, most, open);
  leaf.ids = rows_of(list, *a.topk_ids);
  const int64_t wanted[] = {leaf.tokens, leaf.topk};
  CQSA_TRY(take_matrix(list, a.topk_weights, "args->topk_weights", true, wanted, token_axes, leaf.weights));
  return fp8::check_dtype("args->topk_weights", *a.topk_weights, CQSA_DTYPE_F32);
}

// ---- group ------------------------------------------------------------------------------------------------------------------

cqsa_status take_indices(operand_list& list, const cqsa_tensor* t, const char* name, cqsa_dtype dtype, int64_t count, const char* axis, void*& out,
                         int64_t& stride) {
  CQSA_TRY(fp8::take_row(list, t, name, count, axis, true));
  CQSA_TRY(fp8::check_dtype(name, *t, dtype));
  strides_of(*t, &stride);
  out = list.first(*t);
  return CQSA_OK;
}

cqsa_status take_places(operand_list& list, const cqsa_moe_group_args& a, cqsa_moe_group_leaf& leaf) {
  cqsa_moe_rows rows{};
  const int64_t wanted[] = {leaf.tokens, leaf.topk};
  if (a.places == nullptr) return CQSA_OK;
  CQSA_TRY(take_matrix(list, a.places, "args->places", true, wanted, token_axes, rows));
  CQSA_TRY(fp8::check_dtype("args->places", *a.places, leaf.dtype));
  leaf.places = rows.data, leaf.places_stride[0] = rows.stride[0], leaf.places_stride[1] = rows.stride[1];
  return CQSA_OK;
}

cqsa_status take_group_outputs(operand_list& list, const cqsa_moe_group_args& a, cqsa_moe_group_leaf& leaf) {
  int64_t slots = 0;
  CQSA_TRY(list.output(a.offsets, "args->offsets", 1, 1));
  CQSA_TRY(check_index_dtype("args->offsets", *a.offsets));
  leaf.dtype = a.offsets->dtype, leaf.num_experts = a.offsets->shape[0] - 1;
  if (leaf.num_experts < 1 || leaf.num_experts > most_experts)
    return fail(CQSA_ERROR_SHAPE, "args->offsets has shape %s, wanted [num_experts + 1] with 1 to %" PRId64 " experts", shape_text(a.offsets->shape, 1).text,
                most_experts);
  strides_of(*a.offsets, &leaf.offsets_stride);
  leaf.offsets = list.first(*a.offsets);
  if (multiply_overflows(leaf.tokens, leaf.topk, &slots) || (leaf.dtype == CQSA_DTYPE_I32 && slots > INT32_MAX))
    return fail(CQSA_ERROR_SHAPE, "args->topk_ids has shape %s, whose slots %s cannot count", shape_text(a.topk_ids->shape, 2).text, dtype_name(leaf.dtype));
  CQSA_TRY(take_indices(list, a.order, "args->order", leaf.dtype, slots, "tokens * k", leaf.order, leaf.order_stride));
  if (a.counts) CQSA_TRY(take_indices(list, a.counts, "args->counts", leaf.dtype, leaf.num_experts, "num_experts", leaf.counts, leaf.counts_stride));
  return take_places(list, a, leaf);
}

cqsa_status bind_group(operand_list& list, const cqsa_moe_group_args& a, cqsa_moe_group_leaf& leaf) {
  CQSA_TRY(take_ids(list, a.topk_ids, -1, leaf.ids, leaf.topk));
  leaf.tokens = a.topk_ids->shape[0];
  CQSA_TRY(take_group_outputs(list, a, leaf));
  id_space space{leaf.num_experts};
  CQSA_TRY(take_map(list, a.expert_map, space));
  leaf.num_ids = space.num_ids, leaf.expert_map = space.map, leaf.expert_map_stride = space.map_stride;
  CQSA_TRY(take_counters(list, a.counters, leaf.counters, leaf.counters_stride));
  CQSA_TRY(list.check_overlap());
  return list.context().is_host() ? check_id_values(leaf.ids, leaf.tokens, leaf.topk, space) : CQSA_OK;
}

// ---- combine ----------------------------------------------------------------------------------------------------------------

cqsa_status take_y(operand_list& list, const cqsa_moe_combine_args& a, cqsa_moe_combine_leaf& leaf) {
  static const char* const axes[] = {"tokens * k", "hidden"};
  int64_t wanted[] = {0, leaf.hidden};
  if (multiply_overflows(leaf.tokens, leaf.topk, &wanted[0]))
    return fail(CQSA_ERROR_SHAPE, "args->topk_weights has shape %s, whose product overflows 64 bits", shape_text(a.topk_weights->shape, 2).text);
  CQSA_TRY(take_matrix(list, a.y, "args->y", false, wanted, axes, leaf.y));
  return fp8::check_dtype("args->y", *a.y, CQSA_DTYPE_F32);
}

cqsa_status bind_combine(operand_list& list, const cqsa_moe_combine_args& a, cqsa_moe_combine_leaf& leaf) {
  int64_t topk = 0;
  CQSA_TRY(list.input(a.topk_weights, "args->topk_weights", 2, 2));
  CQSA_TRY(fp8::check_dtype("args->topk_weights", *a.topk_weights, CQSA_DTYPE_F32));
  leaf.tokens = a.topk_weights->shape[0], leaf.topk = a.topk_weights->shape[1];
  leaf.weights = rows_of(list, *a.topk_weights);
  CQSA_TRY(list.output(a.out, "args->out", 2, 2));
  CQSA_TRY(fp8::check_float("args->out", *a.out));
  leaf.hidden = a.out->shape[1];
  leaf.out = rows_of(list, *a.out);
  if (a.out->shape[0] != leaf.tokens)
    return fail(CQSA_ERROR_SHAPE, "args->out has shape %s, wanted [%" PRId64 ", hidden] (tokens of args->topk_weights)", shape_text(a.out->shape, 2).text,
                leaf.tokens);
  CQSA_TRY(take_y(list, a, leaf));
  if (a.topk_ids == nullptr) return list.check_overlap();
  CQSA_TRY(take_ids(list, a.topk_ids, leaf.tokens, leaf.ids, topk));
  if (topk != leaf.topk)
    return fail(CQSA_ERROR_SHAPE, "args->topk_ids has shape %s, wanted k = %" PRId64 " as args->topk_weights", shape_text(a.topk_ids->shape, 2).text, leaf.topk);
  return list.check_overlap();
}

}  // namespace

cqsa_status route(const cqsa_context& context, const cqsa_moe_route_args* caller, void* stream) {
  cqsa_moe_route_args a;
  cqsa_moe_route_leaf leaf{};
  operand room[4];
  operand_list list(context, room, fp8::look::everywhere);
  CQSA_TRY(copy_struct(caller, "args", first_route, CQSA_MOE_RENORMALISE, a));
  CQSA_TRY(check_route_numbers(a));
  CQSA_TRY(take_logits(list, a, leaf));
  CQSA_TRY(check_groups(a, leaf.num_experts));
  leaf.num_groups = a.num_groups == 0 ? 1 : a.num_groups, leaf.topk_groups = a.num_groups == 0 ? 1 : a.topk_groups;
  CQSA_TRY(take_chosen(list, a, leaf));
  CQSA_TRY(list.check_overlap());
  leaf.scoring = a.scoring, leaf.group_score = a.group_score, leaf.renormalise = (a.flags & CQSA_MOE_RENORMALISE) != 0;
  leaf.scale = a.scale == 0 ? 1 : a.scale;
  return leaf.tokens == 0 ? CQSA_OK : run(context, context.backend->moe_route, leaf, "moe_route", stream);
}

cqsa_status group(const cqsa_context& context, const cqsa_moe_group_args* caller, void* stream) {
  cqsa_moe_group_args a;
  cqsa_moe_group_leaf leaf{};
  operand room[7];
  operand_list list(context, room, fp8::look::everywhere);
  CQSA_TRY(copy_struct(caller, "args", first_group, 0, a));
  CQSA_TRY(bind_group(list, a, leaf));
  return run(context, context.backend->moe_group, leaf, "moe_group", stream);
}

cqsa_status quantize_activations(const cqsa_context& context, const cqsa_tensor* x, const cqsa_tensor* codes, const cqsa_tensor* scales, void* stream) {
  static const char* const code_axes[] = {"rows", "n"};
  static const char* const scale_axes[] = {"rows", "n / 32"};
  cqsa_moe_quantize_leaf leaf{};
  operand room[3];
  operand_list list(context, room, fp8::look::everywhere);
  CQSA_TRY(list.input(x, "x", 2, 2));
  CQSA_TRY(fp8::check_float("x", *x));
  leaf.rows = x->shape[0], leaf.row_elements = x->shape[1], leaf.x = rows_of(list, *x);
  if (leaf.row_elements % q8_group != 0)
    return fail(CQSA_ERROR_SHAPE, "x has shape %s, wanted rows of a multiple of %" PRId64, shape_text(x->shape, 2).text, q8_group);
  const int64_t wanted[] = {leaf.rows, leaf.row_elements}, scales_wanted[] = {leaf.rows, leaf.row_elements / q8_group};
  CQSA_TRY(take_matrix(list, codes, "codes", true, wanted, code_axes, leaf.codes));
  CQSA_TRY(fp8::check_dtype("codes", *codes, CQSA_DTYPE_I8));
  CQSA_TRY(take_matrix(list, scales, "scales", true, scales_wanted, scale_axes, leaf.scales));
  CQSA_TRY(fp8::check_dtype("scales", *scales, CQSA_DTYPE_F32));
  CQSA_TRY(list.check_overlap());
  return is_empty(*x) ? CQSA_OK : run(context, context.backend->moe_quantize, leaf, "moe_quantize_activations", stream);
}

cqsa_status combine(const cqsa_context& context, const cqsa_moe_combine_args* caller, void* stream) {
  cqsa_moe_combine_args a;
  cqsa_moe_combine_leaf leaf{};
  operand room[4];
  operand_list list(context, room, fp8::look::everywhere);
  CQSA_TRY(copy_struct(caller, "args", first_combine, 0, a));
  CQSA_TRY(bind_combine(list, a, leaf));
  return is_empty(*a.out) ? CQSA_OK : run(context, context.backend->moe_combine, leaf, "moe_combine", stream);
}

}  // namespace cqsa::moe
