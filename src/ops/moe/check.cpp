// SPDX-License-Identifier: Apache-2.0
// The arguments of a mixture of experts: each checked, then turned into the leaf.
#include <cinttypes>
#include <cmath>
#include <limits>

#include "abi_struct.h"
#include "backends/moe_rules.h"
#include "ops/moe/moe.h"
#include "quant_format.h"

namespace cqsa::moe {

namespace {

using args_type = cqsa_moe_args;
using fp8::operand_list;

constexpr uint32_t first_shared = sizeof(cqsa_moe_shared);

const char* const activation_names[] = {"CQSA_MOE_SWIGLU", "CQSA_MOE_GEGLU", "CQSA_MOE_GEGLU_TANH", "CQSA_MOE_SILU",
                                        "CQSA_MOE_GELU",   "CQSA_MOE_GELU_TANH", "CQSA_MOE_RELU2"};

// ---- numbers ----------------------------------------------------------------------------------------------------------------

cqsa_status check_enum(int32_t value, const char* name, int32_t last, const char* wanted) {
  if (value >= 0 && value <= last) return CQSA_OK;
  return fail(CQSA_ERROR_UNKNOWN_FLAG, "%s is %" PRId32 ", wanted one of %s, 0 to %" PRId32, name, value, wanted, last);
}

cqsa_status check_swiglu(const args_type& a) {
  for (const auto& [value, name] : {std::pair{a.alpha, "args->alpha"}, std::pair{a.beta, "args->beta"}, std::pair{a.limit, "args->limit"}}) {
    if (!std::isfinite(value)) return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s is %g, wanted a finite number", name, static_cast<double>(value));
    if (value != 0 && a.activation != CQSA_MOE_SWIGLU)
      return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s is %g, wanted 0: only CQSA_MOE_SWIGLU has it, and args->activation is %s", name,
                  static_cast<double>(value), activation_names[a.activation]);
  }
  if (a.limit >= 0) return CQSA_OK;
  return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->limit is %g, wanted a number above 0, or 0 for none", static_cast<double>(a.limit));
}

cqsa_status check_numbers(const args_type& a) {
  CQSA_TRY(check_enum(a.gate_up_layout, "args->gate_up_layout", CQSA_MOE_INTERLEAVED, "CQSA_MOE_SEPARATE, .."));
  CQSA_TRY(check_enum(a.activation, "args->activation", CQSA_MOE_RELU2, "CQSA_MOE_SWIGLU, .."));
  CQSA_TRY(check_enum(a.precision, "args->precision", CQSA_MOE_PRECISION_F16, "CQSA_MOE_PRECISION_*"));
  CQSA_TRY(check_enum(a.output, "args->output", CQSA_MOE_PER_SLOT, "CQSA_MOE_COMBINED, .."));
  CQSA_TRY(check_swiglu(a));
  if (a.reserved != 0) return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->reserved is %" PRId32 ", wanted 0", a.reserved);
  if (!is_gated(a.activation) && a.gate_up_layout != CQSA_MOE_SEPARATE)
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->gate_up_layout is %" PRId32 ", wanted CQSA_MOE_SEPARATE: %s has no gate", a.gate_up_layout,
                activation_names[a.activation]);
  return CQSA_OK;
}

// ---- projections ------------------------------------------------------------------------------------------------------------

struct three_names {
  const char *gate, *up, *down;
};
constexpr three_names own_names{"args->w_gate", "args->w_up", "args->w_down"};
constexpr three_names shared_names{"args->shared->w_gate", "args->shared->w_up", "args->shared->w_down"};
constexpr three_names bias_names{"args->b_gate", "args->b_up", "args->b_down"};

struct three_sets {
  cqsa_moe_set &gate, &up, &down;
  int64_t inter = 0;
};

// Which of gate and up must be there.
cqsa_status check_presence(const args_type& a, const void* gate, const void* up, const three_names& names) {
  const bool gated = is_gated(a.activation), together = a.gate_up_layout != CQSA_MOE_SEPARATE;
  if (gate != nullptr && !gated)
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s is given, wanted NULL: %s has no gate", names.gate, activation_names[a.activation]);
  if (up != nullptr && together)
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s is given, wanted NULL: with args->gate_up_layout %" PRId32 " its rows are in %s", names.up, a.gate_up_layout,
                names.gate);
  return CQSA_OK;
}

