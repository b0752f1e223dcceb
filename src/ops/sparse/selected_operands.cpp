// SPDX-License-Identifier: Apache-2.0
// The arguments of attention over selected cells: each checked, then turned into the leaf.
#include <cfloat>
#include <cinttypes>
#include <cmath>

#include "ops/attention/enqueue.h"
#include "ops/sparse/selected.h"
#include "tensor.h"

namespace cqsa {

namespace {

using args_type = cqsa_attention_selected_args;
using tensor_member = const cqsa_tensor* args_type::*;

constexpr int64_t most_head_dim = 576, most_head_dim_v = 512;
constexpr int64_t default_group = 64;

struct operand {
  tensor_member tensor;
  const char* name;
  int min_ndim, max_ndim;
  bool optional, is_output;
};

constexpr operand operands[] = {
    {&args_type::q, "args->q", 3, 3, false, false},
    {&args_type::k, "args->k", 4, 4, false, false},
    {&args_type::v, "args->v", 4, 4, false, false},
    {&args_type::k_scale, "args->k_scale", 4, 4, true, false},
    {&args_type::v_scale, "args->v_scale", 4, 4, true, false},
    {&args_type::page_table, "args->page_table", 1, 2, false, false},
    {&args_type::cells, "args->cells", 2, 2, false, false},
    {&args_type::counts, "args->counts", 1, 1, false, false},
    {&args_type::out, "args->out", 3, 3, false, true},
    {&args_type::lse, "args->lse", 2, 2, true, true},
};
constexpr int num_operands = sizeof operands / sizeof *operands;

bool is_float(cqsa_dtype t) { return t == CQSA_DTYPE_F32 || t == CQSA_DTYPE_F16 || t == CQSA_DTYPE_BF16; }

cqsa_status check_tensors(const args_type& a) {
  for (const operand& o : operands) {
    byte_extent extent;
    if (a.*o.tensor == nullptr && o.optional) continue;
    CQSA_TRY(check_tensor(a.*o.tensor, o.name, o.min_ndim, o.max_ndim, &extent));
  }
  return CQSA_OK;
}

// ---- numbers ----------------------------------------------------------------------------------------------------------------

cqsa_status check_precision(const cqsa_context& context, const args_type& a) {
  if (a.precision < 0 || a.precision > CQSA_PRECISION_F32)
    return fail(CQSA_ERROR_UNKNOWN_FLAG,
                "args->precision is %" PRId32 ", which is no CQSA_PRECISION value that this version knows (0 to %d)", a.precision,
                CQSA_PRECISION_F32);
  if (a.precision == CQSA_PRECISION_FAST && a.q->dtype == CQSA_DTYPE_BF16 && context.chip.tier == 70)
    return fail(CQSA_ERROR_UNSUPPORTED, "args->precision is CQSA_PRECISION_FAST and args->q is bf16, which the tensor cores of this device "
                                        "(sm_70) do not multiply; CQSA_PRECISION_SPLIT, _F32 and _DEFAULT do without them");
  return CQSA_OK;
}

cqsa_status check_scale(const args_type& a) {
  if (!std::isfinite(a.softmax_scale))
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->softmax_scale is %g, wanted a finite number", a.softmax_scale);
  if (std::fabs(a.softmax_scale) > FLT_MAX)
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->softmax_scale is %g, wanted at most %g in magnitude, since logits are f32",
                a.softmax_scale, static_cast<double>(FLT_MAX));
  return CQSA_OK;
}

cqsa_status check_group(const args_type& a) {
  const int32_t g = a.kv_group;
  if (a.k->dtype != CQSA_DTYPE_I8 && g != 0)
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->kv_group is %" PRId32 ", wanted 0, because args->k is %s", g, dtype_name(a.k->dtype));
  if (g == 0 || g == 32 || g == 64 || g == 128) return CQSA_OK;
  return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->kv_group is %" PRId32 ", wanted 32, 64 or 128, or 0 for %" PRId64, g, default_group);
}

cqsa_status check_size(const char* what, int64_t size, int64_t low, int64_t high) {
  if (size >= low && size <= high) return CQSA_OK;
  if (high == INT64_MAX) return fail(CQSA_ERROR_SHAPE, "%s is %" PRId64 ", wanted at least %" PRId64, what, size, low);
  return fail(CQSA_ERROR_SHAPE, "%s is %" PRId64 ", wanted %" PRId64 " to %" PRId64, what, size, low, high);
}

cqsa_status check_sizes(const cqsa_selected_leaf& n) {
  CQSA_TRY(check_size("num_heads (axis 1 of args->q)", n.num_heads, 1, INT64_MAX));
  CQSA_TRY(check_size("num_kv_heads (axis 2 of args->k)", n.num_kv_heads, 1, INT64_MAX));
  if (n.num_heads % n.num_kv_heads != 0)
    return fail(CQSA_ERROR_SHAPE, "num_heads (axis 1 of args->q) is %" PRId64 ", wanted a multiple of num_kv_heads (axis 2 of args->k), "
                                  "which is %" PRId64, n.num_heads, n.num_kv_heads);
  CQSA_TRY(check_size("page_size (axis 1 of args->k)", n.page_size, 1, INT64_MAX));
  CQSA_TRY(check_size("head_dim (axis 2 of args->q)", n.head_dim, 1, most_head_dim));
  return check_size("head_dim_v (axis 3 of args->v)", n.head_dim_v, 1, most_head_dim_v);
}

// ---- types and shapes -------------------------------------------------------------------------------------------------------

cqsa_status fail_dtype(const char* name, const cqsa_tensor& t, const char* wanted) {
  return fail(CQSA_ERROR_DTYPE, "%s is %s, wanted %s", name, dtype_name(t.dtype), wanted);
}

cqsa_status check_dtypes(const args_type& a) {
  const cqsa_dtype q = a.q->dtype, k = a.k->dtype;
  if (!is_float(q)) return fail_dtype("args->q", *a.q, "f32, f16 or bf16");
  if (k != q && k != CQSA_DTYPE_F16 && k != CQSA_DTYPE_I8)
    return fail(CQSA_ERROR_DTYPE, "args->k is %s, wanted the type of args->q, %s, or f16 or i8", dtype_name(k), dtype_name(q));
  if (a.v->dtype != k)
    return fail(CQSA_ERROR_DTYPE, "args->v is %s, wanted the type of args->k, %s", dtype_name(a.v->dtype), dtype_name(k));
  if (a.page_table->dtype != CQSA_DTYPE_I32) return fail_dtype("args->page_table", *a.page_table, "i32");
  if (a.cells->dtype != CQSA_DTYPE_I32) return fail_dtype("args->cells", *a.cells, "i32");
  if (a.counts->dtype != CQSA_DTYPE_I32) return fail_dtype("args->counts", *a.counts, "i32");
  if (!is_float(a.out->dtype)) return fail_dtype("args->out", *a.out, "f32, f16 or bf16");
  if (a.lse && a.lse->dtype != CQSA_DTYPE_F32) return fail_dtype("args->lse", *a.lse, "f32");
  return CQSA_OK;
}

cqsa_status check_scales(const args_type& a) {
  const bool wanted = a.k->dtype == CQSA_DTYPE_I8;
  for (const tensor_member member : {&args_type::k_scale, &args_type::v_scale}) {
    const cqsa_tensor* const t = a.*member;
    const char* const name = member == &args_type::k_scale ? "args->k_scale" : "args->v_scale";
    if (wanted && t == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "%s is NULL, but args->k is i8, whose scales it holds", name);
    if (!wanted && t != nullptr)
      return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s is given, wanted NULL, because args->k is %s", name, dtype_name(a.k->dtype));
    if (t != nullptr && t->dtype != CQSA_DTYPE_F16) return fail_dtype(name, *t, "f16");
  }
  return CQSA_OK;
}

cqsa_selected_leaf numbers_of(const cqsa_context& context, const args_type& a) {
  cqsa_selected_leaf n{};
  n.struct_size = sizeof n;
  n.total_q = a.q->shape[0];
  n.num_heads = a.q->shape[1];
  n.head_dim = a.q->shape[2];
  n.num_pages = a.k->shape[0];
  n.page_size = a.k->shape[1];
  n.num_kv_heads = a.k->shape[2];
  n.head_dim_v = a.v->shape[3];
  n.pages = a.page_table->shape[a.page_table->ndim - 1];
  n.capacity = a.cells->shape[1];
  n.kv_group = a.k->dtype != CQSA_DTYPE_I8 ? 0 : a.kv_group != 0 ? a.kv_group : default_group;
  n.softmax_scale = a.softmax_scale != 0 || n.head_dim < 1 ? a.softmax_scale : 1 / std::sqrt(static_cast<double>(n.head_dim));
  n.precision = a.precision;
  n.chip = context.chip;
  return n;
}

int64_t groups_of(int64_t channels, int64_t group) { return (channels + group - 1) / group; }

cqsa_status check_pool(const cqsa_selected_leaf& n, const cqsa_tensor* t, const char* name, int64_t last, const char* last_name) {
  if (t == nullptr) return CQSA_OK;
  const int64_t wanted[] = {n.num_pages, n.page_size, n.num_kv_heads, last};
  const char* const names[] = {"num_pages", "page_size", "num_kv_heads", last_name};
  return check_shape(*t, name, wanted, 4, false, names);
}

cqsa_status check_pools(const cqsa_selected_leaf& n, const args_type& a) {
  CQSA_TRY(check_pool(n, a.k, "args->k", n.head_dim, "head_dim"));
  CQSA_TRY(check_pool(n, a.v, "args->v", n.head_dim_v, "head_dim_v"));
  if (n.kv_group == 0) return CQSA_OK;
  CQSA_TRY(check_pool(n, a.k_scale, "args->k_scale", groups_of(n.head_dim, n.kv_group), "groups of kv_group channels"));
  return check_pool(n, a.v_scale, "args->v_scale", groups_of(n.head_dim_v, n.kv_group), "groups of kv_group channels");
}

cqsa_status check_rows(const cqsa_selected_leaf& n, const args_type& a) {
  const char* const list_names[] = {"total_q", "capacity"};
  const char* const table_names[] = {"total_q", "pages"};
  const char* const out_names[] = {"total_q", "num_heads", "head_dim_v"};
  const char* const lse_names[] = {"num_heads", "total_q"};
  const int64_t list[] = {n.total_q, n.capacity}, table[] = {n.total_q, n.pages};
  const int64_t out[] = {n.total_q, n.num_heads, n.head_dim_v}, lse[] = {n.num_heads, n.total_q};
  CQSA_TRY(check_shape(*a.cells, "args->cells", list, 2, false, list_names));
  CQSA_TRY(check_shape(*a.counts, "args->counts", list, 1, false, list_names));
  if (a.page_table->ndim == 2) CQSA_TRY(check_shape(*a.page_table, "args->page_table", table, 2, false, table_names));
  CQSA_TRY(check_shape(*a.out, "args->out", out, 3, false, out_names));
  return a.lse ? check_shape(*a.lse, "args->lse", lse, 2, false, lse_names) : CQSA_OK;
}

// ---- places and overlap -----------------------------------------------------------------------------------------------------

bool is_usable(const cqsa_context& context, int32_t device_type) {
  if (!context.is_host()) return device_type == context.backend->device_type;
  return device_type == CQSA_DEVICE_CPU || device_type == CQSA_DEVICE_CUDA_HOST || device_type == CQSA_DEVICE_ROCM_HOST;
}

cqsa_status check_device(const cqsa_context& context, const cqsa_tensor& t, const char* name, pointer_answers& answers) {
  const cqsa_backend_v1& backend = *context.backend;
  if (!is_usable(context, t.device_type))
    return fail(CQSA_ERROR_DEVICE, "%s is on device type %" PRId32 ", wanted %" PRId32 " (backend %s)", name, t.device_type,
                backend.device_type, backend.name);
  if (context.is_host()) return CQSA_OK;
  if (t.device_id != context.device_index)
    return fail(CQSA_ERROR_DEVICE, "%s is on device %" PRId32 ", the context is for device %" PRId32, name, t.device_id,
                context.device_index);
  return check_pointer(context, t, name, answers);
}

cqsa_status check_devices(const cqsa_context& context, const args_type& a, pointer_answers& answers) {
  for (const operand& o : operands)
    if (a.*o.tensor) CQSA_TRY(check_device(context, *(a.*o.tensor), o.name, answers));
  return CQSA_OK;
}

cqsa_status check_outputs(const args_type& a) {
  for (const operand& o : operands) {
    if (!o.is_output || a.*o.tensor == nullptr) continue;
    CQSA_TRY(check_no_self_overlap(*(a.*o.tensor), o.name));
    for (const operand& other : operands)
      if (!other.is_output && a.*other.tensor) CQSA_TRY(check_no_overlap(*(a.*o.tensor), o.name, *(a.*other.tensor), other.name));
  }
  return a.lse ? check_no_overlap(*a.out, "args->out", *a.lse, "args->lse") : CQSA_OK;
}

cqsa_status check_workspace_place(const cqsa_context& context, const args_type& a, pointer_answers& answers) {
  if (a.workspace_bytes == 0 || context.backend->pointer_query == nullptr) return CQSA_OK;
  cqsa_pointer_info found;
  CQSA_TRY(answers.ask(context, reinterpret_cast<uintptr_t>(a.workspace), "args->workspace", found));
  if (found.kind == CQSA_POINTER_MANAGED || (found.kind == CQSA_POINTER_DEVICE && found.device == context.device_index)) return CQSA_OK;
  return fail(CQSA_ERROR_WORKSPACE, "args->workspace is not memory of %s device %" PRId32, context.backend->name, context.device_index);
}

// All of it is the call's, whatever of it is needed.
cqsa_status check_workspace(const cqsa_context& context, const args_type& a, pointer_answers& answers) {
  const auto address = reinterpret_cast<uintptr_t>(a.workspace);
  if (a.workspace == nullptr && a.workspace_bytes == 0) return CQSA_OK;
  if (a.workspace == nullptr)
    return fail(CQSA_ERROR_NULL_POINTER, "args->workspace is NULL with workspace_bytes %" PRIu64, a.workspace_bytes);
  if (address % CQSA_WORKSPACE_ALIGNMENT)
    return fail(CQSA_ERROR_WORKSPACE, "args->workspace is not aligned to %d bytes", CQSA_WORKSPACE_ALIGNMENT);
  if (a.workspace_bytes > INT64_MAX || address > UINTPTR_MAX - a.workspace_bytes)
    return fail(CQSA_ERROR_WORKSPACE, "args->workspace with workspace_bytes %" PRIu64 " reaches past the end of the address space",
                a.workspace_bytes);
  CQSA_TRY(check_workspace_place(context, a, answers));
  int64_t bytes = static_cast<int64_t>(a.workspace_bytes);
  const cqsa_tensor workspace{a.workspace, CQSA_DEVICE_CPU, 0, 1, CQSA_DTYPE_U8, &bytes, nullptr, 0};
  for (const operand& o : operands)
    if (a.*o.tensor) CQSA_TRY(check_no_overlap(workspace, "args->workspace", *(a.*o.tensor), o.name));
  return CQSA_OK;
}

// ---- the leaf ---------------------------------------------------------------------------------------------------------------

// An empty operand may have data NULL, but in a view NULL says that there is none. Never followed.
alignas(64) char somewhere[64];

void* first_element(const cqsa_tensor& t) { return is_empty(t) ? somewhere : reinterpret_cast<void*>(address_of(t)); }

// axis[i]: the axis of the tensor that the view's axis i is, -1: none.
cqsa_view view_of(const cqsa_tensor* t, int a0, int a1, int a2, int a3) {
  if (t == nullptr) return {};
  int64_t strides[max_axes];
  strides_of(*t, strides);
  const auto along = [&](int axis) { return axis < 0 ? 0 : strides[axis]; };
  return {first_element(*t), t->dtype, 0, {along(a0), along(a1), along(a2), along(a3)}};
}

void fill_views(const args_type& a, cqsa_selected_leaf& leaf) {
  leaf.q = view_of(a.q, -1, 1, 0, 2);
  leaf.k = view_of(a.k, 0, 2, 1, 3);
  leaf.v = view_of(a.v, 0, 2, 1, 3);
  leaf.k_scale = view_of(a.k_scale, 0, 2, 1, 3);
  leaf.v_scale = view_of(a.v_scale, 0, 2, 1, 3);
  leaf.out = view_of(a.out, -1, 1, 0, 2);
  leaf.lse = view_of(a.lse, -1, 0, 1, -1);
}

void fill_lists(const args_type& a, cqsa_selected_leaf& leaf) {
  leaf.cells = static_cast<const int32_t*>(first_element(*a.cells));
  leaf.counts = static_cast<const int32_t*>(first_element(*a.counts));
  leaf.page_table = static_cast<const int32_t*>(first_element(*a.page_table));
  int64_t table[2];
  strides_of(*a.page_table, table);
  strides_of(*a.cells, leaf.cells_stride);
  strides_of(*a.counts, &leaf.counts_stride);
  leaf.page_table_stride[0] = a.page_table->ndim == 2 ? table[0] : 0;
  leaf.page_table_stride[1] = table[a.page_table->ndim - 1];
}

// The same tensors without what only a run looks at: compact, and at an address that passes every check.
struct shapes_of {
  cqsa_tensor tensors[num_operands];
  args_type args;

