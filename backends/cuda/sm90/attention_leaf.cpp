// SPDX-License-Identifier: Apache-2.0
// Host part of the Hopper attention: what it takes, which kernel, the tensors as the copy engine knows them, and its launches.
#include "backends/cuda/tuned.h"
#include "backends/gpu/attention_fill.h"
#include "attention_shape.h"

#include <cmath>
#include <cstdio>
#include <numeric>

namespace cqsa::gpu {
namespace {

using sm90::tile_shape;

constexpr int64_t most_rows = int64_t(1) << 30;  // kernels and the copy engine count rows in 32 bits

// ------------------------------------------------------------------------------------------------------- instantiations

struct variant {
  kernel_id kernel[2];  // f16, bf16
  int32_t rows, keys, threads, shared_bytes;
  int64_t d, dv, least_keys;  // sizes up to, and lengths from
};
template <class S> constexpr variant variant_of(kernel_id f16, kernel_id bf16, int64_t least) {
  return {{f16, bf16}, S::rows, S::keys, S::threads, S::shared_bytes, S::d, S::dv, least};
}
#define CQSA_SM90_VARIANT(d, dv, length, least)                                                                             \
  variant_of<tile_shape<d, dv, sm90::form::length>>(kernel_id::cqsa_sm90_attention_f16_d##d##_##length,                     \
                                                    kernel_id::cqsa_sm90_attention_bf16_d##d##_##length, least)
// Lengthy: tiles of more keys pay where there are many of them.
constexpr variant variants[] = {CQSA_SM90_VARIANT(64, 64, usual, 0),
                                CQSA_SM90_VARIANT(96, 96, usual, 0),
                                CQSA_SM90_VARIANT(128, 128, lengthy, 8192),
                                CQSA_SM90_VARIANT(128, 128, usual, 0),
                                CQSA_SM90_VARIANT(192, 128, usual, 0),
                                CQSA_SM90_VARIANT(256, 256, usual, 0)};
#undef CQSA_SM90_VARIANT

// The first one for these sizes; the last one is for all that probe accepts. Of mixed lengths the mean counts. On pages a tile
// has parts that are on one page each: a power of two has few.
const variant& choose(const cqsa_attention_leaf& a) {
  constexpr int count = sizeof variants / sizeof *variants;
  const int64_t keys = a.cu_seqlens_k && a.batch > 0 ? a.total_k / a.batch : a.seqlen_k;
  for (const variant& v : variants)
    if (a.head_dim <= v.d && a.head_dim_v <= v.dv && keys >= v.least_keys && (v.least_keys == 0 || !a.page_table)) return v;
  return variants[count - 1];
}

// ------------------------------------------------------------------------------------------------------------- accepting

const char* why_not(const cqsa_attention_leaf& a) {
  if (a.chip.tier != 90) return "the device has no sm_90a code";
  if (const char* text = why_no_gpu(a)) return text;
  if (a.q.dtype != CQSA_DTYPE_F16 && a.q.dtype != CQSA_DTYPE_BF16) return "q must be f16 or bf16";
  if (a.k.dtype != a.q.dtype || a.v.dtype != a.q.dtype) return "k and v must have q's type";
  if (a.scale_k != CQSA_SCALE_NONE || a.scale_v != CQSA_SCALE_NONE) return "k and v have no scales here";
  if (a.head_dim > 256 || a.head_dim_v > 256) return "head_dim and head_dim_v are at most 256";
  if (a.head_dim % 8 != 0 || a.head_dim_v % 8 != 0) return "head_dim and head_dim_v are multiples of 8";
  if (a.mask.data || a.bias.data) return "masks and bias are not taken";
  if (a.slopes.data) return "ALiBi is not taken";
  if (a.page_table && a.page_size % sm90::gone_keys != 0) return "pages hold a multiple of 16 keys here";
  if (a.page_table && a.num_pages > most_rows) return "there are at most 2^30 pages";
  if (a.batch_invariant) return "the kernel depends on strides, which batch_invariant does not allow";
  if (a.precision != CQSA_PRECISION_DEFAULT && a.precision != CQSA_PRECISION_FAST) return "p is rounded to 16 bits here";
  if (!(a.softmax_scale >= 1e-30 && a.softmax_scale <= 1e30)) return "softmax_scale is between 1e-30 and 1e30";
  if (a.softcap > 0 && !(a.softmax_scale / a.softcap <= 1e30)) return "softcap is at least 1e-30 of softmax_scale";
  if (a.seqlen_k > most_rows || a.seqlen_q > most_rows) return "sequences have at most 2^30 tokens";
  if (a.chip.shared_bytes > 0 && a.chip.shared_bytes < choose(a).shared_bytes) return "the device has too little shared memory";
  return nullptr;
}

cqsa_status probe(const cqsa_attention_leaf* leaf, char* reason, uint64_t size) {
  const char* text = why_not(*leaf);
  if (text && reason && size) std::snprintf(reason, size, "%s", text);
  return text ? CQSA_ERROR_UNSUPPORTED : CQSA_OK;
}

int32_t tiles(const cqsa_attention_leaf* leaf, cqsa_leaf_tile* out, int32_t capacity) {
  const variant& v = choose(*leaf);
  if (capacity < 1) return 0;
  *out = {v.rows, v.keys, 1.0, 1.0};
  return 1;
}

uint64_t workspace(const cqsa_attention_leaf* leaf, int64_t) { return list_bytes(*leaf); }

// ------------------------------------------------------------------------------------------------------------- tensors

// The axes of a view that the copy engine walks; an axis without a stride has one entry that all share.
struct tensor_walk {
  tensor_box box;
  int32_t item_step, head_step;  // coordinates of a batch item and of a head
};

// False: the copy engine cannot read it. rows: how many a launch may name.
bool walk_of(const cqsa_view& x, int64_t channels, int64_t rows, int64_t heads, int64_t items, tensor_walk* out) {
  const int64_t stride[3] = {2 * x.stride[2], 2 * x.stride[1], 2 * x.stride[0]};
  const int64_t size[3] = {larger(rows, 1), heads, items};
  tensor_box& b = out->box;
  b = {x.data, kind_of(x.dtype), {uint64_t(channels), 1, 1, 1}, {16, 16, 16}, {64, 1, 1, 1}};
  if (!x.data || reinterpret_cast<uintptr_t>(x.data) % 16 != 0 || (x.stride[3] != 1 && channels > 1)) return false;
  for (int n = 0; n < 3; ++n) {
    if (size[n] <= 1 || (stride[n] == 0 && n > 0)) continue;
    if (stride[n] < 16 || stride[n] % 16 != 0 || stride[n] >= int64_t(1) << 40 || size[n] > most_rows) return false;
    b.size[n + 1] = uint64_t(size[n]);
    b.stride[n] = uint64_t(stride[n]);
  }
  out->head_step = b.size[2] > 1;
  out->item_step = b.size[3] > 1;
  return true;
}

// Rows of q and of k that a call may name.
struct row_counts {
  int64_t q, k;
};
row_counts rows_of(const cqsa_attention_leaf& a) {
  if (!a.rects && a.num_rects == 0) return {a.cu_seqlens_q ? a.total_q : a.seqlen_q, a.cu_seqlens_k ? a.total_k : a.seqlen_k};
  row_counts n{0, 0};
  for (int64_t i = 0; i < a.num_rects; ++i) {
    n.q = larger(n.q, a.rects[i].q_row + a.rects[i].q_len);
    n.k = larger(n.k, a.rects[i].k_row + a.rects[i].k_len);
  }
  return n;
}

// q, k and v as the copy engine knows them, but for the boxes.
struct tensor_walks {
  tensor_walk q, k, v;
};
bool walks_of(const cqsa_attention_leaf& a, tensor_walks* out) {
  row_counts n = rows_of(a);
  const int64_t k_items = a.page_table ? a.num_pages : a.batch;
  if (a.page_table && (a.rects || a.num_rects > 0 || reinterpret_cast<uintptr_t>(a.page_table) % 4 != 0)) return false;  // rectangles may begin within a part
  if (a.page_table) n.k = a.page_size;
  if (a.q.stride[1] == 0 && a.num_heads > a.num_kv_heads) return false;  // a box may have several heads of q
  return n.q <= most_rows && n.k <= most_rows && walk_of(a.q, a.head_dim, n.q, a.num_heads, a.batch, &out->q) &&
         walk_of(a.k, a.head_dim, n.k, a.num_kv_heads, k_items, &out->k) && walk_of(a.v, a.head_dim_v, n.k, a.num_kv_heads, k_items, &out->v);
}

// In a box of q the heads that share a tile stand next to each other: row = query * heads + head.
void swap_heads_and_rows(tensor_box* b) {
  const uint64_t size = b->size[1], stride = b->stride[0];
  b->size[1] = b->size[2], b->stride[0] = b->stride[1];
  b->size[2] = size, b->stride[1] = stride;
}

cqsa_status fill_maps(void* device, tensor_walks& t, const variant& v, sm90::params* p) {
  swap_heads_and_rows(&t.q.box);
  t.q.box.box[1] = uint32_t(p->a.heads_packed);
  t.q.box.box[2] = uint32_t(p->group_queries);
  t.k.box.box[1] = t.v.box.box[1] = uint32_t(p->page_part ? p->page_part : v.keys);
  p->q_box_bytes = 128 * p->a.heads_packed * p->group_queries;
  p->q_item = t.q.item_step, p->q_head = t.q.box.size[1] > 1;
  p->k_item = t.k.item_step, p->k_head = t.k.head_step;
  p->v_item = t.v.item_step, p->v_head = t.v.head_step;
  cqsa_status status = encode_tensor(device, t.q.box, &p->q);
  if (status == CQSA_OK) status = encode_tensor(device, t.k.box, &p->k);
  return status == CQSA_OK ? encode_tensor(device, t.v.box, &p->v) : status;
}

// --------------------------------------------------------------------------------------------------------------- launch

// How the work of a tile of queries falls from the last to the first one: what is left of it.
double shortest_share(const cqsa_attention_leaf& a, int64_t tile_queries) {
  const cqsa_rect whole{0, 0, a.seqlen_q, a.seqlen_k, 0, 0, 0};
  const cqsa_rect& r = a.num_rects == 1 ? a.rects[0] : whole;
  const int64_t seen = r.q_pos - r.k_pos + (a.causal == CQSA_CAUSAL_TOP_LEFT ? 0 : a.seqlen_k - a.seqlen_q);  // by the query before the first
  const int64_t last = larger(1, smaller(seen + r.q_len, r.k_len)), first = larger(0, smaller(seen + tile_queries, last));
  return double(first) / double(last);
}

// The part of the time in which blocks work, where `rounds` tiles for each of them, whose work falls evenly to `share`, are taken in turns
// of alternating order: two turns together take the same time for every block, but for the last ones, where some get one tile only.
double balance(double rounds, double share) {
  const int64_t turns = int64_t(std::ceil(rounds)), odd = turns % 2;
  const double before = double(turns - 2 + odd), fall = (1 - share) / rounds;
  const double pairs = before - fall * before * before / 2, longest = 1 - fall * before, pair = 2 * longest - 2 * fall;
  return rounds * (1 + share) / 2 / (pairs + (odd || pair < longest ? longest : pair));
}

// Tiles are taken longest first within so many columns: about two of their tiles for every block, since their keys should stay in the
// L2 cache, or more where that leaves blocks without work.
int64_t columns_at_once(const cqsa_attention_leaf& a, const attention_params& p, int64_t columns, int64_t blocks) {
  constexpr double enough = 0.965, gain = 0.01;
  constexpr int64_t tries = 48;
  const double share = shortest_share(a, p.tile_queries), rounds = double(p.q_tiles) / double(blocks);
  int64_t best = smaller(columns, larger(1, 2 * blocks / p.q_tiles));
  const int64_t most = smaller(columns, best + tries);
  double balanced = balance(double(best) * rounds, share);
  for (int64_t n = best + 1; n <= most && balanced < enough; ++n) {
    const double now = balance(double(n) * rounds, share);
    if (now > balanced + gain) best = n, balanced = now;
  }
  return best;
}

// Pairs have even work; but where there are few, blocks would be idle at the end, and longest first is better.
sm90::walk_mode walk_mode_of(const cqsa_attention_leaf& a, const attention_params& p, int64_t blocks) {
  constexpr int64_t enough = 4;  // for each block
  if (!a.cu_seqlens_q && !a.cu_seqlens_k && !a.seqused_k) return sm90::walk_mode::none;
  if (!p.longest_first) return sm90::walk_mode::columns;
  const int64_t tiles = a.cu_seqlens_q ? divide_up(a.total_q, p.tile_queries) : a.batch * p.q_tiles;
  return tiles * a.num_kv_heads * p.head_groups / 2 >= enough * blocks ? sm90::walk_mode::pairs : sm90::walk_mode::rows;
}

sm90::unit_order order_of(const cqsa_attention_leaf& a, const attention_params& p, int64_t units, int64_t blocks) {
  const sm90::walk_mode walk = walk_mode_of(a, p, blocks);
  if (walk != sm90::walk_mode::none) return {uint32_t(units), uint32_t(p.q_tiles), 0, 0, 0, 0, walk};
  const int64_t columns = units / p.q_tiles, at_once = p.longest_first && blocks < units ? columns_at_once(a, p, columns, blocks) : columns;
  const int64_t turns = divide_up(at_once * p.q_tiles, blocks), all = p.longest_first ? divide_up(columns, at_once) * turns : divide_up(units, blocks);
  return {uint32_t(units), uint32_t(p.q_tiles), uint32_t(p.longest_first), uint32_t(at_once), uint32_t(turns), uint32_t(all), walk};
}

// Blocks stay and take one tile of queries after the other; lists of rectangles are left to the device's scheduler, one block for each tile.
uint32_t blocks_for(void* device, const cqsa_attention_leaf& a, int64_t units) {
  if (a.num_rects > 1) return uint32_t(units);
  return uint32_t(smaller(units, facts_of(device).compute_units));
}

cqsa_status launch_leaf(void* device, const cqsa_attention_leaf* leaf, void* memory, uint64_t bytes, const cqsa_exec* exec, void* stream) {
  const cqsa_attention_leaf& a = *leaf;
  if (a.batch < 1 || a.num_heads < 1 || a.num_kv_heads < 1) return CQSA_OK;
  tensor_walks walks;
  if (!walks_of(a, &walks)) return sm80_attention.launch(device, leaf, memory, bytes, exec, stream);
  const variant& v = choose(a);
  sm90::params p{};
  fill_params(a, &p.a, 8);
  int64_t units = 0;
  cqsa_status status = fill_tiles(device, a, {64, v.rows / 64}, memory, bytes, stream, &p.a, &units);
  if (units >= most_units) return sm80_attention.launch(device, leaf, memory, bytes, exec, stream);
  if (status == CQSA_OK && units > 0) {
    p.page_part = a.page_table ? int32_t(std::gcd(a.page_size, int64_t(v.keys))) : 0;
    p.group_queries = p.a.tile_queries / (v.rows / 64);
    const uint32_t blocks = blocks_for(device, a, units);
    p.order = order_of(a, p.a, units, blocks);
    if (fill_maps(device, walks, v, &p) != CQSA_OK) return sm80_attention.launch(device, leaf, memory, bytes, exec, stream);
    const kernel_id kernel = v.kernel[a.q.dtype == CQSA_DTYPE_BF16];
    const launch_shape shape{{blocks, 1, 1}, uint32_t(v.threads), uint32_t(v.shared_bytes)};
    status = launch(device, kernel, shape, &p, sizeof p, stream);
  }
  if (status != CQSA_OK) return status;
  if ((a.flags & CQSA_LEAF_CLEAR_TAIL) && a.cu_seqlens_q) return clear_tail(device, a, stream);
  return CQSA_OK;
}

}  // namespace

extern const cqsa_attention_impl sm90_attention = {
    "cuda_sm90", "Hopper; f16 or bf16, head_dim up to 256 in multiples of 8", probe, tiles, workspace, launch_leaf, nullptr};

}  // namespace cqsa::gpu
