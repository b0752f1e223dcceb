// SPDX-License-Identifier: Apache-2.0
// The params: checked one by one, then against each other, then completed. operands.cpp has the tensors.
#include "ops/attention/problem.h"

#include <algorithm>
#include <cfloat>
#include <cinttypes>
#include <cmath>
#include <cstddef>

#include "abi_struct.h"
#include "ops/attention/decompose.h"
#include "tensor.h"

namespace cqsa {

namespace {

using params = cqsa_attention_params;

// Sizes that the structs had in 0.1, the first version.
constexpr uint32_t first_params_size = offsetof(params, tile_k) + sizeof(int64_t);
constexpr uint32_t first_args_size = offsetof(cqsa_attention_args, info) + sizeof(cqsa_run_info*);
constexpr uint32_t known_broadcast = (CQSA_BROADCAST_KEY << 1) - 1;
constexpr int64_t most = INT64_MAX;

cqsa_status check_range(const char* name, int64_t value, int64_t low, int64_t high = most) {
  if (value >= low && value <= high) return CQSA_OK;
  if (low == high) return fail(CQSA_ERROR_INVALID_ARGUMENT, "params->%s is %" PRId64 ", wanted %" PRId64, name, value, low);
  if (high == most)
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "params->%s is %" PRId64 ", wanted at least %" PRId64, name, value, low);
  return fail(CQSA_ERROR_INVALID_ARGUMENT, "params->%s is %" PRId64 ", wanted %" PRId64 " to %" PRId64, name, value, low,
              high);
}

// A field that counts only under a condition must be zero without it: a wish is refused, never dropped in silence.
cqsa_status check_zero(const char* name, int64_t value, const char* condition) {
  if (value == 0) return CQSA_OK;
  return fail(CQSA_ERROR_INVALID_ARGUMENT, "params->%s is %" PRId64 ", wanted 0 without %s", name, value, condition);
}

cqsa_status check_enum(const char* name, int64_t value, int64_t last, const char* group) {
  if (value >= 0 && value <= last) return CQSA_OK;
  return fail(CQSA_ERROR_UNKNOWN_FLAG,
              "params->%s is %" PRId64 ", which is no %s value that this version knows (0 to %" PRId64 ")", name, value,
              group, last);
}

cqsa_status check_heads(const params& p) {
  CQSA_TRY(check_range("batch", p.batch, 0));
  CQSA_TRY(check_range("num_heads", p.num_heads, 1));
  CQSA_TRY(check_range("num_kv_heads", p.num_kv_heads, 1));
  if (p.num_heads % p.num_kv_heads != 0)
    return fail(CQSA_ERROR_INVALID_ARGUMENT,
                "params->num_heads is %" PRId64 ", wanted a multiple of params->num_kv_heads, which is %" PRId64,
                p.num_heads, p.num_kv_heads);
  CQSA_TRY(check_range("head_dim", p.head_dim, 1, 576));
  return check_range("head_dim_v", p.head_dim_v, 1, 512);
}

cqsa_status check_lengths(const params& p) {
  const bool varlen = p.flags & CQSA_ATTENTION_VARLEN, paged = p.flags & CQSA_ATTENTION_PAGED;
  CQSA_TRY(check_range("seqlen_q", p.seqlen_q, 0));
  CQSA_TRY(check_range("seqlen_k", p.seqlen_k, 0));
  CQSA_TRY(check_range("total_q", p.total_q, 0));
  CQSA_TRY(check_range("total_k", p.total_k, 0));
  if (!varlen) CQSA_TRY(check_zero("total_q", p.total_q, "CQSA_ATTENTION_VARLEN"));
  if (!varlen) CQSA_TRY(check_zero("total_k", p.total_k, "CQSA_ATTENTION_VARLEN"));
  if (paged && p.total_k != 0)
    return fail(CQSA_ERROR_INVALID_ARGUMENT,
                "params->total_k is %" PRId64 ", wanted 0 with CQSA_ATTENTION_PAGED: keys are in pages", p.total_k);
  if (!paged) CQSA_TRY(check_zero("page_size", p.page_size, "CQSA_ATTENTION_PAGED"));
  if (!paged) return check_zero("num_pages", p.num_pages, "CQSA_ATTENTION_PAGED");
  CQSA_TRY(check_range("page_size", p.page_size, 1));
  return check_range("num_pages", p.num_pages, 0);
}

bool is_8bit_kv(cqsa_dtype dtype) {
  return dtype == CQSA_DTYPE_I8 || dtype == CQSA_DTYPE_E4M3FN || dtype == CQSA_DTYPE_E5M2;
}

bool is_compute_float(cqsa_dtype dtype) {
  return dtype == CQSA_DTYPE_F32 || dtype == CQSA_DTYPE_F16 || dtype == CQSA_DTYPE_BF16;
}

// The message gives dtype_q as the reason, except when it is dtype_q that is wrong (reason_q NONE).
cqsa_status fail_dtype(const char* name, cqsa_dtype dtype, const char* wanted, cqsa_dtype reason_q = CQSA_DTYPE_NONE) {
  const char* q = reason_q != CQSA_DTYPE_NONE ? dtype_name(reason_q) : "";
  const char* reason = reason_q != CQSA_DTYPE_NONE ? ", because params->dtype_q is " : "";
  if (dtype == CQSA_DTYPE_NONE)
    return fail(CQSA_ERROR_DTYPE, "params->%s is not given (CQSA_DTYPE_NONE), wanted %s%s%s", name, wanted, reason, q);
  if (dtype_bits(dtype) == 0)
    return fail(CQSA_ERROR_UNKNOWN_FLAG, "params->%s is 0x%08x, which this version does not know, wanted %s%s%s", name,
                static_cast<unsigned>(dtype), wanted, reason, q);
  return fail(CQSA_ERROR_DTYPE, "params->%s is %s, wanted %s%s%s", name, dtype_name(dtype), wanted, reason, q);
}

// out and bias: f64 goes with f64 only, the others with each other.
cqsa_status check_partner(const char* name, cqsa_dtype dtype, cqsa_dtype q) {
  if (q == CQSA_DTYPE_F64) return dtype == q ? CQSA_OK : fail_dtype(name, dtype, "f64", q);
  return is_compute_float(dtype) ? CQSA_OK : fail_dtype(name, dtype, "f32, f16 or bf16", q);
}

cqsa_status check_dtypes(const params& p) {
  const bool f64 = p.dtype_q == CQSA_DTYPE_F64;
  if (!f64 && !is_compute_float(p.dtype_q)) return fail_dtype("dtype_q", p.dtype_q, "f32, f16, bf16 or f64");
  if (p.dtype_kv != p.dtype_q && f64) return fail_dtype("dtype_kv", p.dtype_kv, "f64", p.dtype_q);
  if (p.dtype_kv != p.dtype_q && !is_8bit_kv(p.dtype_kv))
    return fail_dtype("dtype_kv", p.dtype_kv, "the same as dtype_q, or i8, e4m3fn or e5m2", p.dtype_q);
  if (p.dtype_out != CQSA_DTYPE_NONE) CQSA_TRY(check_partner("dtype_out", p.dtype_out, p.dtype_q));
  if (p.flags & CQSA_ATTENTION_BIAS) return check_partner("dtype_bias", p.dtype_bias, p.dtype_q);
  if (p.dtype_bias == CQSA_DTYPE_NONE) return CQSA_OK;
  if (dtype_bits(p.dtype_bias) == 0) return fail_dtype("dtype_bias", p.dtype_bias, "CQSA_DTYPE_NONE without CQSA_ATTENTION_BIAS");
  return fail(CQSA_ERROR_INVALID_ARGUMENT, "params->dtype_bias is %s, wanted CQSA_DTYPE_NONE without CQSA_ATTENTION_BIAS",
              dtype_name(p.dtype_bias));
}

cqsa_status check_scale_kind(const char* name, int32_t kind, cqsa_dtype kv) {
  CQSA_TRY(check_enum(name, kind, CQSA_SCALE_GROUP, "CQSA_SCALE"));
  const char* wanted = nullptr;
  if (kv == CQSA_DTYPE_I8) {
    if (kind != CQSA_SCALE_GROUP) wanted = "CQSA_SCALE_GROUP (4)";
  } else if (is_8bit_kv(kv)) {
    if (kind == CQSA_SCALE_GROUP) wanted = "CQSA_SCALE_NONE, _TENSOR, _HEAD or _TOKEN (0 to 3)";
  } else if (kind != CQSA_SCALE_NONE) {
    wanted = "CQSA_SCALE_NONE (0)";
  }
  if (wanted == nullptr) return CQSA_OK;
  return fail(CQSA_ERROR_INVALID_ARGUMENT, "params->%s is %d, wanted %s, because params->dtype_kv is %s", name, kind, wanted,
              dtype_name(kv));
}

cqsa_status check_scales(const params& p) {
  CQSA_TRY(check_scale_kind("scale_k", p.scale_k, p.dtype_kv));
  CQSA_TRY(check_scale_kind("scale_v", p.scale_v, p.dtype_kv));
  if (p.dtype_kv != CQSA_DTYPE_I8) return check_zero("kv_group", p.kv_group, "dtype_kv CQSA_DTYPE_I8");
  if (p.kv_group == 32 || p.kv_group == 64 || p.kv_group == 128) return CQSA_OK;
  return fail(CQSA_ERROR_INVALID_ARGUMENT,
              "params->kv_group is %" PRId64 ", wanted 32, 64 or 128, because params->dtype_kv is i8", p.kv_group);
}

cqsa_status check_place(const char* name, int32_t place) {
  if (place == CQSA_MEMORY_TILE)
    return fail(CQSA_ERROR_INVALID_ARGUMENT,
                "params->%s is CQSA_MEMORY_TILE (3), which only a plan's description has; wanted "
                "CQSA_MEMORY_HOST, _PINNED or _DEVICE (0 to 2), or _MAPPED (4)",
                name);
  return check_enum(name, place, CQSA_MEMORY_MAPPED, "CQSA_MEMORY");
}

cqsa_status check_window_side(const params& p, const char* name, int64_t value) {
  if (p.flags & CQSA_ATTENTION_WINDOW) return check_range(name, value, -1);
  if (value == 0 || value == -1) return CQSA_OK;
  return fail(CQSA_ERROR_INVALID_ARGUMENT,
              "params->%s is %" PRId64 ", but params->flags lack CQSA_ATTENTION_WINDOW, without which it is not used", name,
              value);
}

cqsa_status check_logits(const params& p) {
  CQSA_TRY(check_enum("causal", p.causal, CQSA_CAUSAL_BOTTOM_RIGHT, "CQSA_CAUSAL"));
  CQSA_TRY(check_window_side(p, "window_left", p.window_left));
  CQSA_TRY(check_window_side(p, "window_right", p.window_right));
  if (!std::isfinite(p.softmax_scale))
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "params->softmax_scale is %g, wanted a finite number", p.softmax_scale);
  if (p.dtype_q != CQSA_DTYPE_F64 && std::fabs(p.softmax_scale) > FLT_MAX)
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "params->softmax_scale is %g, wanted at most %g in magnitude, since logits are f32",
                p.softmax_scale, static_cast<double>(FLT_MAX));
  if (!std::isfinite(p.softcap) || p.softcap < 0)
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "params->softcap is %g, wanted a finite number >= 0", p.softcap);
  if (!(p.dropout == 0))
    return fail(CQSA_ERROR_UNSUPPORTED, "params->dropout is %g, wanted 0: there is no dropout in this library", p.dropout);
  return CQSA_OK;
}

