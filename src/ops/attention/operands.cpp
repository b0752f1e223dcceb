// SPDX-License-Identifier: Apache-2.0
// The tensors: params taken from them, and each checked against the params and turned into a view of the leaf.
#include <algorithm>
#include <cinttypes>
#include <cstring>

#include "ops/attention/operand_names.h"
#include "ops/attention/problem.h"
#include "tensor.h"

namespace cqsa {

namespace {

using params = cqsa_attention_params;
using args_type = cqsa_attention_args;

bool is_varlen(const params& p) { return p.flags & CQSA_ATTENTION_VARLEN; }
bool is_paged(const params& p) { return p.flags & CQSA_ATTENTION_PAGED; }

// ---------------------------------------------------------------------------------------------------------- shapes

// The axes of an operand in the caller's order: size, name for messages, and which axis of a cqsa_view each one is.
struct axes {
  int ndim = 0;
  int64_t size[4];
  const char* name[4];
  int of_view[4] = {-1, -1, -1, -1};  // axis of the tensor, -1: the view does not move along it

  void add(int view_axis, int64_t axis_size, const char* axis_name) {
    size[ndim] = axis_size;
    name[ndim] = axis_name;
    of_view[view_axis] = ndim++;
  }
};

enum view_axis { item, head, row, channel };  // of every view but mask and bias, whose last axis is the key

axes query_axes(const params& p, int64_t dim, const char* dim_name) {
  axes a;
  if (!is_varlen(p)) a.add(item, p.batch, "batch");
  if (is_varlen(p)) a.add(row, p.total_q, "total_q");
  a.add(head, p.num_heads, "num_heads");
  if (!is_varlen(p)) a.add(row, p.seqlen_q, "seqlen_q");
  a.add(channel, dim, dim_name);
  return a;
}

axes lse_axes(const params& p) {
  axes a;
  if (!is_varlen(p)) a.add(item, p.batch, "batch");
  a.add(head, p.num_heads, "num_heads");
  a.add(row, is_varlen(p) ? p.total_q : p.seqlen_q, is_varlen(p) ? "total_q" : "seqlen_q");
  return a;
}

// k and v without their last axis, which is also the shape of scales per token.
axes key_axes(const params& p) {
  axes a;
  if (is_paged(p)) {
    a.add(item, p.num_pages, "num_pages");
    a.add(row, p.page_size, "page_size");
    a.add(head, p.num_kv_heads, "num_kv_heads");
  } else if (is_varlen(p)) {
    a.add(row, p.total_k, "total_k");
    a.add(head, p.num_kv_heads, "num_kv_heads");
  } else {
    a.add(item, p.batch, "batch");
    a.add(head, p.num_kv_heads, "num_kv_heads");
    a.add(row, p.seqlen_k, "seqlen_k");
  }
  return a;
}

axes key_axes(const params& p, int64_t dim, const char* dim_name) {
  axes a = key_axes(p);
  a.add(channel, dim, dim_name);
  return a;
}

axes scale_axes(const params& p, int32_t kind, int64_t dim) {
  if (kind == CQSA_SCALE_TOKEN) return key_axes(p);
  if (kind == CQSA_SCALE_GROUP) return key_axes(p, (dim + p.kv_group - 1) / p.kv_group, "groups of kv_group channels");
  axes a;
  if (kind == CQSA_SCALE_HEAD) a.add(head, p.num_kv_heads, "num_kv_heads");
  return a;
}

axes mask_axes(const params& p) {
  axes a;
  a.add(item, p.batch, "batch");
  a.add(head, p.num_heads, "num_heads");
  a.add(row, p.seqlen_q, "seqlen_q");
  a.add(channel, p.seqlen_k, "seqlen_k");
  return a;
}

axes head_axes(const params& p) {
  axes a;
  a.add(head, p.num_heads, "num_heads");
  return a;
}

axes slope_axes(const params& p, const cqsa_tensor* given) {
  if (given == nullptr || given->ndim != 2) return head_axes(p);
  axes a;
  a.add(item, p.batch, "batch");
  a.add(head, p.num_heads, "num_heads");
  return a;
}

// -------------------------------------------------------------------------------------------------------- operands

using tensor_member = const cqsa_tensor* args_type::*;
using view_member = cqsa_view cqsa_attention_leaf::*;

// One operand that becomes a view.
struct operand {
  const char* name;
  tensor_member tensor;
  view_member view;
  cqsa_dtype dtype;
  const char* place_name;  // the field of params that says where it is
  int32_t place;
  bool is_output;
  uint32_t broadcast;  // CQSA_BROADCAST_* that params announce
  bool may_broadcast;  // any axis may have size 1
  axes shape;
};

constexpr int max_operands = 11;

// The operands that the params announce. `args` decides the one shape that params leave open (slopes per batch item).
int list_operands(const params& p, const args_type* args, operand* out) {
  using A = args_type;
  using L = cqsa_attention_leaf;
  int n = 0;
  const auto input = [&](const char* name, tensor_member tensor, view_member view, cqsa_dtype dtype, const axes& shape) {
    out[n++] = {name, tensor, view, dtype, "memory_q", p.memory_q, false, 0, false, shape};
  };
  const auto keys = [&](const char* name, tensor_member tensor, view_member view, cqsa_dtype dtype, const axes& shape) {
    out[n++] = {name, tensor, view, dtype, "memory_kv", p.memory_kv, false, 0, false, shape};
  };
  const auto plane = [&](const char* name, tensor_member tensor, view_member view, cqsa_dtype dtype, uint32_t broadcast) {
    out[n++] = {name, tensor, view, dtype, "memory_q", p.memory_q, false, broadcast, true, mask_axes(p)};
  };
  const auto output = [&](const char* name, tensor_member tensor, view_member view, cqsa_dtype dtype, const axes& shape) {
    out[n++] = {name, tensor, view, dtype, "memory_out", p.memory_out, true, 0, false, shape};
  };
  const auto scale_dtype = [](int32_t kind) { return kind == CQSA_SCALE_GROUP ? CQSA_DTYPE_F16 : CQSA_DTYPE_F32; };

  input("args->q", &A::q, &L::q, p.dtype_q, query_axes(p, p.head_dim, "head_dim"));
  keys("args->k", &A::k, &L::k, p.dtype_kv, key_axes(p, p.head_dim, "head_dim"));
  keys("args->v", &A::v, &L::v, p.dtype_kv, key_axes(p, p.head_dim_v, "head_dim_v"));
  if (p.scale_k != CQSA_SCALE_NONE)
    keys("args->k_scale", &A::k_scale, &L::k_scale, scale_dtype(p.scale_k), scale_axes(p, p.scale_k, p.head_dim));
  if (p.scale_v != CQSA_SCALE_NONE)
    keys("args->v_scale", &A::v_scale, &L::v_scale, scale_dtype(p.scale_v), scale_axes(p, p.scale_v, p.head_dim_v));
  if (p.flags & CQSA_ATTENTION_MASK) plane("args->mask", &A::mask, &L::mask, CQSA_DTYPE_BOOL, p.mask_broadcast);
  if (p.flags & CQSA_ATTENTION_BIAS) plane("args->bias", &A::bias, &L::bias, p.dtype_bias, p.bias_broadcast);
  if (p.flags & CQSA_ATTENTION_ALIBI)
    input("args->alibi_slopes", &A::alibi_slopes, &L::slopes, CQSA_DTYPE_F32,
          slope_axes(p, args ? args->alibi_slopes : nullptr));
  if (p.flags & CQSA_ATTENTION_SINKS) input("args->sinks", &A::sinks, &L::sinks, CQSA_DTYPE_F32, head_axes(p));
  output("args->out", &A::out, &L::out, p.dtype_out, query_axes(p, p.head_dim_v, "head_dim_v"));
  if (p.flags & CQSA_ATTENTION_LSE)
    output("args->lse", &A::lse, &L::lse, p.dtype_q == CQSA_DTYPE_F64 ? CQSA_DTYPE_F64 : CQSA_DTYPE_F32, lse_axes(p));
  return n;
}

struct presence {
  const char* name;
  tensor_member tensor;
  bool wanted;
  const char* because;  // of params, what announces it
};

cqsa_status check_presence(const params& p, const args_type& args) {
  using A = args_type;
  const auto has = [&](uint32_t flag) { return (p.flags & flag) != 0; };
  const presence rows[] = {
      {"args->q", &A::q, true, nullptr},
      {"args->k", &A::k, true, nullptr},
      {"args->v", &A::v, true, nullptr},
      {"args->out", &A::out, true, nullptr},
      {"args->k_scale", &A::k_scale, p.scale_k != CQSA_SCALE_NONE, "scale_k other than CQSA_SCALE_NONE"},
      {"args->v_scale", &A::v_scale, p.scale_v != CQSA_SCALE_NONE, "scale_v other than CQSA_SCALE_NONE"},
      {"args->mask", &A::mask, has(CQSA_ATTENTION_MASK), "CQSA_ATTENTION_MASK"},
      {"args->bias", &A::bias, has(CQSA_ATTENTION_BIAS), "CQSA_ATTENTION_BIAS"},
      {"args->alibi_slopes", &A::alibi_slopes, has(CQSA_ATTENTION_ALIBI), "CQSA_ATTENTION_ALIBI"},
      {"args->sinks", &A::sinks, has(CQSA_ATTENTION_SINKS), "CQSA_ATTENTION_SINKS"},
      {"args->cu_seqlens_q", &A::cu_seqlens_q, is_varlen(p), "CQSA_ATTENTION_VARLEN"},
      {"args->cu_seqlens_k", &A::cu_seqlens_k, is_varlen(p) && !is_paged(p),
       "CQSA_ATTENTION_VARLEN without CQSA_ATTENTION_PAGED"},
      {"args->seqused_k", &A::seqused_k, has(CQSA_ATTENTION_SEQUSED_K), "CQSA_ATTENTION_SEQUSED_K"},
      {"args->page_table", &A::page_table, is_paged(p), "CQSA_ATTENTION_PAGED"},
      {"args->lse", &A::lse, has(CQSA_ATTENTION_LSE), "CQSA_ATTENTION_LSE"},
  };
  for (const presence& r : rows) {
    if ((args.*r.tensor != nullptr) == r.wanted) continue;
    if (r.because == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "%s is NULL", r.name);
    if (r.wanted) return fail(CQSA_ERROR_NULL_POINTER, "%s is NULL, but params have %s", r.name, r.because);
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s is given, but params lack %s", r.name, r.because);
  }
  return CQSA_OK;
}

// ---------------------------------------------------------------------------------------------------------- places

bool is_host_readable(const cqsa_tensor& t) {
  return t.device_type == CQSA_DEVICE_CPU || t.device_type == CQSA_DEVICE_CUDA_HOST ||
         t.device_type == CQSA_DEVICE_ROCM_HOST;
}

const char* device_name(int32_t device_type) {
  switch (device_type) {
    case CQSA_DEVICE_CPU:
      return "cpu";
    case CQSA_DEVICE_CUDA:
      return "cuda";
    case CQSA_DEVICE_CUDA_HOST:
      return "cuda_host";
    case CQSA_DEVICE_ROCM:
      return "rocm";
    case CQSA_DEVICE_ROCM_HOST:
      return "rocm_host";
    case CQSA_DEVICE_EXT:
      return "ext";
    default:
      return "unknown";
  }
}

const char* place_text(int32_t place) {
  return place == CQSA_MEMORY_HOST     ? "CQSA_MEMORY_HOST"
         : place == CQSA_MEMORY_PINNED ? "CQSA_MEMORY_PINNED"
         : place == CQSA_MEMORY_MAPPED ? "CQSA_MEMORY_MAPPED"
                                       : "CQSA_MEMORY_DEVICE";
}

// Where the backend sees a tensor. Memory that another vendor pinned is ordinary host memory here.
cqsa_status find_place(const cqsa_backend_v1& backend, const cqsa_tensor& t, const char* name, int32_t* place_out) {
  const bool host_backend = backend.flags & CQSA_BACKEND_HOST;
  *place_out = CQSA_MEMORY_HOST;
  if (!host_backend && t.device_type == backend.device_type) {
    *place_out = CQSA_MEMORY_DEVICE;
  } else if (!host_backend && backend.pinned_type != 0 && t.device_type == backend.pinned_type) {
    *place_out = CQSA_MEMORY_PINNED;
  } else if (!is_host_readable(t)) {
    return fail(CQSA_ERROR_DEVICE, "%s is on device type %d (%s), which the backend %s cannot use, wanted %d (%s)%s", name,
                t.device_type, device_name(t.device_type), backend.name, backend.device_type,
                device_name(backend.device_type), host_backend ? "" : " or host memory");
  }
  return CQSA_OK;
}

// No tensor says that it is a mapped file: for host memory that is the caller's word.
cqsa_status take_place(const cqsa_backend_v1& backend, const cqsa_tensor& t, const char* name, int32_t* place_inout) {
  const bool mapped = *place_inout == CQSA_MEMORY_MAPPED;
  CQSA_TRY(find_place(backend, t, name, place_inout));
  if (mapped && *place_inout == CQSA_MEMORY_HOST) *place_inout = CQSA_MEMORY_MAPPED;
  return CQSA_OK;
}

// An empty operand may have data NULL, but in a view NULL says that there is none. Never followed.
alignas(64) char somewhere[64];

void* first_element(const cqsa_tensor& t) {
  return t.data != nullptr ? reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(t.data) + t.byte_offset) : somewhere;
}

// ----------------------------------------------------------------------------------------------------- views of tensors

cqsa_view make_view(const cqsa_tensor& t, const axes& shape, bool broadcast_ones) {
  int64_t strides[max_axes];
  strides_of(t, strides);
  cqsa_view view{first_element(t), t.dtype, 0, {0, 0, 0, 0}};
  for (int i = 0; i < 4; ++i) {
    const int axis = shape.of_view[i];
    if (axis >= 0 && !(broadcast_ones && t.shape[axis] == 1)) view.stride[i] = strides[axis];
  }
  return view;
}

struct binder {
  const params& p;
  const cqsa_backend_v1& backend;
  const args_type& args;
  const cqsa_tensor* on_device = nullptr;  // the first operand found on the device: all have to be on the same one
  const char* on_device_name = nullptr;

