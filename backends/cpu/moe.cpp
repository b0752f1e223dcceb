// SPDX-License-Identifier: Apache-2.0
// Mixtures of experts on the CPU: tokens in pieces; of a piece, activations to int8 once per token, slots by their experts, then for every (expert, block of its
// tokens, tile of rows) a worker that takes rows of weights apart once and multiplies them with all tokens of the block. Sums of a token depend on the token alone.
#include "backends/moe_rules.h"
#include "cpu_features.h"
#include "element.h"
#include "fp8_element.h"
#include "fp8_float_mode.h"
#include "moe_job.h"
#include "quant_format.h"
#include "workspace.h"

#include <algorithm>
#include <atomic>
#include <cstdio>

namespace cqsa::cpu {
namespace {

constexpr scalar_ops conversions = {[](uint16_t x) { return f16_to_f32(x); }, [](float x) { return f32_to_f16(x); }};

constexpr int64_t tile_rows = 32;     // of a projection that one worker makes at a time: a group of q8
constexpr int64_t rows_at_once = 8;   // that are taken apart before the tokens pass by: they stay in the first cache
constexpr int64_t block_tokens = 128; // of an expert, at a time

// One layer: the routed experts, or the shared one.
struct layer {
  const cqsa_moe_set *gate, *up, *down;
  int64_t inter, num_experts;
  bool wants_codes, wants_plain;      // of x
  bool h_codes, h_plain;              // of h
};

// The scratch of one worker.
struct scratch {
  moe_codes codes;  // rows_at_once
  float* plain;     // likewise
  float *g, *u;     // [block_tokens][tile_rows]
  int32_t* index;   // [block_tokens]
  float* row;       // a row of anything
  char* raw;
};

// A block of tokens of one expert: entries begin .. end of the order.
struct block {
  int32_t expert, begin, end;
};

struct memory {
  moe_activations x, h;
  float *y, *shared_y;       // [slot][hidden], [token][hidden]
  float* factor;             // [token]: of the shared expert
  int32_t *expert, *order, *offsets;
  block* blocks;
  scratch* workers;
};

struct job {
  const moe_target& target;
  const cqsa_moe_leaf& leaf;
  memory mem;
  layer routed, shared;
  int64_t first = 0, tokens = 0;  // of the piece
  const layer* now = nullptr;     // whose blocks are computed
  int64_t num_blocks = 0, units = 0;
  std::atomic<int64_t> next{0};