cqsa_status check_broadcast(const params& p, const char* name, uint32_t bits, uint32_t flag, const char* flag_name) {
  if (bits & ~known_broadcast)
    return fail(CQSA_ERROR_UNKNOWN_FLAG, "params->%s has the unknown bits 0x%x", name, bits & ~known_broadcast);
  return p.flags & flag ? CQSA_OK : check_zero(name, bits, flag_name);
}

// CQS cuts queries and keys into the same chunks, so it is self-attention of whole sequences.
cqsa_status check_cqs_shape(const params& p) {
  const char* with = p.flags & CQSA_ATTENTION_VARLEN      ? "CQSA_ATTENTION_VARLEN"
                     : p.flags & CQSA_ATTENTION_PAGED     ? "CQSA_ATTENTION_PAGED"
                     : p.flags & CQSA_ATTENTION_SEQUSED_K ? "CQSA_ATTENTION_SEQUSED_K"
                                                          : nullptr;
  if (with != nullptr)
    return fail(CQSA_ERROR_UNSUPPORTED,
                "params->schedule is CQSA_SCHEDULE_CQS, which does not take %s; CQSA_SCHEDULE_AUTO does", with);
  if (p.seqlen_q == p.seqlen_k) return CQSA_OK;
  return fail(CQSA_ERROR_INVALID_ARGUMENT,
              "params->schedule is CQSA_SCHEDULE_CQS, which wants seqlen_q = seqlen_k, but they are %" PRId64
              " and %" PRId64,
              p.seqlen_q, p.seqlen_k);
}

