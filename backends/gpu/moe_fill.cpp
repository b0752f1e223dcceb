// SPDX-License-Identifier: Apache-2.0
#include "moe_fill.h"

#include <algorithm>

#include "src/quant_format.h"
#include "src/workspace.h"

namespace cqsa::gpu {
namespace {

constexpr int64_t few_shared_bytes = 60 * 1024;

int64_t longest(const cqsa_moe_leaf& a) { return std::max({a.hidden, a.inter, a.shared_inter}); }

// Which forms of activations a projection takes.
void look_at(const cqsa_moe_leaf& a, const cqsa_moe_set& set, moe_plan& plan) {
  if (set.num_experts == 0) return;
  if (set.format != CQSA_QUANT_NONE) return void((moe_takes_codes(a, set.format) ? plan.codes : plan.plain) = true);
  for (int64_t e = 0; e < set.num_experts; ++e) (moe_takes_codes(a, set.experts[e].format) ? plan.codes : plan.plain) = true;
}

// Tokens of a tile of the kernels for few, by their shared memory; 0: not one.
int64_t few_tokens(const cqsa_moe_leaf& a, bool codes) {
  const int64_t n = divide_up(longest(a), 32) * 32;
  return smaller(few_shared_bytes / (codes ? n + n / 8 : 4 * n), moe_few_tokens);
}

// A piece has no more bytes of y than this, while it has some hundred tokens.
int64_t tokens_of_piece(const cqsa_moe_leaf& a) {
  const int64_t each = a.topk * larger(a.hidden, a.inter) * 4;
  return smaller(a.chunk, larger((int64_t{1} << 31) / each, 256));
}

}  // namespace

bool moe_takes_codes(const cqsa_moe_leaf& a, cqsa_quant_format format) { return a.precision == CQSA_MOE_PRECISION_Q8 && !moe::is_plain(format); }
bool moe_is_uniform(const cqsa_moe_set& set) { return set.num_experts == 0 || set.format != CQSA_QUANT_NONE; }

const char* why_no_moe(const cqsa_moe_leaf& a) {
  constexpr int64_t most = int64_t{1} << 30;
  if (a.hidden > most || a.inter > most || a.shared_inter > most) return "rows of more than 2^30 elements";
  if (a.num_experts > moe::most_experts) return "too many experts";
  return nullptr;
}

moe_plan moe_plan_of(const cqsa_moe_leaf& a, int32_t tuned) {
  moe_plan plan{moe_way::tiles, moe_tile_tokens, false, false, false, 0, tokens_of_piece(a)};
  const cqsa_moe_set* sets[] = {&a.gate, &a.up, &a.down, &a.shared_gate, &a.shared_up, &a.shared_down};
  for (const cqsa_moe_set* set : sets) look_at(a, *set, plan);
  const int64_t slots = plan.tokens * a.topk, few = few_tokens(a, plan.codes && !plan.plain);
  // With both forms, only tiles know which one an expert wants.
  const bool invariant = a.flags & CQSA_MOE_BATCH_INVARIANT, one_form = plan.codes != plan.plain;
  if (!invariant && one_form && few > 0 && slots <= larger(64, a.num_experts / 4)) return plan.way = moe_way::slots, plan.most = 1, plan;
  if (tuned) return plan.way = moe_way::tuned, plan.most = tuned, plan.half = true, plan;
  if (!invariant && one_form && few > 0 && slots <= 3 * a.num_experts) plan.way = moe_way::few, plan.most = int32_t(few);
  return plan;
}

// ---- workspace ----------------------------------------------------------------------------------------------------------------

namespace {

// Numbers and codes share their memory where a layer wants only one of them. The same bytes for every way, so that they grow with the tokens.
void carve_activations(arena& a, int64_t rows, int64_t n, const moe_plan& plan, moe_activations* out) {
  const int64_t padded = moe_padded(n), all = int64_t(smaller(int64_t(arena::times(uint64_t(rows), uint64_t(padded))), int64_t{1} << 58));
  *out = {nullptr, nullptr, nullptr, nullptr, nullptr, padded};
  float* const numbers = a.take<float>(all);
  if (plan.plain || plan.way == moe_way::few || plan.way == moe_way::slots || plan.half) out->plain = numbers;
  signed char* const codes = plan.codes && plan.plain ? a.take<signed char>(all) : reinterpret_cast<signed char*>(numbers);
  float* const scales = plan.codes ? a.take<float>(all / 32) : nullptr;
  if (plan.codes) out->code = codes, out->scale = scales;
}
void carve_halves(arena& a, int64_t rows, const moe_plan& plan, moe_activations* out) {
  if (!plan.half) return;
  out->half = a.take<unsigned short>(int64_t(smaller(int64_t(arena::times(uint64_t(rows), uint64_t(out->padded))), int64_t{1} << 58)));
  out->half_scale = a.take<float>(rows);
}

}  // namespace

uint64_t moe_carve(const cqsa_moe_leaf& leaf, const moe_plan& plan, void* base, moe_memory* out) {
  arena a = base ? arena(base) : arena();
  const cqsa_moe_set* sets[] = {&leaf.gate, &leaf.up, &leaf.down, &leaf.shared_gate, &leaf.shared_up, &leaf.shared_down};
  const int64_t tokens = plan.tokens, slots = tokens * leaf.topk;
  const bool with_shared = leaf.shared_down.num_experts != 0;
  out->control = a.take<uint32_t>(16);
  for (int i = 0; i < 6; ++i) out->lists[i] = sets[i]->experts ? a.take<cqsa_moe_matrix>(sets[i]->num_experts) : nullptr;
  out->experts = a.take<int32_t>(slots), out->order = a.take<int32_t>(slots), out->offsets = a.take<int32_t>(leaf.num_experts + 1);
  out->tiles = a.take<moe_tile>(slots);  // no tile is empty
  carve_activations(a, tokens, leaf.hidden, plan, &out->x);
  carve_activations(a, slots, larger(leaf.inter, leaf.shared_inter), plan, &out->h);
  carve_halves(a, tokens, plan, &out->x), carve_halves(a, slots, plan, &out->h);
  out->y = leaf.output == CQSA_MOE_COMBINED ? static_cast<float*>(a.take_bytes(arena::times(uint64_t(slots), 4 * uint64_t(leaf.hidden)))) : nullptr;
  out->shared_y = with_shared ? static_cast<float*>(a.take_bytes(arena::times(uint64_t(tokens), 4 * uint64_t(leaf.hidden)))) : nullptr;
  out->factors = with_shared ? a.take<float>(tokens) : nullptr;
  return a.used();
}

// ---- views --------------------------------------------------------------------------------------------------------------------

moe_view moe_view_of(const cqsa_moe_rows& x, int64_t rows, int64_t columns) {
  if (x.dtype == CQSA_DTYPE_I32 || x.dtype == CQSA_DTYPE_I64) return {static_cast<char*>(x.data), {x.stride[0], x.stride[1]}, x.dtype == CQSA_DTYPE_I64 ? 8 : 4, 0};
  if (!is_float(x.dtype)) return {static_cast<char*>(x.data), {x.stride[0], x.stride[1]}, kind_i8, 0};
  const cqsa_view view{x.data, x.dtype, 0, {0, 0, x.stride[0], x.stride[1]}};
  const gpu_view v = view_of(view, 1, 1, rows, columns);
  return {v.data, {v.stride[2], v.stride[3]}, v.kind, v.quads};
}

moe_ids moe_ids_of(const cqsa_moe_leaf& a) {
  return {moe_view_of(a.ids, a.tokens, a.topk), a.expert_map, a.expert_map_stride, a.num_ids, a.num_experts, a.topk, a.counters, a.counters_stride};
}

// ---- weights ------------------------------------------------------------------------------------------------------------------

namespace {

uint64_t compact_bytes(cqsa_quant_format format, int64_t n) {
  const quant_format* f = find_quant_format(format);
  return f ? uint64_t(n / f->block_elements * f->block_bytes) : 0;
}

// Experts that lie at equal distances, all there and alike, need no list.
bool is_regular(const cqsa_moe_set& set, int64_t* step) {
  const cqsa_moe_matrix* m = set.experts;
  const auto at = [&](int64_t e) { return reinterpret_cast<intptr_t>(m[e].data); };
  *step = set.num_experts > 1 ? int64_t(at(1) - at(0)) : 0;
  for (int64_t e = 0; e < set.num_experts; ++e)
    if (!m[e].data || m[e].format != m[0].format || m[e].row_bytes != m[0].row_bytes || at(e) != at(0) + e * *step) return false;
  return true;
}

moe_weights weights_of(const cqsa_moe_set& set, const cqsa_moe_matrix* list) {
  moe_weights w{};
  if (set.num_experts == 0) return w;
  w.present = 1, w.rows = set.rows, w.row_elements = set.row_elements, w.format = set.format;
  w.bias = reinterpret_cast<const char*>(set.bias), w.bias_stride[0] = set.bias_stride[0], w.bias_stride[1] = set.bias_stride[1];
  cqsa_moe_matrix m = set.all;
  w.expert_bytes = set.expert_bytes;
  if (set.device_experts) w.list = set.device_experts;
  else if (set.experts && is_regular(set, &w.expert_bytes)) m = set.experts[0], w.format = m.format;
  else if (set.experts) w.list = list;
  w.data = static_cast<const char*>(m.data);
  w.row_bytes = int64_t(w.list || m.row_bytes == 0 ? compact_bytes(w.format, set.row_elements) : m.row_bytes);
  return w;
}

cqsa_status describe(const moe_call& c, const cqsa_moe_set& set, cqsa_moe_matrix* to) {
  for (int64_t first = 0; first < set.num_experts; first += moe_described) {
    moe_describe_params p{};
    p.to = to + first, p.count = smaller(set.num_experts - first, moe_described);
    for (int64_t i = 0; i < p.count; ++i) {
      const cqsa_moe_matrix& m = set.experts[first + i];
      p.list[i] = {m.data, m.row_bytes ? m.row_bytes : compact_bytes(m.format, set.row_elements), m.format, 0};
    }
    const cqsa_status status = launch(c.device, kernel_id::cqsa_gpu_moe_describe, {{1, 1, 1}, 128, 0}, &p, sizeof p, c.stream);
    if (status != CQSA_OK) return status;
  }
  return CQSA_OK;
}

moe_layer layer_of(const cqsa_moe_set& gate, const cqsa_moe_set& up, const cqsa_moe_set& down, bool shared, cqsa_moe_matrix* const* lists) {
  moe_layer l{&gate, &up, &down, down.row_elements, shared, {}, {}};
  const cqsa_moe_set* sets[] = {&gate, &up, &down};
  for (int i = 0; i < 3; ++i) l.weights[i] = weights_of(*sets[i], lists[i]), l.lists[i] = l.weights[i].list;
  return l;
}

cqsa_status describe_layer(const moe_call& c, const moe_layer& l, cqsa_moe_matrix* const* lists) {
  const cqsa_moe_set* sets[] = {l.gate, l.up, l.down};
  for (int i = 0; i < 3; ++i) {
    if (!lists[i] || l.weights[i].list != lists[i]) continue;
    if (const cqsa_status status = describe(c, *sets[i], lists[i]); status != CQSA_OK) return status;
  }
  return CQSA_OK;
}

}  // namespace

// ---- pieces -------------------------------------------------------------------------------------------------------------------

namespace {

template <class View> View moved(View v, int64_t rows, int64_t bytes) {
  v.data += rows * v.stride[0] * bytes;
  return v;
}
int64_t bytes_of_kind(int32_t kind) { return kind == kind_f32 ? 4 : 2; }
moe_view x_of(const moe_call& c) {
  const moe_view x = moe_view_of(c.leaf.x, c.leaf.tokens, c.leaf.hidden);
  return moved(x, c.first, bytes_of_kind(x.kind));
}
moe_ids ids_of(const moe_call& c) {
  moe_ids ids = moe_ids_of(c.leaf);
  ids.ids = moved(ids.ids, c.first, ids.ids.kind);
  return ids;
}
moe_view out_of(const moe_call& c) {
  const bool slots = c.leaf.output == CQSA_MOE_PER_SLOT;
  const moe_view out = moe_view_of(c.leaf.out, slots ? c.leaf.tokens * c.leaf.topk : c.leaf.tokens, c.leaf.hidden);
  return moved(out, c.first * (slots ? c.leaf.topk : 1), bytes_of_kind(out.kind));
}
uint32_t blocks_for(void* device, int64_t units, int64_t each) {
  return uint32_t(larger(1, smaller(units, larger(facts_of(device).compute_units, 1) * each)));
}

cqsa_status take(const moe_call& c) {
  const cqsa_moe_leaf& a = c.leaf;
  moe_take_params p{};
  p.x = x_of(c), p.ids = ids_of(c), p.tokens = c.tokens, p.elements = a.hidden, p.to.padded = c.mem.x.padded;
  const bool direct = c.plan.way == moe_way::slots, in_place = direct || c.plan.way == moe_way::few;
  if (!in_place) p.to = c.mem.x, p.q8_first = c.plan.half && a.precision == CQSA_MOE_PRECISION_Q8 && c.plan.codes;
  if (c.plan.half) p.to.plain = nullptr, p.to.code = nullptr, p.order = c.plan.order;
  if (!direct) {
    p.experts = c.mem.experts, p.control = c.mem.control;
    for (int i = 0; i < 3; ++i) p.lists[i] = c.routed.lists[i];
  }
  p.factors = c.mem.factors, p.factor = a.shared_factor, p.factor_stride = a.shared_factor_stride, p.factor_is_logit = a.shared_factor_is_logit;
  if (p.factor && p.factor_is_logit) p.factor += c.first * p.factor_stride;
  if (in_place && !(p.factor && !p.factor_is_logit)) p.to.padded = 0;  // nobody wants to see x
  if (direct && !p.factors) return CQSA_OK;
  return launch(c.device, kernel_id::cqsa_gpu_moe_take, {{blocks_for(c.device, c.tokens, 8), 1, 1}, 256, 64}, &p, sizeof p, c.stream);
}

cqsa_status group(const moe_call& c) {
  const cqsa_moe_leaf& a = c.leaf;
  moe_group_params p{};
  p.experts = c.mem.experts, p.ids.topk = a.topk, p.slots = c.slots(), p.num_experts = a.num_experts;
  p.each = moe_group_each(a.num_experts, facts_of(c.device).compute_units);
  p.offsets = reinterpret_cast<char*>(c.mem.offsets), p.order = reinterpret_cast<char*>(c.mem.order);
  p.offsets_stride = p.order_stride = 1, p.bytes = 4;
  p.tiles = c.mem.tiles, p.num_tiles = c.mem.control + 1, p.ticket = c.mem.control, p.most = c.plan.most;
  const uint32_t teams = 256 / uint32_t(facts_of(c.device).lanes), shared = uint32_t(4 * larger(int64_t(teams) * p.each + teams + 1, 256));
  return launch(c.device, kernel_id::cqsa_gpu_moe_group, {{uint32_t(divide_up(a.num_experts, p.each)), 1, 1}, 256, shared}, &p, sizeof p, c.stream);
}

cqsa_status combine(const moe_call& c) {
  const cqsa_moe_leaf& a = c.leaf;
  moe_combine_params p{};
  p.out = out_of(c), p.experts = c.mem.experts, p.tokens = c.tokens, p.topk = a.topk, p.hidden = a.hidden;
  p.clear = a.output == CQSA_MOE_PER_SLOT;
  if (!p.clear) p.weights = moved(moe_view_of(a.weights, a.tokens, a.topk), c.first, 4);
  p.y = {reinterpret_cast<char*>(c.mem.y), {a.hidden, 1}, kind_f32, a.hidden % 4 == 0};
  p.shared = c.mem.shared_y, p.factors = c.mem.factors;
  const int64_t units = (p.clear ? c.slots() : c.tokens) * divide_up(a.hidden, 4);
  return launch(c.device, kernel_id::cqsa_gpu_moe_combine, {{blocks_for(c.device, divide_up(units, 256), 16), 1, 1}, 256, 0}, &p, sizeof p, c.stream);
}

cqsa_status run_piece(const moe_call& c, moe_products products) {
  cqsa_status status = take(c);
  if (status == CQSA_OK && c.plan.way != moe_way::slots) status = group(c);
  if (status == CQSA_OK) status = products(c, c.routed);
  if (status == CQSA_OK && c.shared.down->num_experts) status = products(c, c.shared);
  return status == CQSA_OK ? combine(c) : status;
}

}  // namespace

cqsa_status moe_run(void* device, const cqsa_moe_leaf& leaf, const moe_plan& plan, void* workspace, uint64_t bytes, void* stream, moe_products products) {
  if (leaf.tokens < 1) return CQSA_OK;
  moe_memory mem{};
  const uint64_t wanted = moe_carve(leaf, plan, workspace, &mem);
  if (!workspace || bytes < wanted) return fail(CQSA_ERROR_WORKSPACE, "the workspace of the experts has %llu bytes, wanted %llu", (unsigned long long)bytes, (unsigned long long)wanted);
  moe_call c{device, stream, leaf, plan, mem, layer_of(leaf.gate, leaf.up, leaf.down, false, mem.lists),
             layer_of(leaf.shared_gate, leaf.shared_up, leaf.shared_down, true, mem.lists + 3)};
  cqsa_status status = describe_layer(c, c.routed, mem.lists);
  if (status == CQSA_OK) status = describe_layer(c, c.shared, mem.lists + 3);
  for (; status == CQSA_OK && c.first < leaf.tokens; c.first += plan.tokens) {
    c.tokens = smaller(plan.tokens, leaf.tokens - c.first);
    status = run_piece(c, products);
  }
  return status;
}

// ---- products -----------------------------------------------------------------------------------------------------------------

int64_t moe_most_tiles(const moe_call& c, const moe_layer& l, int32_t most) {
  if (l.shared) return divide_up(c.tokens, most);
  return c.plan.way == moe_way::slots ? c.slots() : smaller(c.slots(), c.leaf.num_experts + c.slots() / most);
}

moe_multiply_params moe_multiply_of(const moe_call& c, const moe_layer& l, bool gate_up) {
  const cqsa_moe_leaf& a = c.leaf;
  const bool in_place = c.plan.way == moe_way::slots || c.plan.way == moe_way::few, routed = !l.shared;
  moe_multiply_params p{};
  if (gate_up) p.gate = l.weights[0], p.up = l.weights[1].present ? l.weights[1] : l.weights[0], p.down = l.weights[2];
  else p.up = l.weights[2];
  p.tiles = {routed && c.plan.way != moe_way::slots ? c.mem.tiles : nullptr, c.mem.control + 1, routed && c.plan.way != moe_way::slots ? c.mem.order : nullptr,
             c.mem.experts, routed ? c.slots() : c.tokens, c.plan.most, routed && c.plan.way == moe_way::slots};
  p.h = c.mem.h, p.h.padded = moe_padded(l.inter);
  p.x = gate_up ? c.mem.x : p.h;
  if (in_place) p.rows_of_x = gate_up ? x_of(c) : moe_view{reinterpret_cast<char*>(p.h.plain), {p.h.padded, 1}, kind_f32, 1};
  if (l.shared) p.y = {reinterpret_cast<char*>(c.mem.shared_y), {a.hidden, 1}, kind_f32, a.hidden % 4 == 0};
  else p.y = a.output == CQSA_MOE_PER_SLOT ? out_of(c) : moe_view{reinterpret_cast<char*>(c.mem.y), {a.hidden, 1}, kind_f32, a.hidden % 4 == 0};
  p.how = {a.activation, a.alpha, a.beta, a.limit};
  p.outputs = gate_up ? l.inter : a.hidden, p.topk = routed ? a.topk : 1;
  p.layout = a.layout, p.gate_up = gate_up, p.q8 = a.precision == CQSA_MOE_PRECISION_Q8;
  p.find_experts = gate_up && routed && c.plan.way == moe_way::slots;
  if (p.find_experts) p.ids = ids_of(c);
  for (int i = 0; i < 3; ++i) p.lists[i] = l.lists[i];
  return p;
}

namespace {

cqsa_status multiply_tiles(const moe_call& c, const moe_layer& l, bool gate_up) {
  moe_multiply_params p = moe_multiply_of(c, l, gate_up);
  p.row_blocks = gate_up ? divide_up(p.outputs, 64) * 2 : divide_up(p.outputs, moe_tile_rows);  // h is read by 64
  const int64_t units = moe_most_tiles(c, l, c.plan.most) * p.row_blocks;
  constexpr uint32_t shared = 4 * 2 * 64 * (moe_tile_rows + 4);
  return launch(c.device, kernel_id::cqsa_gpu_moe_tile, {{blocks_for(c.device, units, 8), 1, 1}, 256, shared}, &p, sizeof p, c.stream);
}

cqsa_status multiply_few(const moe_call& c, const moe_layer& l, bool gate_up) {
  moe_multiply_params p = moe_multiply_of(c, l, gate_up);
  const bool codes = c.plan.codes;
  const int64_t padded = divide_up(p.up.row_elements, 32) * 32, each = codes ? padded + padded / 8 : 4 * padded;
  if (l.shared) p.tiles.most = int32_t(smaller(few_tokens(c.leaf, codes), c.tokens));
  const int64_t pass = gate_up ? 16 : 32, tiles = moe_most_tiles(c, l, p.tiles.most);
  const int64_t wanted = larger(facts_of(c.device).compute_units, 1) * 8, passes = divide_up(p.outputs, pass);
  p.rows_each = divide_up(passes, smaller(passes, larger(wanted / tiles, 1))) * pass;
  p.row_blocks = divide_up(p.outputs, p.rows_each);
  const kernel_id kernel = c.plan.few_of_q2 ? kernel_id::cqsa_sm80_moe_few_q2_0 : codes ? kernel_id::cqsa_gpu_moe_few_codes : kernel_id::cqsa_gpu_moe_few_numbers;
  return launch(c.device, kernel, {{blocks_for(c.device, tiles * p.row_blocks, 8), 1, 1}, 128, uint32_t(each * p.tiles.most)}, &p, sizeof p, c.stream);
}

}  // namespace

bool moe_has_plain(const cqsa_moe_leaf& a) {
  const cqsa_moe_set* sets[] = {&a.gate, &a.up, &a.down, &a.shared_gate, &a.shared_up, &a.shared_down};
  for (const cqsa_moe_set* set : sets)
    for (int64_t e = 0; e < (set->format == CQSA_QUANT_NONE ? set->num_experts : smaller(set->num_experts, 1)); ++e)
      if (moe::is_plain(set->format == CQSA_QUANT_NONE ? set->experts[e].format : set->format)) return true;
  return false;
}

cqsa_status moe_halves_of_h(const moe_call& c, const moe_layer& l, int32_t order) {
  moe_take_params p{};
  const int64_t padded = moe_padded(l.inter), rows = l.shared ? c.tokens : c.slots();
  p.x = {reinterpret_cast<char*>(c.mem.h.plain), {padded, 1}, kind_f32, 1}, p.tokens = rows, p.elements = l.inter, p.order = order;
  p.to.half = c.mem.h.half, p.to.half_scale = c.mem.h.half_scale, p.to.padded = padded;
  p.q8_first = c.leaf.precision == CQSA_MOE_PRECISION_Q8, p.teams = padded <= 4096;
  const int64_t units = p.teams ? divide_up(rows, 256 / facts_of(c.device).lanes) : rows;
  return launch(c.device, kernel_id::cqsa_gpu_moe_take, {{blocks_for(c.device, units, 8), 1, 1}, 256, 64}, &p, sizeof p, c.stream);
}

cqsa_status moe_portable_products(const moe_call& c, const moe_layer& l) {
  const auto multiply = c.plan.way == moe_way::tiles ? multiply_tiles : multiply_few;
  const cqsa_status status = multiply(c, l, true);
  return status == CQSA_OK ? multiply(c, l, false) : status;
}

}  // namespace cqsa::gpu
