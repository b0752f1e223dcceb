// SPDX-License-Identifier: Apache-2.0
// Everything of the fast CPU attention that is not arithmetic: what it accepts, tiles and workspace, cutting the leaf into
// work units, and running them on the workers.
#include "attention_job.h"
#include "cpu_features.h"

#include "dtype.h"
#include "element.h"

#include <atomic>
#include <cstdio>
#include <cstring>

namespace cqsa::cpu {
namespace {

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// --------------------------------------------------------------------------------------------------------------- probe

bool is_float(cqsa_dtype t) { return t == CQSA_DTYPE_F32 || t == CQSA_DTYPE_F16 || t == CQSA_DTYPE_BF16; }
bool is_kv(cqsa_dtype t) {
  return is_float(t) || t == CQSA_DTYPE_I8 || t == CQSA_DTYPE_E4M3FN || t == CQSA_DTYPE_E5M2;
}

cqsa_status decline(char* reason, uint64_t size, const char* text) {
  if (reason && size) std::snprintf(reason, size, "%s", text);
  return CQSA_ERROR_UNSUPPORTED;
}

// Whether all values of a type are bf16 values.
bool is_exact_bf16(cqsa_dtype t) {
  return t == CQSA_DTYPE_BF16 || t == CQSA_DTYPE_I8 || t == CQSA_DTYPE_E4M3FN || t == CQSA_DTYPE_E5M2;
}

// What the products of pairs of bf16 ask for beyond the rest.
cqsa_status probe_pairs(const cqsa_attention_leaf* leaf, char* reason, uint64_t size) {
  if (leaf->precision > CQSA_PRECISION_FAST) return decline(reason, size, "probabilities are rounded to bf16 here, and more precision was asked for");
  if (leaf->q.dtype != CQSA_DTYPE_BF16) return decline(reason, size, "q must be bf16: f32 and f16 are not narrowed");
  if (!is_exact_bf16(leaf->k.dtype) || !is_exact_bf16(leaf->v.dtype))
    return decline(reason, size, "k and v must be bf16, int8, e4m3fn or e5m2: f32 and f16 are not narrowed");
  const bool grouped = leaf->scale_k == CQSA_SCALE_GROUP || leaf->scale_v == CQSA_SCALE_GROUP;
  if (grouped && leaf->kv_group % 32 != 0) return decline(reason, size, "scales must belong to groups of a multiple of 32 channels");
  return CQSA_OK;
}

// --------------------------------------------------------------------------------------------------- tiles and workspace

int64_t clamp_tile_q(const kernel_target& target, int64_t tile_q) {
  const int64_t q = tile_q < target.lanes ? target.lanes : tile_q > target.max_tile_q ? target.max_tile_q : tile_q;
  return round_up(q, target.lanes);
}
int64_t clamp_tile_k(int64_t tile_k) { return tile_k < 1 ? 1 : tile_k > 4096 ? 4096 : tile_k; }

// Hands out pieces of memory from `base`, or only counts their bytes (base NULL). One code for both, so that they agree.
struct carver {
  char* base;
  uint64_t used = 0;
  template <class T> void take(T*& pointer, int64_t count) {
    if (base) pointer = reinterpret_cast<T*>(base + used);
    used += uint64_t(round_up(count * int64_t(sizeof(T)), 64));
  }
};

// An odd number of cache lines: a column of such rows is then spread over all cache sets.
int64_t odd_lines(int64_t dwords) { return (((dwords + 15) / 16) | 1) * 16; }

void carve_f32(const cqsa_attention_leaf& leaf, int64_t rows, int64_t keys, int64_t block, carver& from, scratch* out) {
  out->ldk = round_up(leaf.head_dim, 16);
  out->ldv = round_up(leaf.head_dim_v, 32) + 16;
  from.take(out->qt, rows * leaf.head_dim);
  from.take(out->s, block * keys);
  from.take(out->k, keys * out->ldk);
  from.take(out->v, keys * out->ldv);
}

int64_t groups_of(int32_t kind, int64_t channels, int64_t group) {
  return kind == CQSA_SCALE_GROUP && group > 0 ? (channels + group - 1) / group : 1;
}

void carve_pairs(bool tiles, const cqsa_attention_leaf& leaf, int64_t rows, int64_t tile_k, int64_t block, carver& from,
                 scratch* out) {
  // Tiles take 32 keys and depths at a time and 16 channels, the vector instructions two keys and depths.
  const int64_t keys = round_up(tile_k, tiles ? 32 : 2), channels = round_up(leaf.head_dim_v, 16);
  const int64_t groups_k = groups_of(leaf.scale_k, leaf.head_dim, leaf.kv_group);
  const int64_t groups_v = groups_of(leaf.scale_v, leaf.head_dim_v, leaf.kv_group);
  out->depth2 = round_up(leaf.head_dim, tiles ? 32 : 2) / 2;
  out->ldk = odd_lines(out->depth2);
  out->ldv = odd_lines(tiles ? keys / 2 : leaf.head_dim_v);
  out->stage_step = channels;
  out->factor_step = keys;
  out->half_step = round_up(leaf.head_dim > leaf.head_dim_v ? leaf.head_dim : leaf.head_dim_v, 32);
  from.take(out->q2, rows * out->depth2);
  from.take(out->s, block * keys);
  from.take(out->k2, keys * out->ldk);
  from.take(out->v2, (tiles ? channels : keys / 2) * out->ldv);
  from.take(out->p2, block * (groups_k > 1 ? keys : keys / 2));
  // One piece for both: the one is used while a tile of keys is loaded, the other when its values are summed.
  from.take(out->part, tiles ? (channels > 128 ? 16 * channels : 8 * 256) : 0);
  out->stage = reinterpret_cast<uint32_t*>(out->part);
  from.take(out->k_factor, groups_k * keys);
  from.take(out->v_factor, groups_v * keys);
  from.take(out->half, 2 * out->half_step);
  from.take(out->wild, keys);
}

// Cuts the scratch of one worker from `base`; returns its bytes.
uint64_t carve(const kernel_target& target, const cqsa_attention_leaf& leaf, char* base, scratch* out) {
  const int64_t rows = clamp_tile_q(target, leaf.tile_q), keys = clamp_tile_k(leaf.tile_k);
  const int64_t block = rows < target.block ? rows : target.block;
  int64_t longest = leaf.head_dim > leaf.head_dim_v ? leaf.head_dim : leaf.head_dim_v;
  if (leaf.bias.data && keys > longest) longest = keys;
  carver from{base};
  if (target.kind == products::f32) carve_f32(leaf, rows, keys, block, from, out);
  else carve_pairs(target.kind == products::tiles, leaf, rows, keys, block, from, out);
  from.take(out->acc, rows * leaf.head_dim_v);
  from.take(out->m, rows);
  from.take(out->l, rows);
  from.take(out->alpha, rows);
  from.take(out->slope, rows);
  from.take(out->lo, rows);
  from.take(out->hi, rows);
  from.take(out->lo_rel, rows);
  from.take(out->hi_rel, rows);
  from.take(out->dist, rows);
  from.take(out->row, longest);
  from.take(out->raw, longest * 4);
  from.take(out->gone, keys);
  return from.used;
}

// Efficiencies measured on a Zen 5 at head_dim 64 and 128, AVX-512 (AVX2 loses a little less); the planner needs ratios only.
constexpr cqsa_leaf_tile offers[] = {{128, 128, 1.0, 0}, {64, 128, 0.98, 0}, {64, 64, 0.95, 0}, {32, 64, 0.93, 0}, {32, 32, 0.89, 0},
                                     {16, 32, 0.77, 0},  {16, 16, 0.74, 0}};
// With batch_invariant one tile_k for all: it decides the order of a row's sums.
constexpr cqsa_leaf_tile invariant_offers[] = {{128, 64, 1.0, 0}, {64, 64, 0.97, 0}, {32, 64, 0.95, 0}, {16, 64, 0.82, 0}};

// Products of pairs of bf16: k and v are packed for each tile of queries, which larger ones repay.
constexpr cqsa_leaf_tile pair_offers[] = {{256, 128, 1.0, 0}, {128, 128, 0.97, 0}, {64, 128, 0.9, 0}, {64, 64, 0.85, 0},
                                          {32, 64, 0.75, 0},  {32, 32, 0.65, 0},   {16, 32, 0.45, 0}};
constexpr cqsa_leaf_tile invariant_pair_offers[] = {{256, 64, 1.0, 0}, {128, 64, 0.97, 0}, {64, 64, 0.9, 0}, {32, 64, 0.75, 0}, {16, 64, 0.5, 0}};

struct offer_list {
  const cqsa_leaf_tile* list;
  int32_t length;
  template <size_t N> offer_list(const cqsa_leaf_tile (&from)[N]) : list(from), length(int32_t(N)) {}
};
offer_list offers_of(const kernel_target& target, bool fixed) {
  if (target.kind == products::f32) return fixed ? offer_list(invariant_offers) : offer_list(offers);
  return fixed ? offer_list(invariant_pair_offers) : offer_list(pair_offers);
}

// --------------------------------------------------------------------------------------------------------- work units

// A run of units over the same queries and keys: all batch items at once where they are alike, else one.
struct segment {
  int64_t batch, batches;
  work_unit proto;  // all but batch, head, q_len and what follows from the query tile
  int64_t q_len, heads, head_groups, q_tiles, units;
};

// Walks over the segments in order; every worker has its own, since unit numbers only grow.
struct cursor {
  const cqsa_attention_leaf& leaf;
  int64_t tile_q;
  int64_t next = 0;   // batch item or rectangle
  int64_t first = 0;  // number of the segment's first unit
  segment seg{};