  // The params may have their place from q, k or out: then that one and this one disagree, whatever the params.
  cqsa_status fail_place(const cqsa_tensor& t, const char* name, int32_t found, const char* place_name, int32_t place) {
    const bool kv = std::strcmp(place_name, "memory_kv") == 0, q = std::strcmp(place_name, "memory_q") == 0;
    const cqsa_tensor& first = kv ? *args.k : q ? *args.q : *args.out;
    const char* const first_name = kv ? "args->k" : q ? "args->q" : "args->out";
    int32_t first_place = 0;
    if (&t != &first && find_place(backend, first, first_name, &first_place) == CQSA_OK && first_place == place)
      return fail(CQSA_ERROR_DEVICE, "%s is on device type %d (%s), that is %s, but %s is on device type %d (%s), that is %s; wanted "
                                     "both in one place",
                  name, t.device_type, device_name(t.device_type), place_text(found), first_name, first.device_type,
                  device_name(first.device_type), place_text(first_place));
    return fail(CQSA_ERROR_DEVICE, "%s is on device type %d (%s), that is %s, but params->%s is %s (%d)", name, t.device_type,
                device_name(t.device_type), place_text(found), place_name, place_text(place), place);
  }

  cqsa_status check_device(const cqsa_tensor& t, const char* name, const char* place_name, int32_t place) {
    int32_t found = 0;
    CQSA_TRY(find_place(backend, t, name, &found));
    if (backend.flags & CQSA_BACKEND_HOST) return CQSA_OK;
    const bool pinned_is_host = found == CQSA_MEMORY_PINNED && place == CQSA_MEMORY_HOST;
    const bool mapped_is_host = found == CQSA_MEMORY_HOST && place == CQSA_MEMORY_MAPPED;
    if (found != place && !pinned_is_host && !mapped_is_host) return fail_place(t, name, found, place_name, place);
    if (found != CQSA_MEMORY_DEVICE) return CQSA_OK;
    if (on_device != nullptr && on_device->device_id != t.device_id)
      return fail(CQSA_ERROR_DEVICE, "%s is on device %d, but %s is on device %d", name, t.device_id, on_device_name,
                  on_device->device_id);
    on_device = &t;
    on_device_name = name;
    return CQSA_OK;
  }