cqsa_status check_schedule(const params& p) {
  CQSA_TRY(check_enum("schedule", p.schedule, CQSA_SCHEDULE_CQS, "CQSA_SCHEDULE"));
  CQSA_TRY(check_enum("precision", p.precision, CQSA_PRECISION_F32, "CQSA_PRECISION"));
  CQSA_TRY(check_range("tile_q", p.tile_q, 0));
  CQSA_TRY(check_range("tile_k", p.tile_k, 0));
  if (p.schedule != CQSA_SCHEDULE_CQS) CQSA_TRY(check_zero("cqs_c", p.cqs_c, "CQSA_SCHEDULE_CQS"));
  if (p.schedule != CQSA_SCHEDULE_CQS) return check_zero("cqs_itr", p.cqs_itr, "CQSA_SCHEDULE_CQS");
  if (p.cqs_c != 0 && find_quorum_set(p.cqs_c) == nullptr)
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "params->cqs_c is %d, wanted 0 or 3, 7, 13, 21, 31, 57, 73, 91 or 133",
                p.cqs_c);
  CQSA_TRY(check_range("cqs_itr", p.cqs_itr, 0, 3));
  return check_cqs_shape(p);
}

// Largest bytes of an element of anything that is indexed with these sizes (f64, or f32 state with room to spare).
constexpr int64_t element = 8;