cqsa_status check_matrix_size(const cqsa_moe_set& set, const char* name, int64_t experts, int64_t rows, const char* rows_name, int64_t elements,
                              const char* elements_name) {
  if (set.num_experts != experts)
    return fail(CQSA_ERROR_SHAPE, "%s->num_experts is %" PRId64 ", wanted %" PRId64 " as the other projections have", name, set.num_experts, experts);
  if (set.rows != rows) return fail(CQSA_ERROR_SHAPE, "%s->rows is %" PRId64 ", wanted %" PRId64 " (%s)", name, set.rows, rows, rows_name);
  if (set.row_elements != elements)
    return fail(CQSA_ERROR_SHAPE, "%s->row_elements is %" PRId64 ", wanted %" PRId64 " (%s)", name, set.row_elements, elements, elements_name);
  return CQSA_OK;
}

cqsa_status read_three(const operand_list& list, const args_type& a, const cqsa_moe_weights* gate, const cqsa_moe_weights* up, const cqsa_moe_weights* down,
                       const three_names& names, int64_t hidden, three_sets& out) {
  const bool gated = is_gated(a.activation), together = a.gate_up_layout != CQSA_MOE_SEPARATE;
  CQSA_TRY(check_presence(a, gate, up, names));
  if (gated) CQSA_TRY(read_set(list.context(), gate, names.gate, out.gate));
  if (!together) CQSA_TRY(read_set(list.context(), up, names.up, out.up));
  CQSA_TRY(read_set(list.context(), down, names.down, out.down));
  out.inter = out.down.row_elements;
  const int64_t experts = out.down.num_experts;
  CQSA_TRY(check_matrix_size(out.down, names.down, experts, hidden, "hidden, axis 1 of args->x", out.inter, "inter"));
  if (gated)
    CQSA_TRY(check_matrix_size(out.gate, names.gate, experts, together ? 2 * out.inter : out.inter, together ? "2 * inter" : "inter, row_elements of w_down", hidden,
                               "hidden, axis 1 of args->x"));
  return together ? CQSA_OK : check_matrix_size(out.up, names.up, experts, out.inter, "inter, row_elements of w_down", hidden, "hidden, axis 1 of args->x");
}

cqsa_status take_bias(operand_list& list, const cqsa_tensor* t, const char* name, cqsa_moe_set& set) {
  static const char* const axes[] = {"num_experts", "rows"};
  if (t == nullptr) return CQSA_OK;
  if (set.num_experts == 0) return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s is given, wanted NULL: there is no such projection", name);
  CQSA_TRY(list.input(t, name, 2, 2));
  CQSA_TRY(fp8::check_dtype(name, *t, CQSA_DTYPE_F32));
  const int64_t wanted[] = {set.num_experts, set.rows};
  CQSA_TRY(check_shape(*t, name, wanted, 2, false, axes));
  strides_of(*t, set.bias_stride);
  set.bias = static_cast<const float*>(list.first(*t));
  return CQSA_OK;
}

cqsa_status take_projections(operand_list& list, const args_type& a, cqsa_moe_leaf& leaf) {
  three_sets sets{leaf.gate, leaf.up, leaf.down};
  CQSA_TRY(read_three(list, a, a.w_gate, a.w_up, a.w_down, own_names, leaf.hidden, sets));
  leaf.inter = sets.inter, leaf.num_experts = leaf.down.num_experts;
  CQSA_TRY(take_bias(list, a.b_gate, bias_names.gate, leaf.gate));
  CQSA_TRY(take_bias(list, a.b_up, bias_names.up, leaf.up));
  return take_bias(list, a.b_down, bias_names.down, leaf.down);
}

// ---- shared expert ----------------------------------------------------------------------------------------------------------

// [hidden], or [tokens, 1]: the number of axes says which.
cqsa_status take_factor(operand_list& list, const cqsa_tensor* t, cqsa_moe_leaf& leaf) {
  const char* const name = "args->shared->gate";
  if (t == nullptr) return CQSA_OK;
  CQSA_TRY(list.input(t, name, 1, 2));
  CQSA_TRY(fp8::check_dtype(name, *t, CQSA_DTYPE_F32));
  const int64_t wanted[] = {t->ndim == 1 ? leaf.hidden : leaf.tokens, 1};
  static const char* const of_x[] = {"hidden"};
  static const char* const of_tokens[] = {"tokens", "1"};
  CQSA_TRY(check_shape(*t, name, wanted, t->ndim, false, t->ndim == 1 ? of_x : of_tokens));
  int64_t strides[2];
  strides_of(*t, strides);
  leaf.shared_factor = static_cast<const float*>(list.first(*t));
  leaf.shared_factor_stride = strides[0];
  leaf.shared_factor_is_logit = t->ndim == 2;
  return CQSA_OK;
}