  // What params->*_broadcast promises must be so; the reverse is harmless.
  cqsa_status check_broadcast(const operand& o, const cqsa_tensor& t) {
    int64_t strides[max_axes];
    strides_of(t, strides);
    for (int i = 0; i < 4; ++i)
      if ((o.broadcast >> i & 1) && t.shape[i] > 1 && strides[i] != 0)
        return fail(CQSA_ERROR_SHAPE,
                    "%s has size %" PRId64 " and stride %" PRId64
                    " along axis %d (%s), but params->%s_broadcast (0x%x) "
                    "says that it is the same along it",
                    o.name, t.shape[i], strides[i], i, o.shape.name[i], o.name + 6, o.broadcast);
    return CQSA_OK;
  }

  // One f32 in whatever shape.
  static bool is_single(const operand& o, const cqsa_tensor& t) {
    return o.shape.ndim == 0 && std::all_of(t.shape, t.shape + t.ndim, [](int64_t n) { return n == 1; });
  }

  cqsa_status check_dtype(const operand& o, const cqsa_tensor& t) {
    const bool mask = o.tensor == &args_type::mask;
    if (t.dtype == o.dtype || (mask && t.dtype == CQSA_DTYPE_U8)) return CQSA_OK;
    return fail(CQSA_ERROR_DTYPE, "%s has dtype %s, wanted %s", o.name, dtype_name(t.dtype),
                mask ? "bool or u8" : dtype_name(o.dtype));
  }

