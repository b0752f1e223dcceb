// SPDX-License-Identifier: Apache-2.0
#include "decode_leaf.h"

#include "backends/cuda/tuned.h"
#include "backends/gpu/attention_fill.h"
#include "backends/gpu/combine_leaf.h"
#include "decode_params.h"

#include <cstdio>

namespace cqsa::gpu {
namespace decode {
namespace {

// -------------------------------------------------------------------------------------------------------- what is accepted

bool is_narrow(cqsa_dtype t) { return t == CQSA_DTYPE_I8 || t == CQSA_DTYPE_E4M3FN || t == CQSA_DTYPE_E5M2; }

int64_t rows_of(const cqsa_attention_leaf& a) { return a.seqlen_q * (a.num_heads / a.num_kv_heads); }

// Scales of a row: one, or one for each group of channels.
int32_t groups_of(int32_t kind, int64_t channels, int64_t group) {
  return kind == CQSA_SCALE_GROUP ? int32_t(divide_up(channels, group)) : 1;
}

int32_t logarithm(int64_t x) {
  int32_t n = 0;
  while (x >> (n + 1)) ++n;
  return n;
}

const char* why_not_types(const cqsa_attention_leaf& a) {
  if (a.q.dtype != CQSA_DTYPE_F16 && a.q.dtype != CQSA_DTYPE_BF16) return "q must be f16 or bf16";
  if (a.k.dtype != a.v.dtype || (a.k.dtype != a.q.dtype && !is_narrow(a.k.dtype)))
    return "k and v must both have q's type, or both be int8, e4m3fn or e5m2";
  const bool grouped = a.scale_k == CQSA_SCALE_GROUP || a.scale_v == CQSA_SCALE_GROUP;
  if (!is_narrow(a.k.dtype) && (a.scale_k != CQSA_SCALE_NONE || a.scale_v != CQSA_SCALE_NONE))
    return "scales are for int8 and fp8 keys and values";
  if (grouped && (a.kv_group < 32 || (a.kv_group & (a.kv_group - 1)))) return "kv_group is 32, 64 or 128";
  if (a.precision == CQSA_PRECISION_F32 || (a.precision == CQSA_PRECISION_SPLIT && !is_narrow(a.k.dtype)))
    return "probabilities are rounded to q's type";
  return nullptr;
}

const char* why_not(const cqsa_attention_leaf& a) {
  if (a.chip.tier < 80) return "the device has no sm_80 code";
  if (const char* text = why_no_gpu(a)) return text;
  if (const char* text = why_not_types(a)) return text;
  if (a.num_kv_heads < 1 || a.seqlen_q < 1 || a.seqlen_q > 16 || rows_of(a) > most_rows)
    return "seqlen_q must be 1..16, and seqlen_q times the query heads of a key head at most 64";
  if (a.head_dim > 256 || a.head_dim_v > 256) return "head_dim and head_dim_v are at most 256";
  if (a.mask.data || a.bias.data) return "there is a mask or a bias";
  if (a.flags & (CQSA_LEAF_STATE_IN | CQSA_LEAF_STATE_OUT)) return "a state goes from call to call";
  // Whether it is this kernel, and how keys are split, follows the number of queries and of sequences.
  if (a.batch_invariant) return "bits are to be the same in any batch";
  if (a.seqlen_k >= INT32_MAX - 2 * keys) return "seqlen_k is below 2^31";
  return cut_of(a).stages < 2 ? "a block has too little shared memory" : nullptr;
}

// ----------------------------------------------------------------------------------------------------------------- the cut

struct variant_facts {
  kernel_id kernel;
  int32_t d, stage_bytes, merge_bytes;
};
template <int D, int Bytes> variant_facts facts_for(kernel_id kernel) {
  using shape = decode_shape<D, Bytes>;
  return {kernel, D, shape::stage_bytes, shape::merge_bytes};
}

template <int D>
variant_facts variant_for(const cqsa_attention_leaf& a, kernel_id f16, kernel_id bf16, kernel_id f16_narrow, kernel_id bf16_narrow) {
  const bool half = a.q.dtype == CQSA_DTYPE_F16;
  return is_narrow(a.k.dtype) ? facts_for<D, 1>(half ? f16_narrow : bf16_narrow) : facts_for<D, 2>(half ? f16 : bf16);
}

variant_facts choose(const cqsa_attention_leaf& a) {
  using id = kernel_id;
  const int64_t d = larger(a.head_dim, a.head_dim_v);
  if (d <= 64)
    return variant_for<64>(a, id::cqsa_sm80_decode_f16_d64, id::cqsa_sm80_decode_bf16_d64, id::cqsa_sm80_decode_f16_narrow_d64,
                           id::cqsa_sm80_decode_bf16_narrow_d64);
  if (d <= 128)
    return variant_for<128>(a, id::cqsa_sm80_decode_f16_d128, id::cqsa_sm80_decode_bf16_d128, id::cqsa_sm80_decode_f16_narrow_d128,
                            id::cqsa_sm80_decode_bf16_narrow_d128);
  return variant_for<256>(a, id::cqsa_sm80_decode_f16_d256, id::cqsa_sm80_decode_bf16_d256, id::cqsa_sm80_decode_f16_narrow_d256,
                          id::cqsa_sm80_decode_bf16_narrow_d256);
}

int32_t slot_bytes_of(const cqsa_attention_leaf& a) {
  if (!is_narrow(a.k.dtype)) return slot_size(0);
  return slot_size(int32_t(larger(groups_of(a.scale_k, a.head_dim, a.kv_group), groups_of(a.scale_v, a.head_dim_v, a.kv_group))));
}

int32_t shared_bytes_of(const variant_facts& v, int32_t m_tiles, int32_t stages, int32_t slot) {
  return int32_t(larger(stages * v.stage_bytes, v.merge_bytes)) + m_tiles * 16 * v.d * 2 + (stages + 1) * slot + facts_bytes;
}

int32_t stages_within(int64_t bytes, const variant_facts& v, int32_t m_tiles, int32_t slot) {
  int32_t stages = most_stages;
  while (stages > 0 && shared_bytes_of(v, m_tiles, stages, slot) > bytes) --stages;
  return stages;
}

// The most blocks to a multiprocessor that registers allow and that leave each of them its stages: three if they are four, otherwise
// two. A block costs 1 KiB beside its own.
void cut_memory(const cqsa_attention_leaf& a, decode_cut* out) {
  const variant_facts v = choose(a);
  const int32_t slot = slot_bytes_of(a);
  out->kernel = v.kernel;
  for (int32_t blocks = v.d == 64 && !is_narrow(a.k.dtype) ? 4 : 2; blocks > 0; blocks /= 2) {
    out->blocks_per_unit = blocks;
    out->stages = stages_within((a.chip.shared_bytes + 1024) / blocks - 1024, v, out->m_tiles, slot);
    if (out->stages >= (blocks > 2 ? 3 : 2)) break;
  }
  out->shared_bytes = shared_bytes_of(v, out->m_tiles, out->stages, slot);
}

// Keys that a row can see at most.
int64_t visible_keys(const cqsa_attention_leaf& a) {
  const int64_t right = a.causal != CQSA_CAUSAL_NONE ? 0 : a.window_right;
  if (a.window_left < 0 || right < 0 || a.window_left > a.seqlen_k || right > a.seqlen_k) return a.seqlen_k;
  return smaller(a.seqlen_k, a.window_left + right + a.seqlen_q);
}

}  // namespace

namespace {

// The fewest splits within 2 % of the best time, where a block takes a stage's time for each of its stages and four more to begin and
// to end, and a wave of blocks as long as one of them.
int32_t find_splits(int64_t units, int64_t slots, int64_t stages) {
  const int64_t most = smaller(128, larger(1, stages / 4));
  const auto cost = [&](int64_t n) {
    const double waves = double(units * n) / double(slots);
    const double full = waves > 4 ? waves + 0.5 : double(divide_up(units * n, slots));  // many waves even out
    return full * double(divide_up(stages, n) + 4) + (n > 1 ? 8 : 0);
  };
  double best = cost(1);
  for (int64_t n = 2; n <= most; ++n) best = cost(n) < best ? cost(n) : best;
  int64_t n = 1;
  while (n < most && cost(n) > best * 1.02) ++n;
  return int32_t(n);
}

struct known_splits {
  int64_t units, slots, stages;
  int32_t splits;
};

}  // namespace

// Finding them takes some hundred divisions, as long as a launch of long sequences; layer after layer asks for the same.
int32_t splits_for(int64_t units, int64_t slots, int64_t stages) {
  constexpr int most = 4;
  thread_local constinit known_splits known[most] = {};
  thread_local constinit int next = 0;
  for (const known_splits& k : known)
    if (k.units == units && k.slots == slots && k.stages == stages) return k.splits;
  const int32_t splits = find_splits(units, slots, stages);
  known[next] = {units, slots, stages, splits};
  next = (next + 1) % most;
  return splits;
}

decode_cut cut_of(const cqsa_attention_leaf& a) {
  decode_cut out{};
  const int64_t rows = rows_of(a);
  out.m_tiles = rows > 32 ? 4 : rows > 16 ? 2 : 1;
  cut_memory(a, &out);
  const int64_t slots = larger(1, a.chip.compute_units) * out.blocks_per_unit;
  out.splits = splits_for(larger(1, a.batch * a.num_kv_heads), slots, divide_up(visible_keys(a), keys));
  return out;
}

// ---------------------------------------------------------------------------------------------------------------- launches

namespace {

void fill_decode(const cqsa_attention_leaf& a, const decode_cut& cut, const split_states& states, decode_params* p) {
  const int64_t run = is_narrow(a.k.dtype) ? 16 : 8, items = a.page_table ? a.num_pages : a.batch;
  fill_params(a, &p->a);
  p->a.k = view_of(a.k, items, a.num_kv_heads, 2, a.head_dim, run);
  p->a.v = view_of(a.v, items, a.num_kv_heads, 2, a.head_dim_v, run);
  p->part_acc = states.acc, p->part_m = states.m, p->part_l = states.l;
  p->part_rows = states.rows, p->row_capacity = states.row_capacity;
  p->splits = cut.splits;
  p->stages = cut.stages, p->m_tiles = cut.m_tiles;
  p->k_groups = groups_of(a.scale_k, a.head_dim, a.kv_group);
  p->v_groups = groups_of(a.scale_v, a.head_dim_v, a.kv_group);
  p->group_shift = a.scale_k == CQSA_SCALE_GROUP || a.scale_v == CQSA_SCALE_GROUP ? logarithm(a.kv_group) : 30;
  p->slot_bytes = slot_bytes_of(a);
  p->page_size = int32_t(smaller(larger(a.page_size, 1), INT32_MAX));
}

}  // namespace

cqsa_status launch_cut(void* device, const cqsa_attention_leaf& a, const decode_cut& cut, void* memory, uint64_t bytes, void* stream) {
  static_assert(sizeof(decode_params) <= most_params_bytes);
  split_states states{};
  if (cut.splits > 1) {
    const uint64_t wanted = split_bytes(a, a.seqlen_q, cut.splits);
    if (!memory || bytes < wanted)
      return fail(CQSA_ERROR_WORKSPACE, "the workspace has %llu bytes, wanted %llu", (unsigned long long)bytes, (unsigned long long)wanted);
    states = split_memory(a, a.seqlen_q, cut.splits, memory);
  }
  decode_params p{};
  fill_decode(a, cut, states, &p);
  int64_t units = 0;
  cqsa_status status = fill_tiles(device, a, {most_rows}, nullptr, 0, stream, &p.a, &units);
  for (p.a.first_unit = 0; status == CQSA_OK && p.a.first_unit < units; p.a.first_unit += most_units) {
    const uint32_t blocks = uint32_t(smaller(units - p.a.first_unit, most_units));
    status = launch(device, cut.kernel, {{blocks, uint32_t(cut.splits), 1}, threads, uint32_t(cut.shared_bytes)}, &p, sizeof p, stream);
  }
  if (status == CQSA_OK && cut.splits > 1) status = combine(device, a, states, stream);
  if (status == CQSA_OK && (a.flags & CQSA_LEAF_CLEAR_TAIL) && a.cu_seqlens_q) status = clear_tail(device, a, stream);
  return status;
}

namespace {

// ---------------------------------------------------------------------------------------------------------------- the entry

// Windows of keys that pass by, with a state between them: what brings the keys there is slower than any kernel.
bool is_whole(const cqsa_attention_leaf& a) {
  return a.rects == nullptr && a.num_rects == 0 && !(a.flags & (CQSA_LEAF_STATE_IN | CQSA_LEAF_STATE_OUT));
}

cqsa_status probe(const cqsa_attention_leaf* leaf, char* reason, uint64_t size) {
  const char* text = why_not(*leaf);
  if (text && reason && size) std::snprintf(reason, size, "%s", text);
  return text ? CQSA_ERROR_UNSUPPORTED : CQSA_OK;
}

int32_t tiles(const cqsa_attention_leaf*, cqsa_leaf_tile* out, int32_t capacity) {
  if (capacity > 0) *out = {most_rows, keys, 1.0, 2.0};
  return capacity > 0;
}

uint64_t workspace(const cqsa_attention_leaf* leaf, int64_t workers) {
  if (!is_whole(*leaf)) return portable_attention.workspace(leaf, workers);
  const int32_t splits = cut_of(*leaf).splits;
  return splits > 1 ? split_bytes(*leaf, leaf->seqlen_q, splits) : 0;
}

cqsa_status launch_leaf(void* device, const cqsa_attention_leaf* leaf, void* memory, uint64_t bytes, const cqsa_exec* exec, void* stream) {
  if (!is_whole(*leaf)) return portable_attention.launch(device, leaf, memory, bytes, exec, stream);
  if (leaf->batch < 1) return CQSA_OK;
  return launch_cut(device, *leaf, cut_of(*leaf), memory, bytes, stream);
}

}  // namespace
}  // namespace decode

extern const cqsa_attention_impl sm80_decode = {"cuda_sm80_decode", "sm_80 or newer, up to 16 queries", decode::probe, decode::tiles,
                                                decode::workspace, decode::launch_leaf, nullptr};

}  // namespace cqsa::gpu