cqsa_status take_shared(operand_list& list, const args_type& a, cqsa_moe_leaf& leaf) {
  cqsa_moe_shared shared;
  if (a.shared == nullptr) return CQSA_OK;
  CQSA_TRY(copy_struct(a.shared, "args->shared", first_shared, 0, shared));
  if (a.output != CQSA_MOE_COMBINED)
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->shared is given, but args->output is CQSA_MOE_PER_SLOT, which has no place for it: wanted NULL");
  three_sets sets{leaf.shared_gate, leaf.shared_up, leaf.shared_down};
  CQSA_TRY(read_three(list, a, shared.w_gate, shared.w_up, shared.w_down, shared_names, leaf.hidden, sets));
  if (leaf.shared_down.num_experts != 1)
    return fail(CQSA_ERROR_SHAPE, "args->shared->w_down->num_experts is %" PRId64 ", wanted 1", leaf.shared_down.num_experts);
  leaf.shared_inter = sets.inter;
  return take_factor(list, shared.gate, leaf);
}

// ---- tensors ----------------------------------------------------------------------------------------------------------------

cqsa_status take_x(operand_list& list, const args_type& a, cqsa_moe_leaf& leaf) {
  CQSA_TRY(list.input(a.x, "args->x", 2, 2));
  CQSA_TRY(fp8::check_float("args->x", *a.x));
  leaf.tokens = a.x->shape[0], leaf.hidden = a.x->shape[1];
  leaf.x = rows_of(list, *a.x);
  if (leaf.hidden >= 1) return CQSA_OK;
  return fail(CQSA_ERROR_SHAPE, "args->x has shape %s, wanted [tokens, hidden] with hidden of at least 1", shape_text(a.x->shape, 2).text);
}

cqsa_status take_routing(operand_list& list, const args_type& a, cqsa_moe_leaf& leaf) {
  static const char* const axes[] = {"tokens", "k"};
  CQSA_TRY(take_ids(list, a.topk_ids, leaf.tokens, leaf.ids, leaf.topk));
  if (a.output == CQSA_MOE_PER_SLOT && a.topk_weights == nullptr) return CQSA_OK;
  CQSA_TRY(list.input(a.topk_weights, "args->topk_weights", 2, 2));
  CQSA_TRY(fp8::check_dtype("args->topk_weights", *a.topk_weights, CQSA_DTYPE_F32));
  const int64_t wanted[] = {leaf.tokens, leaf.topk};
  CQSA_TRY(check_shape(*a.topk_weights, "args->topk_weights", wanted, 2, false, axes));
  leaf.weights = rows_of(list, *a.topk_weights);
  return CQSA_OK;
}

cqsa_status take_out(operand_list& list, const args_type& a, cqsa_moe_leaf& leaf) {
  static const char* const axes[] = {"tokens", "hidden"};
  static const char* const slot_axes[] = {"tokens * k", "hidden"};
  const bool slots = a.output == CQSA_MOE_PER_SLOT;
  int64_t wanted[] = {leaf.tokens, leaf.hidden};
  if (slots && multiply_overflows(leaf.tokens, leaf.topk, &wanted[0]))
    return fail(CQSA_ERROR_SHAPE, "args->topk_ids has shape [%" PRId64 ", %" PRId64 "], whose product overflows 64 bits", leaf.tokens, leaf.topk);
  CQSA_TRY(list.output(a.out, "args->out", 2, 2));
  CQSA_TRY(slots ? fp8::check_dtype("args->out", *a.out, CQSA_DTYPE_F32) : fp8::check_float("args->out", *a.out));
  CQSA_TRY(check_shape(*a.out, "args->out", wanted, 2, false, slots ? slot_axes : axes));
  leaf.out = rows_of(list, *a.out);
  return CQSA_OK;
}

cqsa_status take_id_space(operand_list& list, const args_type& a, cqsa_moe_leaf& leaf) {
  id_space space{leaf.num_experts};
  CQSA_TRY(take_map(list, a.expert_map, space));
  leaf.num_ids = space.num_ids, leaf.expert_map = space.map, leaf.expert_map_stride = space.map_stride;
  return take_counters(list, a.counters, leaf.counters, leaf.counters_stride);
}