  cqsa_status bind(const operand& o, cqsa_view& view_out) {
    const cqsa_tensor& t = *(args.*o.tensor);
    byte_extent extent;
    CQSA_TRY(check_tensor(&t, o.name, 0, max_axes, &extent));
    if (!is_single(o, t)) CQSA_TRY(check_shape(t, o.name, o.shape.size, o.shape.ndim, o.may_broadcast, o.shape.name));
    CQSA_TRY(check_dtype(o, t));
    CQSA_TRY(check_device(t, o.name, o.place_name, o.place));
    if (o.broadcast) CQSA_TRY(check_broadcast(o, t));
    if (o.is_output) CQSA_TRY(check_no_self_overlap(t, o.name));
    view_out = make_view(t, o.shape, o.may_broadcast);
    return CQSA_OK;
  }

  // cu_seqlens_* and seqused_k reach the leaf as bare pointers, so they have to be contiguous.
  cqsa_status bind_index(const cqsa_tensor& t, const char* name, int64_t count, const char* count_name,
                         const void** pointer_out) {
    byte_extent extent;
    CQSA_TRY(check_tensor(&t, name, 0, max_axes, &extent));
    CQSA_TRY(check_shape(t, name, &count, 1, false, &count_name));
    if (t.dtype != CQSA_DTYPE_I32 && t.dtype != CQSA_DTYPE_I64)
      return fail(CQSA_ERROR_DTYPE, "%s has dtype %s, wanted i32 or i64", name, dtype_name(t.dtype));
    CQSA_TRY(check_device(t, name, "memory_q", p.memory_q));
    if (t.strides != nullptr && t.shape[0] > 1 && t.strides[0] != 1)
      return fail(CQSA_ERROR_STRIDES, "%s has stride %" PRId64 ", wanted 1: this array has to be contiguous", name,
                  t.strides[0]);
    *pointer_out = first_element(t);
    return CQSA_OK;
  }

  cqsa_status bind_page_table(cqsa_attention_leaf& leaf) {
    const cqsa_tensor& t = *args.page_table;
    byte_extent extent;
    CQSA_TRY(check_tensor(&t, "args->page_table", 2, 2, &extent));
    const int64_t wanted[] = {p.batch, t.shape[1]};
    const char* const names[] = {"batch", "pages per sequence"};
    CQSA_TRY(check_shape(t, "args->page_table", wanted, 2, false, names));
    if (t.dtype != CQSA_DTYPE_I32)
      return fail(CQSA_ERROR_DTYPE, "args->page_table has dtype %s, wanted i32", dtype_name(t.dtype));
    CQSA_TRY(check_device(t, "args->page_table", "memory_q", p.memory_q));
    leaf.page_table = static_cast<const int32_t*>(first_element(t));
    strides_of(t, leaf.page_table_stride);
    return CQSA_OK;
  }

