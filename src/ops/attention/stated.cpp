// SPDX-License-Identifier: Apache-2.0
// Params of which only a part is stated (num_heads = 0): the rest is taken from the tensors, and nothing that is stated is dropped.
// What the tensors can contradict at once is compared here; every other stated value replaces the one that was taken, so that
// make_problem() and bind_operands() judge it as in params that are stated in full.
#include <cinttypes>
#include <initializer_list>

#include "ops/attention/problem.h"
#include "tensor.h"

namespace cqsa {

namespace {

using params = cqsa_attention_params;
using args_type = cqsa_attention_args;

// A forgotten mask is not the same as none.
cqsa_status check_presence(const params& stated, const params& found) {
  constexpr uint32_t presence = CQSA_ATTENTION_VARLEN | CQSA_ATTENTION_PAGED | CQSA_ATTENTION_SEQUSED_K | CQSA_ATTENTION_MASK |
                                CQSA_ATTENTION_BIAS | CQSA_ATTENTION_ALIBI | CQSA_ATTENTION_SINKS | CQSA_ATTENTION_LSE;
  const uint32_t missing = stated.flags & presence & ~found.flags;
  if (missing == 0) return CQSA_OK;
  return fail(CQSA_ERROR_NULL_POINTER, "params->flags has the bits 0x%x of operands that are NULL in args", missing);
}

struct size_field {
  const char* name;
  int64_t params::*field;
  bool has;  // the tensors say it; otherwise a stated one is for make_problem() to refuse
};

cqsa_status check_sizes(const params& stated, params& found) {
  const bool varlen = found.flags & CQSA_ATTENTION_VARLEN, paged = found.flags & CQSA_ATTENTION_PAGED;
  const size_field sizes[] = {{"batch", &params::batch, true},
                              {"num_kv_heads", &params::num_kv_heads, true},
                              {"head_dim", &params::head_dim, true},
                              {"head_dim_v", &params::head_dim_v, true},
                              {"seqlen_q", &params::seqlen_q, !varlen},  // else a bound, see keep_bounds()
                              {"seqlen_k", &params::seqlen_k, !varlen && !paged},
                              {"total_q", &params::total_q, varlen},
                              {"total_k", &params::total_k, varlen && !paged},
                              {"page_size", &params::page_size, paged},
                              {"num_pages", &params::num_pages, paged}};
  for (const size_field& s : sizes) {
    const int64_t value = stated.*s.field;
    if (value == 0 || value == found.*s.field) continue;
    if (s.has && value < 0)
      return fail(CQSA_ERROR_INVALID_ARGUMENT, "params->%s is %" PRId64 ", the tensors say %" PRId64, s.name, value, found.*s.field);
    if (s.has) return fail(CQSA_ERROR_SHAPE, "params->%s is %" PRId64 ", the tensors say %" PRId64, s.name, value, found.*s.field);
    if (s.field != &params::seqlen_q && s.field != &params::seqlen_k) found.*s.field = value;
  }
  return CQSA_OK;
}

bool has_wide_plane(const args_type& args, int axis) {
  for (const cqsa_tensor* plane : {args.mask, args.bias})
    if (plane != nullptr && plane->shape[axis] > 1) return true;
  return false;
}

// Lengths that are bounds. One above what was found is a bound all the same; one below it counts, unless a mask or bias is wider.
// Without seqused_k the length of paged sequences is no bound but their length.
void keep_bounds(const params& stated, const args_type& args, params& found) {
  const bool varlen = found.flags & CQSA_ATTENTION_VARLEN, paged = found.flags & CQSA_ATTENTION_PAGED;
  const bool exact_k = paged && args.seqused_k == nullptr;
  const auto counts = [&](int64_t value, int64_t bound, int axis) {
    return value < 0 || (value > 0 && value < bound && !has_wide_plane(args, axis));
  };
  if (varlen && counts(stated.seqlen_q, found.seqlen_q, 2)) found.seqlen_q = stated.seqlen_q;
  if ((varlen || paged) && ((exact_k && stated.seqlen_k != 0) || counts(stated.seqlen_k, found.seqlen_k, 3)))
    found.seqlen_k = stated.seqlen_k;
}

cqsa_status check_dtypes(const params& stated, params& found) {
  const struct {
    const char* name;
    cqsa_dtype params::*field;
    bool has;
  } types[] = {{"dtype_q", &params::dtype_q, true},
               {"dtype_kv", &params::dtype_kv, true},
               {"dtype_out", &params::dtype_out, true},
               {"dtype_bias", &params::dtype_bias, (found.flags & CQSA_ATTENTION_BIAS) != 0}};
  for (const auto& t : types) {
    const cqsa_dtype value = stated.*t.field;
    if (value == CQSA_DTYPE_NONE || value == found.*t.field) continue;
    if (dtype_bits(value) == 0)
      return fail(CQSA_ERROR_UNKNOWN_FLAG, "params->%s is 0x%08x, which this version does not know%s%s", t.name, static_cast<unsigned>(value),
                  t.has ? ", the tensors say " : "", t.has ? dtype_name(found.*t.field) : "");
    if (t.has)
      return fail(CQSA_ERROR_DTYPE, "params->%s is %s, the tensors say %s", t.name, dtype_name(value), dtype_name(found.*t.field));
    found.*t.field = value;
  }
  return CQSA_OK;
}

// On a host backend all places are host memory and are not compared with the operands later on.
cqsa_status check_host_place(const char* name, int32_t place, const char* tensor_name, const cqsa_tensor& t) {
  const bool pinned = t.device_type == CQSA_DEVICE_CUDA_HOST || t.device_type == CQSA_DEVICE_ROCM_HOST;
  if (place != CQSA_MEMORY_DEVICE && (place != CQSA_MEMORY_PINNED || pinned)) return CQSA_OK;
  return fail(CQSA_ERROR_DEVICE, "params->%s is %s (%d), but %s is on device type %d, that is CQSA_MEMORY_HOST; wanted that, 0, or "
                                 "CQSA_MEMORY_MAPPED (4)",
              name, place == CQSA_MEMORY_DEVICE ? "CQSA_MEMORY_DEVICE" : "CQSA_MEMORY_PINNED", place, tensor_name, t.device_type);
}

// HOST is 0, which is also what is not stated.
cqsa_status keep_places(const cqsa_backend_v1& backend, const params& stated, const args_type& args, params& found) {
  const struct {
    const char* name;
    int32_t params::*field;
    const char* tensor_name;
    const cqsa_tensor* tensor;
  } places[] = {{"memory_q", &params::memory_q, "args->q", args.q},
                {"memory_kv", &params::memory_kv, "args->k", args.k},
                {"memory_out", &params::memory_out, "args->out", args.out}};
  for (const auto& place : places) {
    const int32_t value = stated.*place.field;
    if (value == CQSA_MEMORY_HOST) continue;
    if (backend.flags & CQSA_BACKEND_HOST) CQSA_TRY(check_host_place(place.name, value, place.tensor_name, *place.tensor));
    found.*place.field = value;
  }
  return CQSA_OK;
}

// A single scale is also one per head, or per token, of a single one.
cqsa_status keep_scale(const char* name, int32_t stated, int32_t& found) {
  const bool clear = found == CQSA_SCALE_HEAD || found == CQSA_SCALE_TOKEN;
  if (clear && stated != found && stated > CQSA_SCALE_NONE && stated < CQSA_SCALE_GROUP)
    return fail(CQSA_ERROR_SHAPE, "params->%s is %d (CQSA_SCALE_*), the tensors say %d", name, stated, found);
  if (stated != CQSA_SCALE_NONE) found = stated;
  return CQSA_OK;
}

}  // namespace

cqsa_status complete_params(const cqsa_backend_v1& backend, const cqsa_attention_args& args, cqsa_attention_params& inout) {
  if (inout.num_heads) return CQSA_OK;
  const params stated = inout;
  params found = inout;
  CQSA_TRY(params_of(backend, args, found));
  CQSA_TRY(check_presence(stated, found));
  CQSA_TRY(check_sizes(stated, found));
  keep_bounds(stated, args, found);
  CQSA_TRY(check_dtypes(stated, found));
  CQSA_TRY(keep_places(backend, stated, args, found));
  CQSA_TRY(keep_scale("scale_k", stated.scale_k, found.scale_k));
  CQSA_TRY(keep_scale("scale_v", stated.scale_v, found.scale_v));
  if (stated.kv_group != 0) found.kv_group = stated.kv_group;
  // What is not promised may be so all the same.
  if (stated.mask_broadcast != 0) found.mask_broadcast = stated.mask_broadcast;
  if (stated.bias_broadcast != 0) found.bias_broadcast = stated.bias_broadcast;
  inout = found;
  return CQSA_OK;
}

}  // namespace cqsa