cqsa_status check_product(const char* what, int64_t a, int64_t b, int64_t c, int64_t d) {
  int64_t product = element;
  bool overflow = false;
  for (const int64_t factor : {a, b, c, d}) overflow |= multiply_overflows(product, std::max<int64_t>(factor, 1), &product);
  if (!overflow) return CQSA_OK;
  return fail(CQSA_ERROR_SHAPE,
              "params->%s are %" PRId64 " * %" PRId64 " * %" PRId64 " * %" PRId64 ", whose bytes overflow 64 bits", what, a,
              b, c, d);
}

// After this, element offsets, byte counts and row counts of the problem fit in int64, and so does seqlen_q + seqlen_k.
cqsa_status check_products(const params& p) {
  const int64_t dim = std::max(p.head_dim, p.head_dim_v);
  const bool varlen = p.flags & CQSA_ATTENTION_VARLEN, paged = p.flags & CQSA_ATTENTION_PAGED;
  CQSA_TRY(check_product("batch, seqlen_q, num_heads", p.batch, p.seqlen_q, p.num_heads, 1));
  CQSA_TRY(check_product("batch, seqlen_k, num_kv_heads", p.batch, p.seqlen_k, p.num_kv_heads, 1));
  if (varlen) CQSA_TRY(check_product("total_q, num_heads, head_dim", p.total_q, p.num_heads, dim, 1));
  if (!varlen) CQSA_TRY(check_product("batch, seqlen_q, num_heads, head_dim", p.batch, p.seqlen_q, p.num_heads, dim));
  if (paged)
    return check_product("num_pages, page_size, num_kv_heads, head_dim", p.num_pages, p.page_size, p.num_kv_heads, dim);
  if (varlen) return check_product("total_k, num_kv_heads, head_dim", p.total_k, p.num_kv_heads, dim, 1);
  return check_product("batch, seqlen_k, num_kv_heads, head_dim", p.batch, p.seqlen_k, p.num_kv_heads, dim);
}

// In varlen the lengths are bounds, and not given means that the rows are all there is to bound them.
void complete_lengths(params& p) {
  if (!(p.flags & CQSA_ATTENTION_VARLEN)) return;
  if (p.seqlen_q == 0) p.seqlen_q = p.total_q;
  if (p.seqlen_k == 0 && !(p.flags & CQSA_ATTENTION_PAGED)) p.seqlen_k = p.total_k;
}