  cqsa_status bind_indexes(cqsa_attention_leaf& leaf) {
    if (args.cu_seqlens_q != nullptr) {
      CQSA_TRY(bind_index(*args.cu_seqlens_q, "args->cu_seqlens_q", p.batch + 1, "batch + 1", &leaf.cu_seqlens_q));
      leaf.index_dtype = args.cu_seqlens_q->dtype;
    }
    if (args.cu_seqlens_k != nullptr) {
      CQSA_TRY(bind_index(*args.cu_seqlens_k, "args->cu_seqlens_k", p.batch + 1, "batch + 1", &leaf.cu_seqlens_k));
      if (args.cu_seqlens_k->dtype != leaf.index_dtype)
        return fail(CQSA_ERROR_DTYPE, "args->cu_seqlens_k has dtype %s, wanted that of args->cu_seqlens_q, %s",
                    dtype_name(args.cu_seqlens_k->dtype), dtype_name(leaf.index_dtype));
    }
    if (args.seqused_k != nullptr) {
      CQSA_TRY(bind_index(*args.seqused_k, "args->seqused_k", p.batch, "batch", &leaf.seqused_k));
      leaf.seqused_dtype = args.seqused_k->dtype;
    }
    return args.page_table != nullptr ? bind_page_table(leaf) : CQSA_OK;
  }
};

// ------------------------------------------------------------------------------------------ values of the index arrays

// Element i of a contiguous i32 or i64 array of any alignment.
int64_t read_index(const cqsa_tensor& t, int64_t i) {
  const char* data = static_cast<const char*>(first_element(t));
  if (t.dtype == CQSA_DTYPE_I64) {
    int64_t value;
    std::memcpy(&value, data + i * 8, sizeof value);
    return value;
  }
  int32_t value;
  std::memcpy(&value, data + i * 4, sizeof value);
  return value;
}

// Begins with 0, never falls, ends within the rows. longest_out: the longest segment.
cqsa_status check_cu_seqlens(const cqsa_tensor& t, const char* name, int64_t rows, const char* rows_name,
                             int64_t* longest_out) {
  const int64_t segments = t.shape[0] - 1;
  int64_t before = read_index(t, 0), longest = 0;
  if (before != 0) return fail(CQSA_ERROR_INDEX, "%s[0] is %" PRId64 ", wanted 0", name, before);
  for (int64_t i = 1; i <= segments; ++i) {
    const int64_t value = read_index(t, i);
    if (value < before)
      return fail(CQSA_ERROR_INDEX, "%s[%" PRId64 "] = %" PRId64 " is less than the entry before it, %" PRId64, name, i,
                  value, before);
    longest = std::max(longest, value - before);
    before = value;
  }
  if (before > rows)
    return fail(CQSA_ERROR_INDEX, "%s[%" PRId64 "] = %" PRId64 " is more than the rows there are, %s = %" PRId64, name,
                segments, before, rows_name, rows);
  *longest_out = longest;
  return CQSA_OK;
}

cqsa_status check_segments(const cqsa_tensor* t, const char* name, int64_t rows, const char* rows_name, int64_t bound,
                           const char* bound_name) {
  int64_t longest = 0;
  if (t == nullptr || !is_host_readable(*t)) return CQSA_OK;
  CQSA_TRY(check_cu_seqlens(*t, name, rows, rows_name, &longest));
  if (longest <= bound) return CQSA_OK;
  return fail(CQSA_ERROR_INDEX, "%s has a segment of length %" PRId64 ", which is more than params->%s, %" PRId64, name,
              longest, bound_name, bound);
}

// Keys of one sequence before seqused_k: of its segment, of its row, or as many as params allow it to have pages for.
int64_t segment_length_k(const params& p, const args_type& args, int64_t b) {
  const cqsa_tensor* cu = args.cu_seqlens_k;
  if (cu == nullptr || !is_host_readable(*cu)) return p.seqlen_k;
  return read_index(*cu, b + 1) - read_index(*cu, b);
}

cqsa_status check_seqused(const params& p, const args_type& args) {
  const cqsa_tensor* used = args.seqused_k;
  if (used == nullptr || !is_host_readable(*used)) return CQSA_OK;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t value = read_index(*used, b), length = segment_length_k(p, args, b);
    if (value < 0 || value > length)
      return fail(CQSA_ERROR_INDEX,
                  "args->seqused_k[%" PRId64 "] is %" PRId64 ", wanted 0 to %" PRId64 ", the keys of that sequence", b,
                  value, length);
  }
  return CQSA_OK;
}

cqsa_status check_page_ids(const params& p, const cqsa_tensor& table, int64_t b, int64_t pages) {
  int64_t strides[2];
  strides_of(table, strides);
  const char* data = static_cast<const char*>(first_element(table));
  for (int64_t i = 0; i < pages; ++i) {
    int32_t id;
    std::memcpy(&id, data + (b * strides[0] + i * strides[1]) * 4, sizeof id);
    if (id < -1 || id >= p.num_pages)
      return fail(CQSA_ERROR_INDEX,
                  "args->page_table[%" PRId64 "][%" PRId64 "] is %d, wanted -1 to %" PRId64 " (num_pages - 1)", b, i, id,
                  p.num_pages - 1);
  }
  return CQSA_OK;
}

// Only the entries that the used keys need are looked at: the rest of a row may be garbage.
cqsa_status check_pages(const params& p, const args_type& args) {
  if (args.page_table == nullptr) return CQSA_OK;
  const cqsa_tensor* used = args.seqused_k;
  const bool used_known = used != nullptr && is_host_readable(*used);
  const int64_t columns = args.page_table->shape[1];
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t keys = used_known ? read_index(*used, b) : p.seqlen_k;
    const int64_t pages = keys / p.page_size + (keys % p.page_size != 0);
    if (pages > columns)
      return fail(CQSA_ERROR_SHAPE,
                  "args->page_table has %" PRId64 " pages per sequence of %" PRId64 " keys each, but sequence %" PRId64
                  " may have %" PRId64 " keys, for which it wants %" PRId64 " pages",
                  columns, p.page_size, b, keys, pages);
    if (is_host_readable(*args.page_table)) CQSA_TRY(check_page_ids(p, *args.page_table, b, pages));
    if (!used_known && !is_host_readable(*args.page_table)) break;  // the same for every sequence
  }
  return CQSA_OK;
}

cqsa_status check_values(const params& p, const args_type& args) {
  // Nobody will read them, and a batch of no rows may be astronomically large.
  if (attention_problem{p}.empty()) return CQSA_OK;
  CQSA_TRY(check_segments(args.cu_seqlens_q, "args->cu_seqlens_q", p.total_q, "total_q", p.seqlen_q, "seqlen_q"));
  CQSA_TRY(check_segments(args.cu_seqlens_k, "args->cu_seqlens_k", p.total_k, "total_k", p.seqlen_k, "seqlen_k"));
  CQSA_TRY(check_seqused(p, args));
  return check_pages(p, args);
}