void fill_numbers(const operand_list& list, const args_type& a, cqsa_moe_leaf& leaf) {
  leaf.flags = a.flags;
  leaf.layout = a.gate_up_layout, leaf.activation = a.activation, leaf.output = a.output;
  leaf.alpha = a.alpha == 0 ? 1 : a.alpha, leaf.beta = a.beta;
  leaf.limit = a.limit == 0 ? std::numeric_limits<float>::infinity() : a.limit;
  leaf.precision = a.precision == CQSA_MOE_PRECISION_AUTO ? static_cast<int32_t>(CQSA_MOE_PRECISION_Q8) : a.precision;
  leaf.chip = list.context().chip;
}

}  // namespace

// ---- ids --------------------------------------------------------------------------------------------------------------------

cqsa_moe_rows rows_of(const operand_list& list, const cqsa_tensor& t) {
  cqsa_moe_rows rows{list.first(t), t.dtype, 0, {0, 0}};
  strides_of(t, rows.stride);
  return rows;
}

cqsa_status take_ids(operand_list& list, const cqsa_tensor* t, int64_t tokens, cqsa_moe_rows& out, int64_t& topk) {
  CQSA_TRY(list.input(t, "args->topk_ids", 2, 2));
  if (t->dtype != CQSA_DTYPE_I32 && t->dtype != CQSA_DTYPE_I64) return fp8::wrong_dtype("args->topk_ids", *t, "i32 or i64");
  topk = t->shape[1];
  if (topk < 1 || topk > most_topk)
    return fail(CQSA_ERROR_SHAPE, "args->topk_ids has shape %s, wanted [tokens, k] with k of 1 to %" PRId64, shape_text(t->shape, 2).text, most_topk);
  if (tokens >= 0 && t->shape[0] != tokens)
    return fail(CQSA_ERROR_SHAPE, "args->topk_ids has shape %s, wanted [%" PRId64 ", k] (tokens of args->x)", shape_text(t->shape, 2).text, tokens);
  out = rows_of(list, *t);
  return CQSA_OK;
}

cqsa_status take_map(operand_list& list, const cqsa_tensor* t, id_space& space) {
  space.num_ids = space.num_experts;
  if (t == nullptr) return CQSA_OK;
  CQSA_TRY(list.input(t, "args->expert_map", 1, 1));
  CQSA_TRY(fp8::check_dtype("args->expert_map", *t, CQSA_DTYPE_I32));
  space.num_ids = t->shape[0];
  if (space.num_ids < 1) return fail(CQSA_ERROR_SHAPE, "args->expert_map has shape [0], wanted an entry for every id");
  strides_of(*t, &space.map_stride);
  space.map = static_cast<const int32_t*>(list.first(*t));
  return CQSA_OK;
}

cqsa_status take_counters(operand_list& list, const cqsa_tensor* t, int64_t*& out, int64_t& stride) {
  if (t == nullptr) return CQSA_OK;
  CQSA_TRY(fp8::take_row(list, t, "args->counters", 2, "counters", true));
  CQSA_TRY(fp8::check_dtype("args->counters", *t, CQSA_DTYPE_I64));
  strides_of(*t, &stride);
  out = static_cast<int64_t*>(list.first(*t));
  return CQSA_OK;
}