// A side at least this long hides nothing; as -1 it also keeps position arithmetic clear of overflow.
int64_t complete_window_side(const params& p, int64_t value) {
  return (p.flags & CQSA_ATTENTION_WINDOW) && value < p.seqlen_q + p.seqlen_k ? value : -1;
}

// In f32 a cap above FLT_MAX caps nothing, and its reciprocal must be a number: below this one all logits are 0 to f32 anyway.
double complete_softcap(const params& p) {
  if (p.dtype_q == CQSA_DTYPE_F64 || p.softcap == 0) return p.softcap;
  return p.softcap > FLT_MAX ? 0 : std::max(p.softcap, 4.0 * FLT_MIN);
}

void complete(params& p) {
  p.softcap = complete_softcap(p);
  if (p.dtype_out == CQSA_DTYPE_NONE) p.dtype_out = p.dtype_q;
  if (p.softmax_scale == 0) p.softmax_scale = 1 / std::sqrt(static_cast<double>(p.head_dim));
  p.window_left = complete_window_side(p, p.window_left);
  p.window_right = complete_window_side(p, p.window_right);
}

int64_t row_bytes(int64_t channels, cqsa_dtype dtype) { return channels * dtype_bits(dtype) / 8; }

int64_t scale_row_bytes(int32_t kind, int64_t channels, int64_t group) {
  if (kind == CQSA_SCALE_TOKEN) return row_bytes(1, CQSA_DTYPE_F32);
  return kind == CQSA_SCALE_GROUP ? row_bytes((channels + group - 1) / group, CQSA_DTYPE_F16) : 0;
}

}  // namespace

int64_t attention_problem::q_row_bytes() const { return row_bytes(p.head_dim, p.dtype_q); }
int64_t attention_problem::k_row_bytes() const { return row_bytes(p.head_dim, p.dtype_kv); }
int64_t attention_problem::v_row_bytes() const { return row_bytes(p.head_dim_v, p.dtype_kv); }
int64_t attention_problem::out_row_bytes() const { return row_bytes(p.head_dim_v, p.dtype_out); }
int64_t attention_problem::k_scale_row_bytes() const { return scale_row_bytes(p.scale_k, p.head_dim, p.kv_group); }
int64_t attention_problem::v_scale_row_bytes() const { return scale_row_bytes(p.scale_v, p.head_dim_v, p.kv_group); }

cqsa_status make_problem(const cqsa_attention_params* caller, attention_problem& out) {
  params p;
  CQSA_TRY(copy_struct(caller, "params", first_params_size, attention_flags, p));
  CQSA_TRY(check_heads(p));
  CQSA_TRY(check_lengths(p));
  CQSA_TRY(check_dtypes(p));
  CQSA_TRY(check_scales(p));
  CQSA_TRY(check_place("memory_q", p.memory_q));
  CQSA_TRY(check_place("memory_kv", p.memory_kv));
  CQSA_TRY(check_place("memory_out", p.memory_out));
  if (p.memory_kv == CQSA_MEMORY_MAPPED && (p.flags & CQSA_ATTENTION_PAGED))
    return fail(CQSA_ERROR_UNSUPPORTED, "params->memory_kv is CQSA_MEMORY_MAPPED, which does not take CQSA_ATTENTION_PAGED: any "
                                        "row may touch any page; CQSA_MEMORY_HOST does");
  CQSA_TRY(check_logits(p));
  CQSA_TRY(check_broadcast(p, "mask_broadcast", p.mask_broadcast, CQSA_ATTENTION_MASK, "CQSA_ATTENTION_MASK"));
  CQSA_TRY(check_broadcast(p, "bias_broadcast", p.bias_broadcast, CQSA_ATTENTION_BIAS, "CQSA_ATTENTION_BIAS"));
  CQSA_TRY(check_schedule(p));
  complete_lengths(p);
  CQSA_TRY(check_products(p));
  complete(p);
  out.p = p;
  return CQSA_OK;
}

cqsa_status copy_args(const cqsa_attention_args* args, cqsa_attention_args& out) {
  return copy_struct(args, "args", first_args_size, 0, out);
}

}  // namespace cqsa
