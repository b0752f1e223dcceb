// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/device_layout.h"

#include <initializer_list>

#include "ops/attention/mapped_piece.h"
#include "tensor.h"

namespace cqsa {
namespace {

uint64_t product(std::initializer_list<int64_t> factors) {
  uint64_t bytes = 1;
  for (const int64_t factor : factors) bytes = arena::times(bytes, static_cast<uint64_t>(factor));
  return bytes;
}

int64_t lse_bytes(const attention_problem& problem) { return problem.p.dtype_q == CQSA_DTYPE_F64 ? 8 : 4; }

// Bytes of a scale tensor that is moved once as a whole; 0 when it has a row per key or is not there.
int64_t small_scale_bytes(int32_t kind, int64_t num_kv_heads) {
  return kind == CQSA_SCALE_TENSOR ? 4 : kind == CQSA_SCALE_HEAD ? 4 * num_kv_heads : 0;
}

int64_t limited(int64_t wanted, int64_t all) { return std::max<int64_t>(1, std::min(wanted, all)); }

// Small enough that the output of a CQS run costs little beside its tasks.
int64_t finish_rows_of(const attention_problem& problem, const device_geometry& g) {
  constexpr int64_t tile_bytes = 1 << 20;
  const int64_t row = problem.out_row_bytes() + lse_bytes(problem) + (problem.p.head_dim_v + 2) * 4;
  if (!g.out_back && !g.acc_on_host) return problem.p.seqlen_q;
  return std::clamp<int64_t>(tile_bytes / (g.items * g.q_heads * row), 1, g.rows);
}

}  // namespace

device_geometry geometry_of(const attention_problem& problem, const schedule_choice& choice) {
  const auto& p = problem.p;
  device_geometry g{};
  const bool direct = choice.schedule == CQSA_SCHEDULE_DIRECT;
  g.q_in = p.memory_q != CQSA_MEMORY_DEVICE;
  g.kv_in = p.memory_kv != CQSA_MEMORY_DEVICE;
  g.out_back = p.memory_out != CQSA_MEMORY_DEVICE;
  g.cqs = choice.schedule == CQSA_SCHEDULE_CQS;
  g.by_item = problem.varlen() || problem.paged() || problem.has(CQSA_ATTENTION_SEQUSED_K);
  g.items = g.by_item ? 1 : direct ? p.batch : limited(choice.group_batch, p.batch);
  g.heads = direct ? p.num_kv_heads : limited(choice.group_heads, p.num_kv_heads);
  g.q_heads = g.heads * problem.ratio();
  g.rows = limited(direct ? p.seqlen_q : choice.tile_q, p.seqlen_q);
  g.keys = limited(direct ? p.seqlen_k : choice.tile_k, p.seqlen_k);
  g.buffers = std::clamp(choice.buffers, 1, 3);
  g.q_slots = g.out_slots = std::min<int64_t>(g.buffers, 2);
  g.rects = problem.paged() ? g.keys / p.page_size + 2 : 1;
  g.carries = p.seqlen_k > g.keys || (problem.paged() && !g.kv_in && g.keys > 1);
  if (!g.cqs) return g;
  g.shape = {p.seqlen_q, choice.c, choice.itr, choice.chunk_alignment};
  g.resident = choice.operands_resident;
  g.acc_on_host = choice.accumulator_on_host;
  g.rows = g.keys = std::max<int64_t>(1, cqs_max_rows(g.shape));
  g.rects = std::max<int64_t>(1, cqs_max_blocks(g.shape));
  g.finish_rows = finish_rows_of(problem, g);
  g.carries = false;
  return g;
}

bool calls_per_block(const attention_problem& problem, const device_geometry& g) {
  // In a list of a task: false, by position: true.
  const bool q = !g.gathers_q(), k = !g.gathers_kv(), planes = !g.q_in;
  if (problem.has(CQSA_ATTENTION_MASK) || problem.has(CQSA_ATTENTION_BIAS)) return q != k || q != planes;
  return false;  // a rectangle has a row of its own for queries and for keys
}

int64_t visible_blocks(const cqs_shape& shape, const key_band& band, int64_t task, cqs_block* blocks_out) {
  const int64_t all = cqs_task_blocks(shape, task, blocks_out);
  const auto hidden = [&](const cqs_block& b) {
    const key_range seen = band.of_rows(b.q_pos, b.q_len, shape.seqlen);
    return seen.length() == 0 || seen.end <= b.k_pos || seen.begin >= b.k_pos + b.k_len;
  };
  return std::remove_if(blocks_out, blocks_out + all, hidden) - blocks_out;
}

int64_t task_rows(const cqs_segment* segments, int64_t num_segments) {
  return num_segments ? segments[num_segments - 1].row + segments[num_segments - 1].length : 0;
}

// ---- the device's memory ----------------------------------------------------------------------------------------------------

struct device_layout::carver {
  device_layout& to;
  const attention_problem& problem;
  const device_geometry& g;
  arena& memory;