// --------------------------------------------------------------------------------------------------------- overlap

cqsa_status check_overlap(const args_type& args) {
  for (const operand_name& other : operand_names) {
    const cqsa_tensor* const t = args.*other.tensor;
    if (t == nullptr || other.tensor == &args_type::out || other.tensor == &args_type::lse) continue;
    CQSA_TRY(check_no_overlap(*args.out, "args->out", *t, other.name));
    if (args.lse != nullptr) CQSA_TRY(check_no_overlap(*args.lse, "args->lse", *t, other.name));
  }
  return args.lse == nullptr ? CQSA_OK : check_no_overlap(*args.lse, "args->lse", *args.out, "args->out");
}

// ------------------------------------------------------------------------------------------------------ the leaf

cqsa_attention_leaf numbers_of_leaf(const attention_problem& problem) {
  const params& p = problem.p;
  cqsa_attention_leaf leaf{};
  leaf.struct_size = sizeof leaf;
  leaf.batch = p.batch;
  leaf.num_heads = p.num_heads;
  leaf.num_kv_heads = p.num_kv_heads;
  leaf.head_dim = p.head_dim;
  leaf.head_dim_v = p.head_dim_v;
  leaf.seqlen_q = p.seqlen_q;
  leaf.seqlen_k = p.seqlen_k;
  leaf.scale_k = p.scale_k;
  leaf.scale_v = p.scale_v;
  leaf.kv_group = p.kv_group;
  leaf.page_size = p.page_size;
  leaf.num_pages = p.num_pages;
  leaf.total_q = p.total_q;
  leaf.total_k = p.total_k;
  leaf.softmax_scale = p.softmax_scale;
  leaf.softcap = p.softcap;
  leaf.causal = p.causal;
  leaf.batch_invariant = (p.flags & CQSA_ATTENTION_BATCH_INVARIANT) != 0;
  leaf.window_left = p.window_left;
  leaf.window_right = p.window_right;
  leaf.precision = p.precision;
  leaf.chip = problem.chip;
  return leaf;
}

// Compact strides by way of a tensor that has the operand's shape. A broadcast axis has size 1.
cqsa_view compact_view(const operand& o) {
  int64_t shape[4];
  for (int i = 0; i < o.shape.ndim; ++i) shape[i] = o.broadcast >> i & 1 ? 1 : o.shape.size[i];
  return make_view({somewhere, CQSA_DEVICE_CPU, 0, o.shape.ndim, o.dtype, shape, nullptr, 0}, o.shape, o.may_broadcast);
}

// ------------------------------------------------------------------------------------------- params from tensors

constexpr uint32_t kept_flags = CQSA_ATTENTION_WINDOW | CQSA_ATTENTION_BATCH_INVARIANT | CQSA_ATTENTION_DETERMINISTIC;

uint32_t presence_flags(const args_type& args) {
  return (args.cu_seqlens_q ? CQSA_ATTENTION_VARLEN : 0) | (args.page_table ? CQSA_ATTENTION_PAGED : 0) |
         (args.seqused_k ? CQSA_ATTENTION_SEQUSED_K : 0) | (args.mask ? CQSA_ATTENTION_MASK : 0) |
         (args.bias ? CQSA_ATTENTION_BIAS : 0) | (args.alibi_slopes ? CQSA_ATTENTION_ALIBI : 0) |
         (args.sinks ? CQSA_ATTENTION_SINKS : 0) | (args.lse ? CQSA_ATTENTION_LSE : 0);
}

// A tensor whose shape is to be read: sound, and with as many axes as the layout wants, whose names the message gives.
cqsa_status check_ndim(const cqsa_tensor* t, const char* name, const axes& wanted) {
  byte_extent extent;
  CQSA_TRY(check_tensor(t, name, 0, max_axes, &extent));
  if (t->ndim == wanted.ndim) return CQSA_OK;
  const auto axis = [&](int i) { return i < wanted.ndim ? wanted.name[i] : ""; };
  return fail(CQSA_ERROR_SHAPE, "%s has shape %s, wanted %d axes (%s%s%s%s%s%s%s)", name, shape_text(t->shape, t->ndim).text,
              wanted.ndim, axis(0), wanted.ndim > 1 ? ", " : "", axis(1), wanted.ndim > 2 ? ", " : "", axis(2),
              wanted.ndim > 3 ? ", " : "", axis(3));
}

cqsa_status check_index_ndim(const cqsa_tensor* t, const char* name) {
  byte_extent extent;
  CQSA_TRY(check_tensor(t, name, 1, 1, &extent));
  if (t->dtype != CQSA_DTYPE_I32 && t->dtype != CQSA_DTYPE_I64)
    return fail(CQSA_ERROR_DTYPE, "%s has dtype %s, wanted i32 or i64", name, dtype_name(t->dtype));
  if (t->strides != nullptr && t->shape[0] > 1 && t->strides[0] != 1)
    return fail(CQSA_ERROR_STRIDES, "%s has stride %" PRId64 ", wanted 1: this array has to be contiguous", name,
                t->strides[0]);
  return CQSA_OK;
}