namespace {

cqsa_status check_map_values(const id_space& space) {
  for (int64_t i = 0; space.map && i < space.num_ids; ++i) {
    const int64_t e = index_at(space.map, CQSA_DTYPE_I32, i * space.map_stride);
    if (e < -1 || e >= space.num_experts)
      return fail(CQSA_ERROR_INDEX, "args->expert_map[%" PRId64 "] is %" PRId64 ", wanted -1 to %" PRId64 ": there are %" PRId64 " experts", i, e,
                  space.num_experts - 1, space.num_experts);
  }
  return CQSA_OK;
}

cqsa_status fail_id(int64_t t, int64_t s, int64_t id, const id_space& space) {
  return fail(CQSA_ERROR_INDEX, "args->topk_ids[%" PRId64 ", %" PRId64 "] is %" PRId64 ", wanted -1 to %" PRId64 ": %s %" PRId64, t, s, id, space.num_ids - 1,
              space.map ? "the length of args->expert_map is" : "num_experts is", space.num_ids);
}

// The first projection that lacks an expert, nullptr: none does.
const char* missing(const cqsa_moe_leaf& leaf, int64_t e) {
  if (!has_data(leaf.gate, e)) return own_names.gate;
  if (!has_data(leaf.up, e)) return own_names.up;
  return has_data(leaf.down, e) ? nullptr : own_names.down;
}

template <class Visit> cqsa_status each_id(const cqsa_moe_rows& ids, int64_t tokens, int64_t topk, const id_space& space, const Visit& visit) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t s = 0; s < topk; ++s) {
      const int64_t id = index_at(ids.data, ids.dtype, t * ids.stride[0] + s * ids.stride[1]);
      const int32_t e = expert_of(id, space.num_ids, space.map, space.map_stride, space.num_experts);
      if (e == out_of_range) return fail_id(t, s, id, space);
      CQSA_TRY(visit(t, s, e));
    }
  return CQSA_OK;
}

}  // namespace

cqsa_status check_id_values(const cqsa_moe_rows& ids, int64_t tokens, int64_t topk, const id_space& space) {
  CQSA_TRY(check_map_values(space));
  return each_id(ids, tokens, topk, space, [](int64_t, int64_t, int32_t) -> cqsa_status { return CQSA_OK; });
}

cqsa_status check_ids(const cqsa_moe_leaf& leaf) {
  const id_space space{leaf.num_experts, leaf.num_ids, leaf.expert_map, leaf.expert_map_stride};
  bool seen[most_experts] = {};
  CQSA_TRY(check_map_values(space));
  return each_id(leaf.ids, leaf.tokens, leaf.topk, space, [&](int64_t t, int64_t s, int32_t e) -> cqsa_status {
    if (e < 0 || seen[e]) return CQSA_OK;
    seen[e] = true;
    const char* const name = missing(leaf, e);
    if (name == nullptr) return CQSA_OK;
    return fail(CQSA_ERROR_NULL_POINTER, "%s: the data of expert %" PRId32 " is NULL, but args->topk_ids[%" PRId64 ", %" PRId64 "] names it", name, e, t, s);
  });
}

// ---- the whole --------------------------------------------------------------------------------------------------------------

cqsa_status bind(operand_list& list, const args_type& a, cqsa_moe_leaf& leaf) {
  leaf = {};
  leaf.struct_size = sizeof leaf;
  CQSA_TRY(check_numbers(a));
  CQSA_TRY(take_x(list, a, leaf));
  CQSA_TRY(take_projections(list, a, leaf));
  CQSA_TRY(take_routing(list, a, leaf));
  CQSA_TRY(take_id_space(list, a, leaf));
  CQSA_TRY(take_shared(list, a, leaf));
  CQSA_TRY(take_out(list, a, leaf));
  fill_numbers(list, a, leaf);
  return list.check_overlap();
}

cqsa_status check_weights(operand_list& list, const args_type& a, const cqsa_moe_leaf& leaf) {
  written outputs;
  outputs.add(a.out, "args->out");
  outputs.add(a.counters, "args->counters");
  const auto workspace = reinterpret_cast<uintptr_t>(a.workspace);
  if (a.workspace) outputs.add({workspace, workspace + a.workspace_bytes, "args->workspace"});
  CQSA_TRY(check_memory(list, leaf.gate, own_names.gate, outputs));
  CQSA_TRY(check_memory(list, leaf.up, own_names.up, outputs));
  CQSA_TRY(check_memory(list, leaf.down, own_names.down, outputs));
  CQSA_TRY(check_memory(list, leaf.shared_gate, shared_names.gate, outputs));
  CQSA_TRY(check_memory(list, leaf.shared_up, shared_names.up, outputs));
  CQSA_TRY(check_memory(list, leaf.shared_down, shared_names.down, outputs));
  if (!list.context().is_host() || leaf.shared_down.num_experts == 0 || leaf.tokens == 0) return CQSA_OK;
  for (const auto& [set, name] : {std::pair{&leaf.shared_gate, shared_names.gate}, std::pair{&leaf.shared_up, shared_names.up},
                                  std::pair{&leaf.shared_down, shared_names.down}})
    if (!has_data(*set, 0)) return fail(CQSA_ERROR_NULL_POINTER, "%s: the data of the shared expert is NULL", name);
  return CQSA_OK;
}

}  // namespace cqsa::moe