  static void widen(transfer_bound& bound, uint64_t bytes, uint64_t line) {
    bound.largest = std::max(bound.largest, bytes);
    bound.line = std::max(bound.line, line);
  }
  // `lines` = groups * rows lines that come from the host; nothing when a line has no bytes.
  void* inward(int64_t groups, int64_t rows, int64_t line) {
    const uint64_t bytes = product({groups, rows, line});
    if (bytes == 0) return nullptr;
    widen(to.in, bytes, static_cast<uint64_t>(line));
    return memory.take_bytes(bytes);
  }
  void* outward(int64_t groups, int64_t rows, int64_t line) {
    const uint64_t bytes = product({groups, rows, line});
    widen(to.back, bytes, static_cast<uint64_t>(line));
    return memory.take_bytes(bytes);
  }

  void* q(int64_t rows) { return inward(g.items * g.q_heads, rows, problem.q_row_bytes()); }

  void keys(device_window& w, int64_t rows) {
    const int64_t heads = g.items * g.heads;
    w.k = inward(heads, rows, problem.k_row_bytes());
    w.v = inward(heads, rows, problem.v_row_bytes());
    w.k_scale = inward(heads, rows, problem.k_scale_row_bytes());
    w.v_scale = inward(heads, rows, problem.v_scale_row_bytes());
  }

  void* plane(uint32_t bits, int64_t element) {
    const int64_t planes = broadcast_extent(bits, CQSA_BROADCAST_BATCH, g.items) * broadcast_extent(bits, CQSA_BROADCAST_HEAD, g.q_heads);
    return inward(planes, broadcast_extent(bits, CQSA_BROADCAST_QUERY, g.rows),
                  broadcast_extent(bits, CQSA_BROADCAST_KEY, g.keys) * element);
  }

  void planes(device_window& w) {
    if (!g.q_in) return;
    if (problem.has(CQSA_ATTENTION_MASK)) w.mask = plane(problem.p.mask_broadcast, 1);
    if (problem.has(CQSA_ATTENTION_BIAS)) w.bias = plane(problem.p.bias_broadcast, dtype_bytes(problem.p.dtype_bias));
  }

  void small() {
    const auto& p = problem.p;
    if (g.q_in && problem.has(CQSA_ATTENTION_ALIBI)) to.slopes = inward(p.batch, 1, p.num_heads * 4);
    if (g.q_in && problem.has(CQSA_ATTENTION_SINKS)) to.sinks = inward(1, 1, p.num_heads * 4);
    if (!g.kv_in) return;
    to.k_scale = inward(1, 1, small_scale_bytes(p.scale_k, p.num_kv_heads));
    to.v_scale = inward(1, 1, small_scale_bytes(p.scale_v, p.num_kv_heads));
  }

  void state(float*& acc, float*& m, float*& l, int64_t rows) {
    const int64_t lines = g.items * g.q_heads;
    acc = static_cast<float*>(memory.take_bytes(product({lines, rows, problem.p.head_dim_v, 4})));
    m = static_cast<float*>(memory.take_bytes(product({lines, rows, 4})));
    l = static_cast<float*>(memory.take_bytes(product({lines, rows, 4})));
  }

  void outputs(int64_t rows) {
    if (!g.out_back) return;
    for (int64_t slot = 0; slot < g.out_slots; ++slot) {
      to.out[slot] = outward(g.items * g.q_heads, rows, problem.out_row_bytes());
      if (problem.has(CQSA_ATTENTION_LSE)) to.lse[slot] = outward(g.items * g.q_heads, rows, lse_bytes(problem));
    }
  }

  void stream() {
    if (g.q_in)
      for (int64_t slot = 0; slot < g.q_slots; ++slot) to.q[slot] = q(g.rows);
    for (int64_t i = 0; i < g.buffers; ++i) {
      if (g.kv_in) keys(to.windows[i], g.keys);
      planes(to.windows[i]);
    }
    if (g.carries) state(to.acc, to.m, to.l, g.rows);
    outputs(g.rows);
  }

  void cqs() {
    device_window shared{};
    if (g.q_in && g.resident) shared.q = q(problem.p.seqlen_q);
    if (g.kv_in && g.resident) keys(shared, problem.p.seqlen_k);
    for (int64_t i = 0; i < g.buffers; ++i) {
      device_window& w = to.windows[i];
      w = shared;
      if (g.gathers_q()) w.q = q(g.rows);
      if (g.gathers_kv()) keys(w, g.keys);
      planes(w);
      if (g.acc_on_host) partial_state(w);
    }
    if (!g.acc_on_host) state(to.acc, to.m, to.l, problem.p.seqlen_q);
    outputs(g.finish_rows);
  }