// The longest segment, exact where the host can read cu_seqlens, else the number of rows.
cqsa_status longest_segment(const cqsa_tensor* cu, const char* name, int64_t rows, const char* rows_name,
                            int64_t* longest_out) {
  CQSA_TRY(check_index_ndim(cu, name));
  if (cu->shape[0] < 1) return fail(CQSA_ERROR_SHAPE, "%s has shape [0], wanted [1] or more (batch + 1)", name);
  *longest_out = rows;
  return is_host_readable(*cu) ? check_cu_seqlens(*cu, name, rows, rows_name, longest_out) : CQSA_OK;
}

// The most keys of a paged sequence: what is used where the host can read it, else what the page table has room for.
cqsa_status longest_paged(const args_type& args, int64_t page_size, int64_t* longest_out) {
  if (multiply_overflows(args.page_table->shape[1], page_size, longest_out))
    return fail(CQSA_ERROR_SHAPE,
                "args->page_table has %" PRId64 " pages per sequence of %" PRId64
                " keys each, whose product overflows 64 bits",
                args.page_table->shape[1], page_size);
  if (args.seqused_k == nullptr || !is_host_readable(*args.seqused_k)) return CQSA_OK;
  *longest_out = 0;
  for (int64_t b = 0; b < args.seqused_k->shape[0]; ++b)
    *longest_out = std::max(*longest_out, read_index(*args.seqused_k, b));
  return CQSA_OK;
}

// In varlen and paged problems a mask or bias may be padded past the longest sequence; its size is then as good a bound.
// Where the index arrays are on the device it is the better one.
void widen_to_planes(const args_type& args, int axis, bool exact, int64_t* bound) {
  int64_t widest = 0;
  for (const cqsa_tensor* plane : {args.mask, args.bias})
    if (plane != nullptr && plane->shape[axis] > 1) widest = std::max(widest, plane->shape[axis]);
  if (widest > 0) *bound = exact ? std::max(*bound, widest) : widest;
}

cqsa_status take_query_shape(const args_type& args, params& p) {
  CQSA_TRY(check_ndim(args.q, "args->q", query_axes(p, 0, "head_dim")));
  const axes names = query_axes(p, 0, "");
  p.num_heads = args.q->shape[names.of_view[head]];
  p.head_dim = args.q->shape[names.of_view[channel]];
  if (!is_varlen(p)) {
    p.batch = args.q->shape[names.of_view[item]];
    p.seqlen_q = args.q->shape[names.of_view[row]];
    return CQSA_OK;
  }
  p.total_q = args.q->shape[0];
  CQSA_TRY(longest_segment(args.cu_seqlens_q, "args->cu_seqlens_q", p.total_q, "total_q", &p.seqlen_q));
  p.batch = args.cu_seqlens_q->shape[0] - 1;
  widen_to_planes(args, row, is_host_readable(*args.cu_seqlens_q), &p.seqlen_q);
  return CQSA_OK;
}

cqsa_status take_key_shape(const args_type& args, params& p) {
  const axes names = key_axes(p, 0, "head_dim");
  CQSA_TRY(check_ndim(args.k, "args->k", names));
  CQSA_TRY(check_ndim(args.v, "args->v", key_axes(p, 0, "head_dim_v")));
  if (args.seqused_k != nullptr) CQSA_TRY(check_index_ndim(args.seqused_k, "args->seqused_k"));
  const int64_t* shape = args.k->shape;
  p.num_kv_heads = shape[names.of_view[head]];
  p.head_dim_v = args.v->shape[names.of_view[channel]];
  if (is_paged(p)) {
    byte_extent extent;
    CQSA_TRY(check_tensor(args.page_table, "args->page_table", 2, 2, &extent));
    p.num_pages = shape[0];
    p.page_size = shape[1];
    CQSA_TRY(longest_paged(args, p.page_size, &p.seqlen_k));
    // Without seqused_k the length is the length of every sequence, not a bound.
    if (args.seqused_k != nullptr) widen_to_planes(args, channel, is_host_readable(*args.seqused_k), &p.seqlen_k);
  } else if (is_varlen(p)) {
    p.total_k = shape[0];
    CQSA_TRY(longest_segment(args.cu_seqlens_k, "args->cu_seqlens_k", p.total_k, "total_k", &p.seqlen_k));
    widen_to_planes(args, channel, is_host_readable(*args.cu_seqlens_k), &p.seqlen_k);
  } else {
    p.seqlen_k = shape[names.of_view[row]];
  }
  return CQSA_OK;
}

// The bits of CQSA_BROADCAST_* of a mask or bias.
cqsa_status take_broadcast(const params& p, const cqsa_tensor* t, const char* name, uint32_t* bits_out) {
  *bits_out = 0;
  if (t == nullptr) return CQSA_OK;
  CQSA_TRY(check_ndim(t, name, mask_axes(p)));
  int64_t strides[max_axes];
  strides_of(*t, strides);
  for (int i = 0; i < 4; ++i)
    if (t->shape[i] == 1 || strides[i] == 0) *bits_out |= 1u << i;
  return CQSA_OK;
}

cqsa_status take_scale_kind(const params& p, const cqsa_tensor* t, const char* name, int32_t* kind_out) {
  *kind_out = CQSA_SCALE_NONE;
  if (t == nullptr) return CQSA_OK;
  byte_extent extent;
  CQSA_TRY(check_tensor(t, name, 0, max_axes, &extent));
  const bool single = std::all_of(t->shape, t->shape + t->ndim, [](int64_t n) { return n == 1; });
  *kind_out = p.dtype_kv == CQSA_DTYPE_I8                     ? CQSA_SCALE_GROUP
              : single                                        ? CQSA_SCALE_TENSOR
              : t->ndim == 1 && t->shape[0] == p.num_kv_heads ? CQSA_SCALE_HEAD
                                                              : CQSA_SCALE_TOKEN;
  return CQSA_OK;
}

