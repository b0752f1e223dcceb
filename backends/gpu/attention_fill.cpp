// SPDX-License-Identifier: Apache-2.0
#include "attention_fill.h"

#include <memory>
#include <new>

namespace cqsa::gpu {

static_assert(int(flag_state_in) == CQSA_LEAF_STATE_IN && int(flag_state_out) == CQSA_LEAF_STATE_OUT);
static_assert(int(scale_per_tensor) == CQSA_SCALE_TENSOR && int(scale_per_head) == CQSA_SCALE_HEAD);
static_assert(int(scale_per_token) == CQSA_SCALE_TOKEN && int(scale_per_group) == CQSA_SCALE_GROUP);


int32_t kind_of(cqsa_dtype t) {
  switch (t) {
    case CQSA_DTYPE_F32: return kind_f32;
    case CQSA_DTYPE_F16: return kind_f16;
    case CQSA_DTYPE_BF16: return kind_bf16;
    case CQSA_DTYPE_I8: return kind_i8;
    case CQSA_DTYPE_E4M3FN: return kind_e4m3;
    case CQSA_DTYPE_E5M2: return kind_e5m2;
    default: return kind_u8;
  }
}
bool is_float(cqsa_dtype t) { return t == CQSA_DTYPE_F32 || t == CQSA_DTYPE_F16 || t == CQSA_DTYPE_BF16; }
bool is_kv(cqsa_dtype t) { return is_float(t) || t == CQSA_DTYPE_I8 || t == CQSA_DTYPE_E4M3FN || t == CQSA_DTYPE_E5M2; }

const char* why_no_fast(const cqsa_chip& chip, int32_t precision, cqsa_dtype q) {
  if (chip.tier != 70 || precision != CQSA_PRECISION_FAST || q != CQSA_DTYPE_BF16) return nullptr;
  return "precision is FAST and q is bf16, which sm_70's matrix unit does not have: wanted f16, or another precision, which computes bf16 in f32";
}

const char* why_no_gpu(const cqsa_attention_leaf& leaf) {
  if (leaf.q.dtype == CQSA_DTYPE_F64) return "f64 is computed by cpu_reference only";
  if (!is_float(leaf.q.dtype) || !is_kv(leaf.k.dtype) || !is_kv(leaf.v.dtype))
    return "q must be f32, f16 or bf16, and k and v one of these, int8, e4m3fn or e5m2";
  if (!(leaf.flags & CQSA_LEAF_STATE_OUT) && !is_float(leaf.out.dtype)) return "out must be f32, f16 or bf16";
  if (leaf.bias.data && !is_float(leaf.bias.dtype)) return "bias must be f32, f16 or bf16";
  if (leaf.head_dim < 1 || leaf.head_dim > 576 || leaf.head_dim_v < 1 || leaf.head_dim_v > 512)
    return "head_dim is 1..576 and head_dim_v 1..512";
  if ((leaf.scale_k == CQSA_SCALE_GROUP || leaf.scale_v == CQSA_SCALE_GROUP) && (leaf.kv_group < 4 || leaf.kv_group % 4 || leaf.kv_group > 1024))
    return "kv_group is 32, 64 or 128";
  if (leaf.num_heads > INT32_MAX) return "num_heads is below 2^31";
  return why_no_fast(leaf.chip, leaf.precision, leaf.q.dtype);
}

namespace {

// A division costs what ten other instructions do, and there are a dozen of them in a launch; nearly every run is a power of two.
bool is_multiple(int64_t x, int64_t run) { return (run & (run - 1)) == 0 ? (x & (run - 1)) == 0 : x % run == 0; }

}  // namespace

bool has_runs(const cqsa_view& x, int64_t batch, int64_t heads, int64_t rows, int64_t channels, int64_t run) {
  const int64_t bytes = (x.dtype >> 8 & 0xff) / 8;
  if ((x.stride[3] != 1 && channels != 1) || !is_multiple(channels, run)) return false;
  if (bytes > 0 && !is_multiple(static_cast<int64_t>(reinterpret_cast<uintptr_t>(x.data)), run * bytes)) return false;
  const auto steps = [&](int axis, int64_t size) { return size <= 1 || is_multiple(x.stride[axis], run); };
  return steps(0, batch) && steps(1, heads) && steps(2, rows);
}

gpu_view view_of(const cqsa_view& x, int64_t batch, int64_t heads, int64_t rows, int64_t channels, int64_t run) {
  return {static_cast<char*>(x.data), {x.stride[0], x.stride[1], x.stride[2], x.stride[3]}, kind_of(x.dtype), has_runs(x, batch, heads, rows, channels, run)};
}

// Of an operand that is not there a kernel looks at nothing but the address.
gpu_view plain_view(const cqsa_view& x) { return x.data ? view_of(x, 1, 1, 1, 1) : gpu_view{}; }

namespace {

constexpr int64_t no_limit = int64_t(1) << 60;

void fill_operands(const cqsa_attention_leaf& a, int64_t run, attention_params* p) {
  const int64_t items = a.page_table ? a.num_pages : a.batch;
  const int64_t any = 2;  // more than one row, whatever the rectangles are
  p->q = view_of(a.q, a.batch, a.num_heads, any, a.head_dim, run);
  p->k = view_of(a.k, items, a.num_kv_heads, any, a.head_dim, run);
  p->v = view_of(a.v, items, a.num_kv_heads, any, a.head_dim_v, run);
  // Scales of wider types are nothing that anyone uses: right, one element at a time.
  if (a.scale_k != CQSA_SCALE_NONE && is_float(a.k.dtype)) p->k.quads = 0;
  if (a.scale_v != CQSA_SCALE_NONE && is_float(a.v.dtype)) p->v.quads = 0;
  p->out = view_of(a.out, a.batch, a.num_heads, any, a.head_dim_v, run);
  p->k_scale = plain_view(a.k_scale);
  p->v_scale = plain_view(a.v_scale);
  p->mask = plain_view(a.mask);
  p->bias = plain_view(a.bias);
  p->slopes = plain_view(a.slopes);
  p->sinks = plain_view(a.sinks);
  p->lse = plain_view(a.lse);
  p->cu_seqlens_q = a.cu_seqlens_q;
  p->cu_seqlens_k = a.cu_seqlens_k;
  p->seqused_k = a.seqused_k;
  p->index_bytes = a.index_dtype == CQSA_DTYPE_I64 ? 8 : 4;
  p->seqused_bytes = a.seqused_dtype == CQSA_DTYPE_I64 ? 8 : 4;
  p->page_table = reinterpret_cast<const char*>(a.page_table);
  p->page_table_stride[0] = a.page_table_stride[0];
  p->page_table_stride[1] = a.page_table_stride[1];
  p->page_size = a.page_size;
  p->num_pages = a.num_pages;
  p->total_q = a.total_q;
  p->total_k = a.total_k;
  p->state_acc = a.state_acc;
  p->state_m = a.state_m;
  p->state_l = a.state_l;
  p->state_rows = a.state_rows;
}

void fill_numbers(const cqsa_attention_leaf& a, attention_params* p) {
  p->batch = a.batch;
  p->num_heads = a.num_heads;
  p->num_kv_heads = a.num_kv_heads;
  p->seqlen_q = a.seqlen_q;
  p->seqlen_k = a.seqlen_k;
  p->head_dim = int32_t(a.head_dim);
  p->head_dim_v = int32_t(a.head_dim_v);
  p->scale_k = a.scale_k;
  p->scale_v = a.scale_v;
  p->kv_group = int32_t(a.kv_group);
  p->softmax_scale = float(a.softmax_scale);
  p->softcap = a.softcap > 0 ? float(a.softcap) : 0.0f;
  p->left = a.window_left < 0 ? no_limit : smaller(a.window_left, no_limit);
  p->right = a.window_right < 0 ? no_limit : smaller(a.window_right, no_limit);
  if (a.causal != CQSA_CAUSAL_NONE) p->right = smaller(p->right, 0);
  p->flags = int32_t(a.flags);
  p->top_left = a.causal == CQSA_CAUSAL_TOP_LEFT;
  p->longest_first = a.causal != CQSA_CAUSAL_NONE;
  p->fix_always = a.mask.data || a.bias.data || a.slopes.data || a.softcap > 0;
}

// Few queries: the heads that share keys fill the rows of a tile, or of each of its parts.
void fill_packing(const tile_rows& rows, int64_t longest, attention_params* p) {
  const int64_t group = p->num_heads / p->num_kv_heads;
  const int64_t heads = larger(1, smaller(smaller(group, rows.part), longest > 0 ? rows.part / divide_up(longest, rows.parts) : 1));
  p->heads_packed = int32_t(heads);
  p->head_groups = int32_t(divide_up(group, heads));
  p->tile_queries = int32_t(rows.part / heads * rows.parts);
}

// ---------------------------------------------------------------------------------------------------------- rectangles

bool same_queries(const cqsa_rect& a, const cqsa_rect& b) { return a.q_row == b.q_row && a.q_len == b.q_len; }

// The work list: ranges first, then the groups of ranges that share their queries. Both in one array of host memory.
struct work_list {
  std::unique_ptr<char[]> memory;
  gpu_range* ranges;
  gpu_group* groups;
  int64_t num_groups;
};

// False: no memory.
bool build_list(const cqsa_attention_leaf& a, int64_t tile_queries, work_list* out, int64_t* q_tiles) {
  const size_t count = size_t(a.num_rects);
  out->memory.reset(new (std::nothrow) char[count * (sizeof(gpu_range) + sizeof(gpu_group))]);
  if (!out->memory) return false;
  out->ranges = reinterpret_cast<gpu_range*>(out->memory.get());
  out->groups = reinterpret_cast<gpu_group*>(out->memory.get() + count * sizeof(gpu_range));
  out->num_groups = 0;
  *q_tiles = 0;
  for (int64_t i = 0; i < a.num_rects; ++i) {
    const cqsa_rect& r = a.rects[i];
    out->ranges[i] = {r.k_pos, r.k_len, r.k_row};
    if (i > 0 && same_queries(r, a.rects[i - 1])) {
      if (r.q_len > 0) ++out->groups[out->num_groups - 1].num_ranges;
      continue;
    }
    if (r.q_len <= 0) continue;
    out->groups[out->num_groups++] = {r.q_pos, r.q_len, r.q_row, r.state_row, i, 1, *q_tiles};
    *q_tiles += divide_up(r.q_len, tile_queries);
  }
  return true;
}

cqsa_status fill_rectangles(void* device, const cqsa_attention_leaf& a, const tile_rows& rows, void* memory, uint64_t bytes, void* stream,
                            attention_params* p) {
  int64_t longest = 0;
  for (int64_t i = 0; i < a.num_rects; ++i) longest = larger(longest, a.rects[i].q_len);
  fill_packing(rows, longest, p);
  work_list list;
  if (!build_list(a, p->tile_queries, &list, &p->q_tiles)) return fail(CQSA_ERROR_OUT_OF_HOST_MEMORY, "no host memory for a list of %lld rectangles", (long long)a.num_rects);
  p->num_groups = list.num_groups;
  if (list.num_groups == 0) return CQSA_OK;
  if (a.num_rects == 1) {
    p->one_group = list.groups[0];
    p->one_range = list.ranges[0];
    return CQSA_OK;
  }
  const uint64_t wanted = uint64_t(a.num_rects) * sizeof(gpu_range) + uint64_t(list.num_groups) * sizeof(gpu_group);
  if (!memory || bytes < wanted)
    return fail(CQSA_ERROR_WORKSPACE, "the workspace has %llu bytes, wanted %llu", (unsigned long long)bytes, (unsigned long long)wanted);
  p->ranges = static_cast<const gpu_range*>(memory);
  p->groups = reinterpret_cast<const gpu_group*>(static_cast<char*>(memory) + size_t(a.num_rects) * sizeof(gpu_range));
  return upload(device, memory, list.memory.get(), wanted, stream);
}

}  // namespace

void fill_params(const cqsa_attention_leaf& a, attention_params* p, int64_t run) {
  fill_operands(a, run, p);
  fill_numbers(a, p);
}

uint64_t list_bytes(const cqsa_attention_leaf& leaf) {
  if (leaf.num_rects <= 1) return 0;
  return (uint64_t(leaf.num_rects) * (sizeof(gpu_group) + sizeof(gpu_range)) + 63) / 64 * 64;
}

cqsa_status fill_tiles(void* device, const cqsa_attention_leaf& a, tile_rows rows, void* memory, uint64_t bytes, void* stream,
                       attention_params* p, int64_t* units) {
  int64_t groups = 1;
  if (a.rects || a.num_rects > 0) {
    const cqsa_status status = fill_rectangles(device, a, rows, memory, bytes, stream, p);
    if (status != CQSA_OK) return status;
    groups = p->num_groups;
  } else {
    fill_packing(rows, a.seqlen_q, p);
    p->q_tiles = divide_up(a.seqlen_q, p->tile_queries);
  }
  *units = groups > 0 ? p->q_tiles * a.batch * a.num_kv_heads * p->head_groups : 0;
  return CQSA_OK;
}

cqsa_status launch_tiles(void* device, const cqsa_attention_leaf& a, const tile_kernel& kernel, const void* params, size_t params_bytes,
                         attention_params* first, int64_t units, void* stream) {
  for (first->first_unit = 0; first->first_unit < units; first->first_unit += most_units) {
    const uint32_t blocks = uint32_t(smaller(units - first->first_unit, most_units));
    const launch_shape shape{{blocks, 1, 1}, uint32_t(kernel.threads), uint32_t(kernel.shared_bytes)};
    const cqsa_status status = launch(device, kernel.kernel, shape, params, params_bytes, stream);
    if (status != CQSA_OK) return status;
  }
  return clear_tail(device, a, stream);
}

cqsa_status clear_tail(void* device, const cqsa_attention_leaf& a, void* stream) {
  if (!(a.flags & CQSA_LEAF_CLEAR_TAIL) || a.cu_seqlens_q == nullptr) return CQSA_OK;
  tail_params p{};
  p.out = view_of(a.out, 1, a.num_heads, 2, a.head_dim_v);
  p.lse = plain_view(a.lse);
  p.cu_seqlens_q = a.cu_seqlens_q;
  p.batch = a.batch;
  p.num_heads = a.num_heads;
  p.total_q = a.total_q;
  p.index_bytes = a.index_dtype == CQSA_DTYPE_I64 ? 8 : 4;
  p.head_dim_v = int32_t(a.head_dim_v);
  const int64_t rows_each = 256 / facts_of(device).lanes;
  const int64_t blocks = smaller(divide_up(a.total_q * a.num_heads, rows_each), larger(4 * facts_of(device).compute_units, 16));
  if (blocks < 1) return CQSA_OK;
  return launch(device, kernel_id::cqsa_attention_tail, {{uint32_t(blocks), 1, 1}, 256, 0}, &p, sizeof p, stream);
}

}  // namespace cqsa::gpu