  // Goes back to be merged, and comes again, a few rows at a time, to be finished.
  void partial_state(device_window& w) {
    state(w.acc, w.m, w.l, g.rows);
    const int64_t lines = g.items * g.q_heads;
    const uint64_t row = static_cast<uint64_t>(problem.p.head_dim_v) * 4;
    widen(to.back, product({lines, g.rows, problem.p.head_dim_v, 4}), row);
    widen(to.in, product({lines, g.finish_rows, problem.p.head_dim_v, 4}), row);
  }
};

namespace {

// The leaf calls of a run differ in their flags only: the largest workspace serves them all.
uint64_t leaf_workspace(const attention_problem& problem, const cqsa_attention_impl* impl, const schedule_choice& choice,
                        const device_geometry& g) {
  if (impl == nullptr) return 0;
  cqsa_attention_leaf leaf = shape_of_leaf(problem);
  leaf.tile_q = choice.leaf_tile_q;
  leaf.tile_k = choice.leaf_tile_k;
  leaf.batch_invariant = problem.batch_invariant();
  uint64_t most = 0;
  leaf.cu_seqlens_q = leaf.cu_seqlens_k = leaf.seqused_k = nullptr;
  leaf.page_table = nullptr;
  leaf.batch = g.items;
  leaf.num_heads = g.q_heads;
  leaf.num_kv_heads = g.heads;
  leaf.num_rects = g.rects;
  const uint32_t in = CQSA_LEAF_STATE_IN, out = CQSA_LEAF_STATE_OUT;
  const bool states = g.carries || g.cqs;
  for (const uint32_t flags : {uint32_t{0}, in, out, in | out}) {
    if (flags && !states) continue;
    leaf.flags = flags;
    most = std::max(most, impl->workspace(&leaf, choice.workers));
  }
  return most;
}

}  // namespace

void device_layout::carve(const attention_problem& problem, const cqsa_attention_impl* impl, const schedule_choice& choice,
                          const device_geometry& g, arena& memory) {
  *this = {};
  header = memory.take_bytes(workspace_header_bytes);
  carver c{*this, problem, g, memory};
  c.small();
  g.cqs ? c.cqs() : c.stream();
  leaf_bytes = leaf_workspace(problem, impl, choice, g);
  leaf = memory.take_bytes(leaf_bytes);
}

// ---- the host's memory ------------------------------------------------------------------------------------------------------

void staging_layout::carve(const staging_choice& staging, arena& memory) {
  const auto slots = [&memory](int32_t count, uint64_t bytes, uint64_t& stride) {
    const uint64_t before = memory.used();
    char* const first = count ? static_cast<char*>(memory.take_bytes(bytes)) : nullptr;
    stride = memory.used() - before;
    for (int32_t i = 1; i < count; ++i) memory.take_bytes(bytes);
    return first;
  };
  in = slots(staging.in_slots, staging.in_bytes, in_stride);
  back = slots(staging.back_slots, staging.back_bytes, back_stride);
}

uint64_t resident_bytes_of_staging(const attention_problem& problem, const staging_choice& staging) {
  const bool in = problem.p.memory_q == CQSA_MEMORY_MAPPED || problem.p.memory_kv == CQSA_MEMORY_MAPPED;
  const bool back = problem.p.memory_out == CQSA_MEMORY_MAPPED;
  const uint64_t pieces = (in ? resident_of_piece(staging.in_bytes) : 0) + (back ? resident_of_piece(staging.back_bytes) : 0);
  return static_cast<uint64_t>(staging.threads) * pieces;
}

void device_host_layout::carve(const attention_problem& problem, const device_geometry& g, arena& memory) {
  const auto& p = problem.p;
  rects = memory.take<cqsa_rect>(g.rects);
  if (!g.q_in) {
    // The widest index type: whether they are i32 or i64 is known at run time only.
    if (problem.varlen()) cu_seqlens_q = memory.take<int64_t>(p.batch + 1);
    if (problem.varlen() && !problem.paged()) cu_seqlens_k = memory.take<int64_t>(p.batch + 1);
    if (problem.has(CQSA_ATTENTION_SEQUSED_K)) seqused_k = memory.take<int64_t>(p.batch);
    if (problem.paged()) pages = memory.take<int32_t>(p.seqlen_k / p.page_size + 1);
  }
  if (!g.cqs) return;
  for (int i = 0; i < 2; ++i) {
    segments[i] = memory.take<cqs_segment>(cqs_max_segments(g.shape));
    blocks[i] = memory.take<cqs_block>(g.rects);
  }
  if (!g.acc_on_host) return;
  const int64_t lines = g.items * g.q_heads;
  acc = static_cast<float*>(memory.take_bytes(product({lines, p.seqlen_q, p.head_dim_v, 4})));
  m = static_cast<float*>(memory.take_bytes(product({lines, p.seqlen_q, 4})));
  l = static_cast<float*>(memory.take_bytes(product({lines, p.seqlen_q, 4})));
  old_factor = static_cast<float*>(memory.take_bytes(product({lines, g.rows, 4})));
  new_factor = static_cast<float*>(memory.take_bytes(product({lines, g.rows, 4})));
}

}  // namespace cqsa