  int64_t slots() const { return tokens * leaf.topk; }
};

bool wants_codes(const cqsa_moe_leaf& leaf, cqsa_quant_format format) { return leaf.precision == CQSA_MOE_PRECISION_Q8 && !moe::is_plain(format); }

// Which kinds of activations the experts of a projection take.
void look_at(const cqsa_moe_leaf& leaf, const cqsa_moe_set& set, bool& codes, bool& plain) {
  const int64_t count = set.format != CQSA_QUANT_NONE || set.num_experts == 0 ? 0 : set.num_experts;
  for (int64_t e = 0; e < count; ++e)
    if (set.experts[e].format != CQSA_QUANT_NONE) (wants_codes(leaf, set.experts[e].format) ? codes : plain) = true;
  if (set.num_experts > 0 && count == 0) (wants_codes(leaf, set.format) ? codes : plain) = true;
}

layer make_layer(const cqsa_moe_leaf& leaf, const cqsa_moe_set& gate, const cqsa_moe_set& up, const cqsa_moe_set& down) {
  layer l{&gate, &up, &down, down.row_elements, down.num_experts, false, false, false, false};
  look_at(leaf, gate, l.wants_codes, l.wants_plain);
  look_at(leaf, up, l.wants_codes, l.wants_plain);
  look_at(leaf, down, l.h_codes, l.h_plain);
  return l;
}

// ---- memory -----------------------------------------------------------------------------------------------------------------

void carve_activations(arena& a, int64_t rows, int64_t n, bool codes, bool plain, moe_activations& out) {
  const int64_t padded = moe_padded(n), all = rows * padded;
  out = {nullptr, nullptr, nullptr, nullptr, padded};
  if (codes) out.code = a.take<int8_t>(all), out.scale = a.take<float>(all / 32), out.sum = a.take<float>(all / 16);
  if (plain) out.plain = a.take<float>(all);
}

void carve_scratch(arena& a, int64_t longest, scratch& out) {
  const int64_t padded = moe_padded(longest);
  out.codes = {a.take<int8_t>(rows_at_once * padded), a.take<float>(rows_at_once * padded / 16), a.take<float>(rows_at_once * padded / 16), padded, 0};
  out.plain = a.take<float>(rows_at_once * padded);
  out.g = a.take<float>(block_tokens * tile_rows), out.u = a.take<float>(block_tokens * tile_rows);
  out.index = a.take<int32_t>(block_tokens);
  out.row = a.take<float>(padded), out.raw = a.take<char>(4 * padded);
}

// h of the shared expert takes the place of the others'. Counts too: one function for the size and the addresses. Slots of a piece are counted by 32 bits.
uint64_t carve(void* base, const cqsa_moe_leaf& leaf, const layer& routed, const layer& shared, int64_t workers, memory& out) {
  arena a = base ? arena(base) : arena();
  const bool with_shared = shared.num_experts != 0;
  const int64_t tokens = leaf.chunk;
  if (tokens > INT32_MAX / leaf.topk) return arena::limit;
  const int64_t slots = tokens * leaf.topk;
  carve_activations(a, tokens, leaf.hidden, routed.wants_codes || shared.wants_codes, routed.wants_plain || shared.wants_plain, out.x);
  carve_activations(a, slots, std::max(leaf.inter, leaf.shared_inter), routed.h_codes || shared.h_codes, routed.h_plain || shared.h_plain, out.h);
  out.y = leaf.output == CQSA_MOE_COMBINED ? static_cast<float*>(a.take_bytes(arena::times(uint64_t(slots), 4 * uint64_t(leaf.hidden)))) : nullptr;
  out.shared_y = with_shared ? static_cast<float*>(a.take_bytes(arena::times(uint64_t(tokens), 4 * uint64_t(leaf.hidden)))) : nullptr;
  out.factor = with_shared ? a.take<float>(tokens) : nullptr;
  out.expert = a.take<int32_t>(slots), out.order = a.take<int32_t>(std::max(slots, tokens));
  out.offsets = a.take<int32_t>(leaf.num_experts + 1);
  out.blocks = a.take<block>(leaf.num_experts + slots / block_tokens + tokens / block_tokens + 2);
  out.workers = a.take<scratch>(workers);
  for (int64_t i = 0; i < workers; ++i) {
    scratch unused;
    carve_scratch(a, std::max({leaf.hidden, leaf.inter, leaf.shared_inter}), base ? out.workers[i] : unused);
  }
  return a.used();
}

// ---- units ------------------------------------------------------------------------------------------------------------------

const uint8_t* row_at(const cqsa_moe_matrix& m, const cqsa_moe_set& set, int64_t r) {
  const quant_format& format = quant_formats[m.format];
  return static_cast<const uint8_t*>(m.data) + r * int64_t(moe::row_bytes_of(m, set.row_elements, format.block_elements, format.block_bytes));
}

// What a projection is multiplied by: rows of x or of h. Both have the same padding inside, whatever the scratch has room for.
struct operand {
  const cqsa_moe_set& set;
  const moe_activations& x;
  int64_t expert, step;  // step: between the rows of the weights that belong together
};

// sums[i][r] = rows first + step * r of the weights times token index[i], and their bias.
void multiply(const job& j, const operand& o, int64_t first, int64_t rows, int64_t count, scratch& mem, float* sums) {
  const cqsa_moe_matrix m = moe::matrix_at(o.set.experts, o.set.all, o.set.expert_bytes, o.expert);
  const bool codes = wants_codes(j.leaf, m.format);
  moe_codes w = mem.codes;
  w.padded = o.x.padded, w.has_least = quant_has_minimum(m.format);
  for (int64_t r = 0; r < rows; r += rows_at_once) {
    const int64_t n = std::min(rows_at_once, rows - r), k = o.set.row_elements;
    for (int64_t i = 0; i < n; ++i) {
      const uint8_t* const from = row_at(m, o.set, first + (r + i) * o.step);
      float* const plain = mem.plain + i * o.x.padded;
      if (codes) j.target.unpack(m.format, from, k, &w, i);
      else j.target.decode(m.format, from, k, plain), std::fill(plain + k, plain + o.x.padded, 0.0f);
    }
    if (codes) j.target.dot_codes(&w, n, &o.x, mem.index, count, sums + r, tile_rows);
    else j.target.dot_plain(mem.plain, n, &o.x, mem.index, count, sums + r, tile_rows);
  }
  const char* const bias = reinterpret_cast<const char*>(o.set.bias);
  for (int64_t r = 0; bias && r < rows; ++r) {
    const float b = load_as<float>(bias + 4 * (o.expert * o.set.bias_stride[0] + (first + r * o.step) * o.set.bias_stride[1]));
    for (int64_t i = 0; i < count; ++i) sums[i * tile_rows + r] += b;
  }
}

// Elements n .. n + rows - 1 of h, of entry `place` of the order, from the sums of gate and up.
void store_h(const job& j, const block& b, int64_t place, const float* g, const float* u, int64_t n, int64_t rows) {
  const cqsa_moe_leaf& leaf = j.leaf;
  const moe_activation how{leaf.activation, leaf.alpha, leaf.beta, leaf.limit};
  const moe_activations& to = j.mem.h;
  const int64_t padded = moe_padded(j.now->inter);
  alignas(64) float h[tile_rows];
  j.target.activate(&how, g, u, rows, h);
  const cqsa_moe_set& down = *j.now->down;
  const cqsa_quant_format format = down.experts ? down.experts[b.expert].format : down.all.format;
  if (!wants_codes(leaf, format)) {
    std::copy_n(h, rows, to.plain + place * padded + n);
    if (n + rows == j.now->inter) std::fill(to.plain + place * padded + n + rows, to.plain + (place + 1) * padded, 0.0f);
    return;
  }
  j.target.quantize(h, rows, to.code + place * padded + n, to.scale + (place * padded + n) / 32, to.sum + (place * padded + n) / 16);
  if (n + rows < j.now->inter || n + rows == padded) return;
  const int64_t end = place * padded + n + rows, rest = padded - n - rows;
  std::memset(to.code + end, 0, size_t(rest));
  std::fill_n(to.scale + end / 32, rest / 32, 0.0f), std::fill_n(to.sum + end / 16, rest / 16, 0.0f);
}

void gate_up_unit(const job& j, const block& b, int64_t tile, scratch& mem) {
  const layer& l = *j.now;
  const int64_t n = tile * tile_rows, rows = std::min(tile_rows, l.inter - n), count = b.end - b.begin, layout = j.leaf.layout;
  const bool gated = l.gate->num_experts != 0;
  const int64_t step = layout == CQSA_MOE_INTERLEAVED ? 2 : 1;
  for (int64_t i = 0; i < count; ++i) mem.index[i] = l.num_experts == 1 && &l == &j.shared ? int32_t(b.begin + i) : int32_t(j.mem.order[b.begin + i] / j.leaf.topk);
  if (gated) multiply(j, {*l.gate, j.mem.x, b.expert, step}, moe::gate_row(j.leaf.layout, n), rows, count, mem, mem.g);
  multiply(j, {l.up->num_experts ? *l.up : *l.gate, j.mem.x, b.expert, step}, moe::up_row(j.leaf.layout, n, l.inter), rows, count, mem, mem.u);
  for (int64_t i = 0; i < count; ++i) store_h(j, b, b.begin + i, gated ? mem.g + i * tile_rows : nullptr, mem.u + i * tile_rows, n, rows);
}

void store_y(const job& j, int64_t place, const float* y, int64_t n, int64_t rows, scratch& mem) {
  const cqsa_moe_leaf& leaf = j.leaf;
  if (j.now == &j.shared) return void(std::copy_n(y, rows, j.mem.shared_y + place * leaf.hidden + n));
  const int64_t slot = j.mem.order[place];
  if (j.mem.y) return void(std::copy_n(y, rows, j.mem.y + slot * leaf.hidden + n));
  char* const to = static_cast<char*>(leaf.out.data) + 4 * ((j.first * leaf.topk + slot) * leaf.out.stride[0] + n * leaf.out.stride[1]);
  j.target.store(y, CQSA_DTYPE_F32, leaf.out.stride[1], rows, &conversions, mem.raw, to);
}

void down_unit(const job& j, const block& b, int64_t tile, scratch& mem) {
  const int64_t n = tile * tile_rows, rows = std::min(tile_rows, j.leaf.hidden - n), count = b.end - b.begin;
  moe_activations h = j.mem.h;
  h.padded = moe_padded(j.now->inter);
  for (int64_t i = 0; i < count; ++i) mem.index[i] = int32_t(b.begin + i);
  multiply(j, {*j.now->down, h, b.expert, 1}, n, rows, count, mem, mem.u);
  for (int64_t i = 0; i < count; ++i) store_y(j, b.begin + i, mem.u + i * tile_rows, n, rows, mem);
}

// ---- tokens -----------------------------------------------------------------------------------------------------------------

float sigmoid(double z) { return float(1 / (1 + std::exp(-z))); }

float factor_of(const cqsa_moe_leaf& leaf, int64_t t, const float* x) {
  const char* const gate = reinterpret_cast<const char*>(leaf.shared_factor);
  double z = 0;
  if (!gate) return 1;
  if (leaf.shared_factor_is_logit) return sigmoid(double(load_as<float>(gate + 4 * t * leaf.shared_factor_stride)));
  for (int64_t i = 0; i < leaf.hidden; ++i) z += double(x[i]) * double(load_as<float>(gate + 4 * i * leaf.shared_factor_stride));
  return sigmoid(z);
}

// Row t of the piece: x as numbers, as codes, or both.
void take_token(const job& j, int64_t t, scratch& mem) {
  const cqsa_moe_leaf& leaf = j.leaf;
  const moe_activations& to = j.mem.x;
  const int64_t padded = to.padded, n = leaf.hidden;
  float* const x = to.plain ? to.plain + t * padded : mem.row;
  const char* const from = static_cast<const char*>(leaf.x.data) + bytes_of(leaf.x.dtype) * (j.first + t) * leaf.x.stride[0];
  j.target.load(from, leaf.x.dtype, leaf.x.stride[1], n, mem.raw, x);
  std::fill(x + n, x + padded, 0.0f);
  if (to.code) j.target.quantize(x, padded, to.code + t * padded, to.scale + t * (padded / 32), to.sum + t * (padded / 16));
  if (j.mem.factor) j.mem.factor[t] = factor_of(leaf, j.first + t, x);
}

void combine_token(const job& j, int64_t t, scratch& mem) {
  const cqsa_moe_leaf& leaf = j.leaf;
  std::fill_n(mem.row, leaf.hidden, 0.0f);
  for (int64_t s = 0; s < leaf.topk; ++s) {
    const char* const at = static_cast<const char*>(leaf.weights.data) + 4 * ((j.first + t) * leaf.weights.stride[0] + s * leaf.weights.stride[1]);
    const float weight = load_as<float>(at);
    const int64_t slot = t * leaf.topk + s;
    if (weight != 0 && j.mem.expert[slot] >= 0) j.target.add(j.mem.y + slot * leaf.hidden, weight, leaf.hidden, mem.row);
  }
  if (j.mem.factor) j.target.add(j.mem.shared_y + t * leaf.hidden, j.mem.factor[t], leaf.hidden, mem.row);
  char* const to = static_cast<char*>(leaf.out.data) + bytes_of(leaf.out.dtype) * (j.first + t) * leaf.out.stride[0];
  j.target.store(mem.row, leaf.out.dtype, leaf.out.stride[1], leaf.hidden, &conversions, mem.raw, to);
}

// Rows of slots that contribute nothing.
void clear_slots(const job& j, int64_t t, scratch& mem) {
  const cqsa_moe_leaf& leaf = j.leaf;
  std::fill_n(mem.row, leaf.hidden, 0.0f);
  for (int64_t slot = t * leaf.topk; slot < (t + 1) * leaf.topk; ++slot) {
    char* const to = static_cast<char*>(leaf.out.data) + 4 * (j.first * leaf.topk + slot) * leaf.out.stride[0];
    if (j.mem.expert[slot] < 0) j.target.store(mem.row, CQSA_DTYPE_F32, leaf.out.stride[1], leaf.hidden, &conversions, mem.raw, to);
  }
}

// ---- order ------------------------------------------------------------------------------------------------------------------

// Stable: by expert, then by slot.
void group_slots(job& j) {
  const cqsa_moe_leaf& a = j.leaf;
  int32_t* const start = j.mem.offsets;
  std::fill_n(start, a.num_experts + 1, 0);
  for (int64_t i = 0; i < j.slots(); ++i) {
    const int64_t id = index_of(a.ids.data, a.ids.dtype, (j.first + i / a.topk) * a.ids.stride[0] + i % a.topk * a.ids.stride[1]);
    const int32_t e = moe::expert_of(id, a.num_ids, a.expert_map, a.expert_map_stride, a.num_experts);
    j.mem.expert[i] = e;
    if (e >= 0) ++start[e + 1];
  }
  for (int64_t e = 0; e < a.num_experts; ++e) start[e + 1] += start[e];
  for (int64_t i = 0; i < j.slots(); ++i)
    if (j.mem.expert[i] >= 0) j.mem.order[start[j.mem.expert[i]]++] = int32_t(i);
  for (int64_t e = a.num_experts; e > 0; --e) start[e] = start[e - 1];
  start[0] = 0;
}

void add_blocks(job& j, int32_t expert, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += block_tokens) j.mem.blocks[j.num_blocks++] = {expert, int32_t(i), int32_t(std::min(i + block_tokens, end))};
}

// ---- stages -----------------------------------------------------------------------------------------------------------------

struct stage {
  job& j;
  void (*unit)(const job& j, int64_t n, scratch& mem);
};

void work(void* data, int64_t index) {
  const plain_floats mode;
  const stage& s = *static_cast<stage*>(data);
  for (int64_t n; (n = s.j.next.fetch_add(1, std::memory_order_relaxed)) < s.j.units;) s.unit(s.j, n, s.j.mem.workers[index]);
}

cqsa_status run(job& j, void (*unit)(const job&, int64_t, scratch&), int64_t units, int64_t workers, const cqsa_exec* exec) {
  stage s{j, unit};
  j.next = 0, j.units = units;
  workers = std::min(workers, units);
  return workers > 1 ? exec->run(exec->user, workers, work, &s) : (work(&s, 0), CQSA_OK);
}

int64_t tiles(int64_t n) { return (n + tile_rows - 1) / tile_rows; }

cqsa_status run_layer(job& j, const layer& l, int64_t workers, const cqsa_exec* exec) {
  j.now = &l;
  const auto gate_up = [](const job& a, int64_t n, scratch& mem) { const int64_t t = tiles(a.now->inter); gate_up_unit(a, a.mem.blocks[n / t], n % t, mem); };
  const auto down = [](const job& a, int64_t n, scratch& mem) { const int64_t t = tiles(a.leaf.hidden); down_unit(a, a.mem.blocks[n / t], n % t, mem); };
  const cqsa_status status = run(j, gate_up, j.num_blocks * tiles(l.inter), workers, exec);
  return status != CQSA_OK ? status : run(j, down, j.num_blocks * tiles(j.leaf.hidden), workers, exec);
}

cqsa_status run_piece(job& j, int64_t workers, const cqsa_exec* exec) {
  const int64_t fewer = j.tokens * j.leaf.hidden < 32768 ? 1 : workers;
  cqsa_status status = run(j, take_token, j.tokens, fewer, exec);
  group_slots(j);
  j.num_blocks = 0;
  for (int64_t e = 0; e < j.leaf.num_experts; ++e) add_blocks(j, int32_t(e), j.mem.offsets[e], j.mem.offsets[e + 1]);
  if (status == CQSA_OK) status = run_layer(j, j.routed, workers, exec);
  j.num_blocks = 0;
  if (j.shared.num_experts) add_blocks(j, 0, 0, j.tokens);
  if (status == CQSA_OK && j.shared.num_experts) status = run_layer(j, j.shared, workers, exec);
  if (status != CQSA_OK) return status;
  return run(j, j.mem.y ? combine_token : clear_slots, j.tokens, fewer, exec);
}

uint64_t workspace_for(const cqsa_moe_leaf* leaf, int64_t workers) {
  memory unused{};
  return carve(nullptr, *leaf, make_layer(*leaf, leaf->gate, leaf->up, leaf->down), make_layer(*leaf, leaf->shared_gate, leaf->shared_up, leaf->shared_down),
               std::max<int64_t>(workers, 1), unused);
}

cqsa_status launch_on(const moe_target& target, const cqsa_moe_leaf* leaf, void* workspace, uint64_t bytes, const cqsa_exec* exec) {
  int64_t workers = exec && exec->run ? std::max<int64_t>(exec->num_workers, 1) : 1;
  if (bytes < workspace_for(leaf, workers)) return fail(CQSA_ERROR_WORKSPACE, "the workspace of the experts is too small");
  job j{target, *leaf, {}, make_layer(*leaf, leaf->gate, leaf->up, leaf->down), make_layer(*leaf, leaf->shared_gate, leaf->shared_up, leaf->shared_down)};
  carve(workspace, *leaf, j.routed, j.shared, workers, j.mem);
  for (; j.first < leaf->tokens; j.first += leaf->chunk) {
    j.tokens = std::min(leaf->chunk, leaf->tokens - j.first);
    const cqsa_status status = run_piece(j, workers, exec);
    if (status != CQSA_OK) return status;
  }
  return CQSA_OK;
}

// ---- dispatch list ----------------------------------------------------------------------------------------------------------

cqsa_status decline(char* reason, uint64_t size, const char* text) {
  if (reason && size) std::snprintf(reason, size, "%s", text);
  return CQSA_ERROR_UNSUPPORTED;
}
cqsa_status probe_any(void*, const cqsa_moe_leaf* leaf, char* reason, uint64_t size) {
  return leaf->hidden < INT32_MAX && leaf->inter < INT32_MAX && leaf->shared_inter < INT32_MAX ? CQSA_OK : decline(reason, size, "rows of 2^31 elements or more");
}
#if defined(CQSA_CPU_X86)
cqsa_status probe_vnni(void* d, const cqsa_moe_leaf* leaf, char* reason, uint64_t size) {
  return this_cpu().avx512_vnni ? probe_any(d, leaf, reason, size) : decline(reason, size, "this CPU lacks AVX-512 F/BW/DQ/VL/VNNI");
}
cqsa_status probe_avx2(void* d, const cqsa_moe_leaf* leaf, char* reason, uint64_t size) {
  return this_cpu().avx2 ? probe_any(d, leaf, reason, size) : decline(reason, size, "this CPU lacks AVX2, FMA, F16C or BMI2");
}
#endif

template <const moe_target& target>
cqsa_status launch(void*, const cqsa_moe_leaf* leaf, void* workspace, uint64_t bytes, const cqsa_exec* exec, void*) {
  return launch_on(target, leaf, workspace, bytes, exec);
}

}  // namespace

const moe_target& moe_best() {
#if defined(CQSA_CPU_X86)
  if (this_cpu().avx512_vnni) return moe_vnni;
  if (this_cpu().avx2) return moe_avx2;
#endif
  return moe_baseline;
}

const cqsa_moe_impl* moe_impls(int32_t* count) {
  static const cqsa_moe_impl list[] = {
#if defined(CQSA_CPU_X86)
      {"cpu_avx512_vnni", "x86 with AVX-512 F, BW, DQ, VL, VNNI", probe_vnni, workspace_for, launch<moe_vnni>},
      {"cpu_avx2", "x86 with AVX2, FMA, F16C, BMI2", probe_avx2, workspace_for, launch<moe_avx2>},
#endif
      {"cpu_baseline", "any CPU", probe_any, workspace_for, launch<moe_baseline>},
      moe_reference_impl,
  };
  *count = int32_t(sizeof list / sizeof *list);
  return list;
}

}  // namespace cqsa::cpu