  explicit shapes_of(const args_type& given) : args(given) {
    for (int i = 0; i < num_operands; ++i) {
      const cqsa_tensor* const t = given.*operands[i].tensor;
      if (t == nullptr) continue;
      tensors[i] = {somewhere, CQSA_DEVICE_CPU, 0, t->ndim, t->dtype, t->shape, nullptr, 0};
      args.*operands[i].tensor = &tensors[i];
    }
    args.workspace = nullptr;
    args.workspace_bytes = 0;
  }
};

cqsa_status bind_shapes(const cqsa_context& context, const args_type& a, cqsa_selected_leaf& leaf) {
  CQSA_TRY(check_tensors(a));
  CQSA_TRY(check_dtypes(a));
  CQSA_TRY(check_scales(a));
  CQSA_TRY(check_group(a));
  leaf = numbers_of(context, a);
  CQSA_TRY(check_sizes(leaf));
  CQSA_TRY(check_pools(leaf, a));
  CQSA_TRY(check_rows(leaf, a));
  CQSA_TRY(check_scale(a));
  CQSA_TRY(check_precision(context, a));
  fill_views(a, leaf);
  fill_lists(a, leaf);
  return CQSA_OK;
}

}  // namespace

cqsa_status bind_selected(const cqsa_context& context, const args_type& args, bool shapes_only, cqsa_selected_leaf& leaf_out) {
  if (shapes_only) return bind_shapes(context, shapes_of(args).args, leaf_out);
  pointer_answers answers;
  CQSA_TRY(bind_shapes(context, args, leaf_out));
  CQSA_TRY(check_devices(context, args, answers));
  CQSA_TRY(check_outputs(args));
  return check_workspace(context, args, answers);
}

}  // namespace cqsa