bool group_fits(const cqsa_tensor* scale, int64_t dim, int64_t group) {
  return scale == nullptr || (scale->ndim > 0 && scale->shape[scale->ndim - 1] == (dim + group - 1) / group);
}

// The group that the last axes of the scales speak of. Several fit only when head_dim and head_dim_v are at most the
// smallest of them: then one scale covers a whole row with each, and they mean the same.
cqsa_status take_kv_group(const args_type& args, params& p) {
  if (p.dtype_kv != CQSA_DTYPE_I8) p.kv_group = 0;
  if (p.dtype_kv != CQSA_DTYPE_I8 || p.kv_group != 0 || (args.k_scale == nullptr && args.v_scale == nullptr)) return CQSA_OK;
  for (const int64_t group : {32, 64, 128})
    if (group_fits(args.k_scale, p.head_dim, group) && group_fits(args.v_scale, p.head_dim_v, group)) {
      p.kv_group = group;
      return CQSA_OK;
    }
  const auto last = [](const cqsa_tensor* t) { return t != nullptr && t->ndim > 0 ? t->shape[t->ndim - 1] : 0; };
  return fail(CQSA_ERROR_SHAPE,
              "args->k_scale and args->v_scale end with %" PRId64 " and %" PRId64 " groups for head_dim %" PRId64
              " and head_dim_v %" PRId64
              ", which are not groups of 32, 64 or 128 channels; set params->kv_group to be told more",
              last(args.k_scale), last(args.v_scale), p.head_dim, p.head_dim_v);
}

void clear_taken(params& p) {
  for (int64_t* field : {&p.batch, &p.num_heads, &p.num_kv_heads, &p.head_dim, &p.head_dim_v, &p.seqlen_q, &p.seqlen_k,
                         &p.total_q, &p.total_k, &p.page_size, &p.num_pages})
    *field = 0;
}

}  // namespace

cqsa_status params_of(const cqsa_backend_v1& backend, const cqsa_attention_args& args, cqsa_attention_params& inout) {
  params p = inout;
  clear_taken(p);
  p.flags = (p.flags & kept_flags) | presence_flags(args);
  CQSA_TRY(take_broadcast(p, args.mask, "args->mask", &p.mask_broadcast));
  CQSA_TRY(take_broadcast(p, args.bias, "args->bias", &p.bias_broadcast));
  CQSA_TRY(take_query_shape(args, p));
  CQSA_TRY(take_key_shape(args, p));
  CQSA_TRY(check_ndim(args.out, "args->out", query_axes(p, 0, "head_dim_v")));
  p.dtype_q = args.q->dtype;
  p.dtype_kv = args.k->dtype;
  p.dtype_out = args.out->dtype;
  p.dtype_bias = args.bias != nullptr ? args.bias->dtype : CQSA_DTYPE_NONE;
  CQSA_TRY(take_scale_kind(p, args.k_scale, "args->k_scale", &p.scale_k));
  CQSA_TRY(take_scale_kind(p, args.v_scale, "args->v_scale", &p.scale_v));
  CQSA_TRY(take_kv_group(args, p));
  CQSA_TRY(take_place(backend, *args.q, "args->q", &p.memory_q));
  CQSA_TRY(take_place(backend, *args.k, "args->k", &p.memory_kv));
  CQSA_TRY(take_place(backend, *args.out, "args->out", &p.memory_out));
  CQSA_TRY(check_presence(p, args));
  inout = p;
  return CQSA_OK;
}

cqsa_attention_leaf shape_of_leaf(const attention_problem& problem) {
  const params& p = problem.p;
  cqsa_attention_leaf leaf = numbers_of_leaf(problem);
  operand operands[max_operands];
  const int n = list_operands(p, nullptr, operands);
  for (int i = 0; i < n; ++i) leaf.*operands[i].view = compact_view(operands[i]);
  if (is_varlen(p)) leaf.cu_seqlens_q = somewhere, leaf.index_dtype = CQSA_DTYPE_I32;
  if (is_varlen(p) && !is_paged(p)) leaf.cu_seqlens_k = somewhere;
  if (p.flags & CQSA_ATTENTION_SEQUSED_K) leaf.seqused_k = somewhere, leaf.seqused_dtype = CQSA_DTYPE_I32;
  if (is_paged(p)) {
    leaf.page_table = reinterpret_cast<const int32_t*>(somewhere);
    leaf.page_table_stride[0] = p.seqlen_k / p.page_size + (p.seqlen_k % p.page_size != 0);
    leaf.page_table_stride[1] = 1;
  }
  return leaf;
}

cqsa_status bind_operands(const attention_problem& problem, const cqsa_backend_v1& backend, const cqsa_attention_args& args,
                          cqsa_attention_leaf& leaf_out) {
  const params& p = problem.p;
  CQSA_TRY(check_presence(p, args));
  cqsa_attention_leaf leaf = numbers_of_leaf(problem);
  operand operands[max_operands];
  const int n = list_operands(p, &args, operands);
  binder bind{p, backend, args};
  for (int i = 0; i < n; ++i) CQSA_TRY(bind.bind(operands[i], leaf.*operands[i].view));
  CQSA_TRY(bind.bind_indexes(leaf));
  CQSA_TRY(check_values(p, args));
  CQSA_TRY(check_overlap(args));
  leaf_out = leaf;
  return CQSA_OK;
}

}  // namespace cqsa