  bool ragged() const { return leaf.cu_seqlens_q || leaf.cu_seqlens_k || leaf.seqused_k; }

  bool advance() {
    first += seg.units;
    seg = segment{};
    if (leaf.num_rects > 0 || leaf.rects) return advance_rects();
    if (next >= (ragged() ? leaf.batch : 1)) return false;
    seg.batch = next;
    seg.batches = ragged() ? 1 : leaf.batch;
    whole_range(next++);
    count_units();
    return true;
  }

 private:
  bool advance_rects() {
    if (next >= leaf.num_rects) return false;
    const cqsa_rect& r = leaf.rects[next];
    int64_t end = next + 1;
    while (end < leaf.num_rects && leaf.rects[end].q_row == r.q_row && leaf.rects[end].q_len == r.q_len) ++end;
    seg.batches = leaf.batch;
    seg.q_len = r.q_len;
    work_unit& u = seg.proto;
    u.q_pos = r.q_pos;
    u.q_row = u.mask_row = r.q_row;
    u.state_row = r.state_row;
    u.off = leaf.causal == CQSA_CAUSAL_TOP_LEFT ? 0 : leaf.seqlen_k - leaf.seqlen_q;
    u.ranges = leaf.rects + next;
    u.num_ranges = end - next;
    next = end;
    count_units();
    return true;
  }

  void whole_range(int64_t b) {
    work_unit& u = seg.proto;
    int64_t keys = leaf.seqlen_k;
    seg.q_len = leaf.seqlen_q;
    if (leaf.cu_seqlens_q) {
      u.q_row = index_of(leaf.cu_seqlens_q, leaf.index_dtype, b);
      seg.q_len = index_of(leaf.cu_seqlens_q, leaf.index_dtype, b + 1) - u.q_row;
    }
    if (leaf.cu_seqlens_k) {
      u.whole.k_row = index_of(leaf.cu_seqlens_k, leaf.index_dtype, b);
      keys = index_of(leaf.cu_seqlens_k, leaf.index_dtype, b + 1) - u.whole.k_row;
    }
    if (leaf.seqused_k) keys = index_of(leaf.seqused_k, leaf.seqused_dtype, b);
    u.whole.k_len = keys;
    u.mask_col_shift = -u.whole.k_row;  // mask and bias count from the segment's first key
    u.off = leaf.causal == CQSA_CAUSAL_TOP_LEFT ? 0 : keys - seg.q_len;
    u.num_ranges = 1;
  }

  void count_units() {
    const int64_t group = leaf.num_heads / leaf.num_kv_heads;
    // Few queries: the heads that share keys fill the lanes.
    int64_t heads = seg.q_len > 0 ? tile_q / seg.q_len : 1;
    seg.heads = heads < 1 ? 1 : heads > group ? group : heads;
    seg.head_groups = (group + seg.heads - 1) / seg.heads;
    seg.q_tiles = (seg.q_len + tile_q - 1) / tile_q;
    seg.units = seg.batches * leaf.num_kv_heads * seg.head_groups * seg.q_tiles;
  }
};

// Unit n of a segment. Under a causal rule the late queries have the most keys and come first, all heads of them; without
// one a head's tiles stand together, which keeps its keys in the cache.
void make_unit(const cursor& at, int64_t n, work_unit* u) {
  const segment& seg = at.seg;
  const int64_t inner = seg.batches * at.leaf.num_kv_heads * seg.head_groups;
  const bool causal = at.leaf.causal != CQSA_CAUSAL_NONE;
  const int64_t tile = causal ? seg.q_tiles - 1 - n / inner : n % seg.q_tiles;
  int64_t rest = causal ? n % inner : n / seg.q_tiles;
  const int64_t group = at.leaf.num_heads / at.leaf.num_kv_heads;
  *u = seg.proto;
  const int64_t part = rest % seg.head_groups * seg.heads;
  rest /= seg.head_groups;
  u->kv_head = rest % at.leaf.num_kv_heads;
  u->batch = seg.batch + rest / at.leaf.num_kv_heads;
  u->head = u->kv_head * group + part;
  u->heads = group - part < seg.heads ? group - part : seg.heads;
  const int64_t skip = tile * at.tile_q;
  u->q_len = seg.q_len - skip < at.tile_q ? seg.q_len - skip : at.tile_q;
  u->q_pos += skip;
  u->q_row += skip;
  u->mask_row += skip;
  u->state_row += skip;
  if (!u->ranges) u->ranges = &u->whole;
}

// The tile_q that is worked with: smaller than asked where there would be too few units to share among the cores. No bit
// depends on it. A function of the sizes alone, so that units() and launch() agree.
int64_t working_tile_q(const kernel_target& target, const cqsa_attention_leaf& leaf) {
  int64_t tile = clamp_tile_q(target, leaf.tile_q);
  const int64_t group = leaf.num_heads / leaf.num_kv_heads;
  while (tile / 2 >= target.block && tile / 2 % target.lanes == 0 &&
         leaf.batch * leaf.num_kv_heads * ((leaf.seqlen_q * group + tile - 1) / tile) < 16)
    tile /= 2;
  return tile;
}

// -------------------------------------------------------------------------------------------------------------- launch

struct job {
  const kernel_target& target;
  const cqsa_attention_leaf& leaf;
  const cqsa_exec* exec;
  char* workspace;
  uint64_t bytes_each;
  int64_t tile_q;
  std::atomic<int64_t> next{0};
  std::atomic<bool> stop{false};
};

constexpr scalar_ops conversions = {[](uint16_t x) { return f16_to_f32(x); }, [](float x) { return f32_to_f16(x); }};

void work(void* data, int64_t index) {
  job& j = *static_cast<job*>(data);
  scratch mem{};
  carve(j.target, j.leaf, j.workspace + uint64_t(index) * j.bytes_each, &mem);
  cursor at{j.leaf, j.tile_q};
  bool more = at.advance();
  while (!j.stop.load(std::memory_order_relaxed)) {
    const int64_t n = j.next.fetch_add(1, std::memory_order_relaxed);
    while (more && n >= at.first + at.seg.units) more = at.advance();
    if (!more) return;
    work_unit unit;
    make_unit(at, n - at.first, &unit);
    bool stop = j.target.run_unit(&j.leaf, &unit, &mem, &conversions, j.exec) != 0;
    if (!stop && j.exec && j.exec->poll) stop = j.exec->poll(j.exec->user, 1) != 0;
    if (stop) j.stop.store(true, std::memory_order_relaxed);
  }
}

// Below this, waking another thread costs more than it brings.
bool tiny(const cqsa_attention_leaf& leaf) {
  double pairs = 0;
  if (leaf.rects)
    for (int64_t i = 0; i < leaf.num_rects; ++i) pairs += double(leaf.rects[i].q_len) * double(leaf.rects[i].k_len + 1);
  else pairs = double(leaf.seqlen_q) * double(leaf.seqlen_k + 1);
  return pairs * double(leaf.batch) * double(leaf.num_heads) * double(2 * (leaf.head_dim + leaf.head_dim_v)) < 1e6;
}

}  // namespace

// ------------------------------------------------------------------------------------------ what entries are made of

cqsa_status probe_leaf(const kernel_target& target, const cqsa_attention_leaf* leaf, char* reason, uint64_t size) {
  if (leaf->q.dtype == CQSA_DTYPE_F64) return decline(reason, size, "f64 is computed by cpu_reference only");
  if (!is_float(leaf->q.dtype) || !is_kv(leaf->k.dtype) || !is_kv(leaf->v.dtype))
    return decline(reason, size, "q must be f32, f16 or bf16, and k and v one of these, int8, e4m3fn or e5m2");
  if (!(leaf->flags & CQSA_LEAF_STATE_OUT) && !is_float(leaf->out.dtype))
    return decline(reason, size, "out must be f32, f16 or bf16");
  if (leaf->bias.data && !is_float(leaf->bias.dtype)) return decline(reason, size, "bias must be f32, f16 or bf16");
  if (leaf->head_dim < 1 || leaf->head_dim > 576 || leaf->head_dim_v < 1 || leaf->head_dim_v > 512)
    return decline(reason, size, "head_dim is 1..576 and head_dim_v 1..512");
  return target.kind == products::f32 ? CQSA_OK : probe_pairs(leaf, reason, size);
}

uint64_t workspace_of(const kernel_target& target, const cqsa_attention_leaf* leaf, int64_t workers) {
  scratch unused{};
  return carve(target, *leaf, nullptr, &unused) * uint64_t(workers < 1 ? 1 : workers);
}

int32_t tiles_of(const kernel_target& target, const cqsa_attention_leaf* leaf, cqsa_leaf_tile* out, int32_t capacity) {
  const auto [list, length] = offers_of(target, leaf->batch_invariant != 0);
  const int64_t group = leaf->num_kv_heads > 0 ? leaf->num_heads / leaf->num_kv_heads : 1;
  // No larger than the problem. Clipping tile_k changes no sum: all keys are in one tile before and after.
  const int64_t rows = leaf->seqlen_q < target.max_tile_q ? leaf->seqlen_q * group : target.max_tile_q;
  const int64_t keys = round_up(leaf->seqlen_k < 1 ? 1 : leaf->seqlen_k, 16);
  int32_t count = 0;
  uint64_t last = 0;
  double best = 0;
  for (int32_t i = 0; i < length && count < capacity; ++i) {
    cqsa_attention_leaf sized = *leaf;
    sized.tile_q = clamp_tile_q(target, list[i].tile_q < rows ? list[i].tile_q : rows);
    sized.tile_k = list[i].tile_k < keys ? list[i].tile_k : keys;
    const uint64_t bytes = workspace_of(target, &sized, 1);
    if (count && bytes >= last) continue;
    if (!count) best = list[i].efficiency;
    last = bytes;
    out[count++] = {sized.tile_q, sized.tile_k, list[i].efficiency / best, 0};
  }
  return count;
}

int64_t units_of(const kernel_target& target, const cqsa_attention_leaf* leaf) {
  if (leaf->batch < 1 || leaf->num_kv_heads < 1) return 0;
  cursor at{*leaf, working_tile_q(target, *leaf)};
  while (at.advance()) {
  }
  return at.first;
}

cqsa_status launch_on(const kernel_target& target, const cqsa_attention_leaf* leaf, void* workspace, uint64_t bytes,
                      const cqsa_exec* exec) {
  if (leaf->batch < 1 || leaf->num_heads < 1 || leaf->num_kv_heads < 1) return CQSA_OK;
  cqsa_attention_leaf own = *leaf;
  own.tile_k = clamp_tile_k(own.tile_k);
  int64_t workers = exec && exec->run && exec->num_workers > 1 ? exec->num_workers : 1;
  const uint64_t each = workspace_of(target, &own, 1);
  if (bytes < each * uint64_t(workers)) return fail(CQSA_ERROR_WORKSPACE, "the workspace of the CPU attention is too small");
  if (reinterpret_cast<uintptr_t>(workspace) % 64) return fail(CQSA_ERROR_WORKSPACE, "the workspace is not aligned to 64");
  job j{target, own, exec, static_cast<char*>(workspace), each, working_tile_q(target, own)};
  if (workers > 1) {
    const int64_t units = units_of(target, &own);
    if (units < workers) workers = units;
    if (tiny(own)) workers = 1;
  }
  if (workers > 1) {
    const cqsa_status status = exec->run(exec->user, workers, work, &j);
    if (status != CQSA_OK) return status;
  } else {
    work(&j, 0);
  }
  return j.stop.load() ? fail(CQSA_ERROR_CANCELLED, "cancelled") : CQSA_OK;
}

// -------------------------------------------------------------------------------------------------------- the entries

namespace {

// The struct's functions take no closure, hence one set of them per target.
template <const kernel_target& target> struct entry {
  static int32_t tiles(const cqsa_attention_leaf* leaf, cqsa_leaf_tile* out, int32_t capacity) {
    return tiles_of(target, leaf, out, capacity);
  }
  static uint64_t workspace(const cqsa_attention_leaf* leaf, int64_t workers) { return workspace_of(target, leaf, workers); }
  static cqsa_status launch(void*, const cqsa_attention_leaf* leaf, void* workspace, uint64_t bytes, const cqsa_exec* exec,
                            void*) {
    return launch_on(target, leaf, workspace, bytes, exec);
  }
  static int64_t units(const cqsa_attention_leaf* leaf) { return units_of(target, leaf); }
};

cqsa_status probe_baseline(const cqsa_attention_leaf* leaf, char* reason, uint64_t size) {
  return probe_leaf(target_baseline, leaf, reason, size);
}
#if defined(CQSA_CPU_X86)
cqsa_status probe_avx2(const cqsa_attention_leaf* leaf, char* reason, uint64_t size) {
  if (!this_cpu().avx2) return decline(reason, size, "this CPU lacks AVX2, FMA, F16C or BMI2");
  return probe_leaf(target_avx2, leaf, reason, size);
}
cqsa_status probe_avx512(const cqsa_attention_leaf* leaf, char* reason, uint64_t size) {
  if (!this_cpu().avx512) return decline(reason, size, "this CPU lacks AVX-512 F/BW/DQ/VL");
  return probe_leaf(target_avx512, leaf, reason, size);
}
cqsa_status probe_avx512_bf16(const cqsa_attention_leaf* leaf, char* reason, uint64_t size) {
  if (!this_cpu().avx512_bf16) return decline(reason, size, "this CPU lacks AVX-512 BF16");
  return probe_leaf(target_avx512_bf16, leaf, reason, size);
}
cqsa_status probe_amx(const cqsa_attention_leaf* leaf, char* reason, uint64_t size) {
  if (!this_cpu().amx) return decline(reason, size, "this CPU lacks AMX-TILE or AMX-BF16, or its system does not save them");
  const cqsa_status status = probe_leaf(target_amx, leaf, reason, size);
  if (status != CQSA_OK) return status;
  if (!may_use_tiles()) return decline(reason, size, "the system refused this process the AMX tiles");
  return CQSA_OK;
}
using e_amx = entry<target_amx>;
using e_bf16 = entry<target_avx512_bf16>;
using e512 = entry<target_avx512>;
using e2 = entry<target_avx2>;
#endif
using e0 = entry<target_baseline>;

}  // namespace

const cqsa_attention_impl* attention_impls(int32_t* count) {
  static const cqsa_attention_impl list[] = {
#if defined(CQSA_CPU_X86)
      {"cpu_amx", "x86 with AMX-TILE, AMX-BF16, AVX-512 BF16", probe_amx, e_amx::tiles, e_amx::workspace, e_amx::launch,
       e_amx::units},
      {"cpu_avx512_bf16", "x86 with AVX-512 BF16", probe_avx512_bf16, e_bf16::tiles, e_bf16::workspace, e_bf16::launch,
       e_bf16::units},
      {"cpu_avx512", "x86 with AVX-512 F, BW, DQ, VL", probe_avx512, e512::tiles, e512::workspace, e512::launch, e512::units},
      {"cpu_avx2", "x86 with AVX2, FMA, F16C, BMI2", probe_avx2, e2::tiles, e2::workspace, e2::launch, e2::units},
#endif
      {"cpu_baseline", "any CPU", probe_baseline, e0::tiles, e0::workspace, e0::launch, e0::units},
      reference_impl,
  };
  *count = int32_t(sizeof list / sizeof *list);
  return list;
}

}  // namespace cqsa::cpu
