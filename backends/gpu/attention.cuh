// SPDX-License-Identifier: Apache-2.0
// The portable attention kernel: exact attention of one tile of query rows over all its keys, in f32 FMA, on any GPU.
//
// A block of 256 threads stands as 16 x 16. Thread (ty, tx) has query rows ty * rows_each + {0 ..}, of the logits keys
// tx * 4 + {0 .. 3}, and of the output channels 64 j + tx * 4 + {0 .. 3}. The sixteen threads of a row are in one group of lanes.
// For each tile of 64 keys: logits from 32-channel chunks of q and k in shared memory, masks where a tile needs any,
// softmax with a running maximum, probabilities to shared memory, then chunks of v. docs/kernels/NOTES-attention-portable.md
// has the reasons and the figures.
//
// A row's sums run over channels and keys in order, in tiles that begin at multiples of 64 keys of a range, and over the sixteen
// threads in a fixed tree: its bits depend neither on its place in the tile nor on its neighbours.
#pragma once

#include "attention_panel.cuh"
#include "row_end.cuh"

namespace cqsa::gpu {

// Index of a thread's first row in line `line`, a multiple of four, of a transposed panel.
template <int N> CQSA_DEVICE int rows_index(int width, int line, int ty) { return panel_index(width, line, ty * N); }

// Reads N rows from there.
template <int N> CQSA_DEVICE void read_rows(const float* panel, int at, float* out) {
  if constexpr (N == 8) {
    const float4x a = *reinterpret_cast<const float4x*>(panel + at);
    const float4x b = *reinterpret_cast<const float4x*>(panel + (at ^ 4));
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = a.x[i], out[i + 4] = b.x[i];
  } else if constexpr (N == 4) {
    const float4x a = *reinterpret_cast<const float4x*>(panel + at);
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = a.x[i];
  } else {
    const float2x a = *reinterpret_cast<const float2x*>(panel + at);
    out[0] = a.x[0], out[1] = a.x[1];
  }
}

// s += q k^T over `quads` times four channels of the panels.
template <int Dv> CQSA_DEVICE void multiply_qk(const block_memory<Dv>& mem, int quads, int ty, int tx, float (&s)[attention_shape<Dv>::rows_each][4]) {
  using shape = attention_shape<Dv>;
  const float *q = mem.panel(), *k = mem.panel_k();
#pragma unroll 1
  for (int g = 0; g < quads; ++g) {
    const int at_q = rows_index<shape::rows_each>(shape::rows, g * 4, ty), at_k = panel_index(shape::keys, g * 4, tx * 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float a[shape::rows_each];
      read_rows<shape::rows_each>(q + i * shape::rows, at_q, a);
      const float4x b = *reinterpret_cast<const float4x*>(k + at_k + i * shape::keys);
#pragma unroll
      for (int r = 0; r < shape::rows_each; ++r)
#pragma unroll
        for (int j = 0; j < 4; ++j) s[r][j] = fma_f32(a[r], b.x[j], s[r][j]);
    }
  }
}

template <int N> struct pick_part;
template <> struct pick_part<4> {
  using type = float4x;
};
template <> struct pick_part<2> {
  using type = float2x;
};

// A thread's places in the p panel: of each of its keys a run of rows, `step` of which are read and written at once.
template <int Dv> struct logit_part {
  using shape = attention_shape<Dv>;
  static constexpr int step = shape::rows_each < 4 ? shape::rows_each : 4;
  using type = typename pick_part<step>::type;
  CQSA_DEVICE static type& at(const block_memory<Dv>& mem, int ty, int tx, int r, int j) {
    return *reinterpret_cast<type*>(mem.p() + j * shape::rows + (rows_index<shape::rows_each>(shape::rows, tx * 4, ty) ^ r));
  }
};

// Logits wait in the p panel: masks are one loop instead of 32 copies of its body, and the softmax holds a few rows at a time.
template <int Dv> CQSA_DEVICE void store_logits(const block_memory<Dv>& mem, int ty, int tx, const float (&s)[attention_shape<Dv>::rows_each][4]) {
  using part = logit_part<Dv>;
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int r = 0; r < attention_shape<Dv>::rows_each; r += part::step) {
      typename part::type x;
#pragma unroll
      for (int i = 0; i < part::step; ++i) x.x[i] = s[r + i][j];
      part::at(mem, ty, tx, r, j) = x;
    }
}

// Softcap, bias, ALiBi, masks on one logit; -inf where the key is hidden.
template <int Dv> CQSA_DEVICE float fix_logit(const attention_params& p, const block_memory<Dv>& mem, int row, int key, float s) {
  const block_facts& f = mem.facts();
  const int query = mem.row_query()[row];
  const int64_t h = mem.row_head()[row];
  bool hidden = key < f.lo + query || key >= f.keys || mem.key_offset(0)[key] == no_row;
  if (!CQSA_MUTANT(3)) hidden = hidden || key >= f.hi + query;
  if (hidden) return -infinity();
  if (p.mask.data && p.mask.data[offset_of(p.mask, f.batch, h, f.mask_row + query, f.tile_col + key)] == 0) return -infinity();
  if (p.softcap > 0) s = p.softcap * tanh_f32(s / p.softcap);
  if (p.bias.data) s += load_element(p.bias.data, p.bias.kind, offset_of(p.bias, f.batch, h, f.mask_row + query, f.tile_col + key));
  if (p.slopes.data) {
    const int64_t ahead = f.position + query - (f.tile_pos + key);
    s -= mem.row_slope()[row] * float(ahead < 0 ? -ahead : ahead);
  }
  return s;
}

template <int Dv> CQSA_DEVICE void fix_logits(const attention_params& p, const block_memory<Dv>& mem, int ty, int tx) {
  using shape = attention_shape<Dv>;
#pragma unroll 1
  for (int n = 0; n < shape::rows_each * 4; ++n) {
    const int row = ty * shape::rows_each + n / 4, key = tx * 4 + n % 4;
    float* at = mem.p() + panel_index(shape::rows, key, row);
    *at = fix_logit(p, mem, row, key, *at);
  }
}

// Where a thread stands. Two rows of threads alternate in 32 neighbours: NVIDIA's shared memory serves a load of sixteen bytes by
// all lanes in two steps instead of four where neighbours, or next but one, read the same, which is so for keys and for queries this
// way. The two are `apart` so that their stores to the p panel do not meet in a bank.
template <int Dv> struct thread_place {
  static constexpr int apart = attention_shape<Dv>::rows_each == 8 ? 2 : attention_shape<Dv>::rows_each == 4 ? 4 : 1;
  int ty, tx;
  CQSA_DEVICE explicit thread_place(int t) {
    const int pair = t / (2 * 16);
    ty = pair / apart * 2 * apart + pair % apart + t % 2 * apart;
    tx = t / 2 % 16;
  }
};

// Largest, or sum, over the sixteen threads of a row.
template <int Lanes> CQSA_DEVICE float row_max(float x) {
#pragma unroll
  for (int mask = 16; mask > 1; mask /= 2) x = max_f32(x, shuffle_xor<Lanes>(x, mask));
  return x;
}
template <int Lanes> CQSA_DEVICE float row_sum(float x) {
#pragma unroll
  for (int mask = 16; mask > 1; mask /= 2) x = x + shuffle_xor<Lanes>(x, mask);
  return x;
}

// One row of a thread's logits: probabilities in their place, m and l of the row follow. Returns what its sums are to be multiplied
// with. A hidden pair becomes -0, by which the careful product knows it.
template <int Lanes, int Dv> CQSA_DEVICE float softmax_row(const block_memory<Dv>& mem, int row, int tx, float (&s)[4]) {
  const float old = mem.row_m()[row];
  const float top = row_max<Lanes>(max_f32(old, max_f32(max_f32(s[0], s[1]), max_f32(s[2], s[3]))));
  // A row that has seen no key yet: any finite reference does, since every p is exp(-inf) = 0.
  const float ref = top == -infinity() ? 0.0f : top;
  const float scale = exp_f32(old - ref);
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float e = exp_f32(s[j] - ref);
    sum += e;
    s[j] = s[j] == -infinity() ? -0.0f : e;
  }
  sum = row_sum<Lanes>(sum);
  // Everyone has read m: the shuffles needed it. Tools that look for races do not see that order, the barrier they do.
  lanes_barrier<Lanes>();
  if (tx == 0) {
    mem.row_m()[row] = top;
    mem.row_l()[row] = fma_f32(mem.row_l()[row], scale, sum);
  }
  return scale;
}

// From logits to probabilities in the p panel; o is brought to the new maxima.
template <int Lanes, int Dv>
CQSA_DEVICE void softmax(const block_memory<Dv>& mem, int ty, int tx, float (&o)[attention_shape<Dv>::rows_each][attention_shape<Dv>::columns]) {
  using shape = attention_shape<Dv>;
  using part = logit_part<Dv>;
#pragma unroll
  for (int r = 0; r < shape::rows_each; r += part::step) {
    typename part::type x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = part::at(mem, ty, tx, r, j);
#pragma unroll
    for (int i = 0; i < part::step; ++i) {
      float s[4] = {x[0].x[i], x[1].x[i], x[2].x[i], x[3].x[i]};
      const float scale = softmax_row<Lanes>(mem, ty * shape::rows_each + r + i, tx, s);
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j].x[i] = s[j];
#pragma unroll
      for (int c = 0; c < shape::columns; ++c) o[r + i][c] *= scale;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) part::at(mem, ty, tx, r, j) = x[j];
  }
}

// o += p v over keys n0 .. of the tile whose values are in the panel.
template <int Dv>
CQSA_DEVICE void multiply_pv(const block_memory<Dv>& mem, int n0, int count, int ty, int tx,
                             float (&o)[attention_shape<Dv>::rows_each][attention_shape<Dv>::columns]) {
  using shape = attention_shape<Dv>;
#pragma unroll 1
  for (int n = 0; n < count; n += 4) {
    const int at_p = rows_index<shape::rows_each>(shape::rows, n0 + n, ty);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float a[shape::rows_each];
      read_rows<shape::rows_each>(mem.p() + i * shape::rows, at_p, a);
#pragma unroll
      for (int j = 0; j < shape::columns / 4; ++j) {
        const float4x b = *reinterpret_cast<const float4x*>(mem.panel() + (n + i) * Dv + j * 64 + tx * 4);
#pragma unroll
        for (int r = 0; r < shape::rows_each; ++r)
#pragma unroll
          for (int c = 0; c < 4; ++c) o[r][j * 4 + c] = fma_f32(a[r], b.x[c], o[r][j * 4 + c]);
      }
    }
  }
}

// The same sums in the same order where v holds NaN or Inf, which hidden pairs must not meet.
template <int Dv>
CQSA_DEVICE void multiply_pv_careful(const block_memory<Dv>& mem, int n0, int count, int ty, int tx,
                                     float (&o)[attention_shape<Dv>::rows_each][attention_shape<Dv>::columns]) {
  using shape = attention_shape<Dv>;
#pragma unroll 1
  for (int n = 0; n < count; ++n) {
    float a[shape::rows_each];
    read_rows<shape::rows_each>(mem.p() + n % 4 * shape::rows, rows_index<shape::rows_each>(shape::rows, (n0 + n) / 4 * 4, ty), a);
#pragma unroll
    for (int j = 0; j < shape::columns / 4; ++j) {
      const float4x b = *reinterpret_cast<const float4x*>(mem.panel() + n * Dv + j * 64 + tx * 4);
#pragma unroll
      for (int r = 0; r < shape::rows_each; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) o[r][j * 4 + c] = bits_of(a[r]) == 0x80000000u ? o[r][j * 4 + c] : fma_f32(a[r], b.x[c], o[r][j * 4 + c]);
    }
  }
}

CQSA_DEVICE int64_t state_index(const attention_params& p, const block_facts& f, int query, int64_t h) {
  return (f.batch * p.num_heads + h) * p.state_rows + f.state_row + query;
}

// o of a thread from the state, or zeros; or to the state.
template <int Dv, bool Store>
CQSA_DEVICE void exchange_state(const attention_params& p, const block_memory<Dv>& mem, int ty, int tx,
                                float (&o)[attention_shape<Dv>::rows_each][attention_shape<Dv>::columns]) {
  using shape = attention_shape<Dv>;
  const block_facts& f = mem.facts();
#pragma unroll
  for (int r = 0; r < shape::rows_each; ++r) {
    const int row = ty * shape::rows_each + r;
    const int64_t at = state_index(p, f, mem.row_query()[row], mem.row_head()[row]) * p.head_dim_v;
#pragma unroll
    for (int c = 0; c < shape::columns; ++c) {
      const int channel = c / 4 * 64 + tx * 4 + c % 4;
      const bool there = row < f.rows && channel < p.head_dim_v;
      if (Store && there) p.state_acc[at + channel] = o[r][c];
      if (!Store) o[r][c] = there ? p.state_acc[at + channel] : 0.0f;
    }
  }
}

// One thread per row: turns (m, l) into the factor and the divisor of its sums, and writes its lse.
template <int Dv> CQSA_DEVICE void close_row(const attention_params& p, const block_memory<Dv>& mem, int row) {
  const block_facts& f = mem.facts();
  const int64_t h = mem.row_head()[row];
  const row_end end = end_row(mem.row_m()[row], mem.row_l()[row], sink_of(p.sinks, h));
  if (p.lse.data) store_u32(p.lse.data + 4 * offset_of(p.lse, f.batch, h, f.q_row + mem.row_query()[row], 0), bits_of(end.lse));
  mem.row_m()[row] = end.factor;
  mem.row_l()[row] = end.divisor;
}

CQSA_DEVICE void store_quad(const gpu_view& x, int64_t at, const float* value) {
  if (x.kind == kind_f32) {
    float4x q;
#pragma unroll
    for (int i = 0; i < 4; ++i) q.x[i] = value[i];
    *reinterpret_cast<float4x*>(x.data + 4 * at) = q;
    return;
  }
  uint32_t half[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) half[i] = x.kind == kind_f16 ? uint32_t(f32_to_f16(value[i])) : f32_to_bf16(value[i]);
  word2x q;
  q.x[0] = half[0] | half[1] << 16;
  q.x[1] = half[2] | half[3] << 16;
  *reinterpret_cast<word2x*>(x.data + 2 * at) = q;
}

template <int Dv>
CQSA_DEVICE void store_rows(const attention_params& p, const block_memory<Dv>& mem, int ty, int tx,
                            float (&o)[attention_shape<Dv>::rows_each][attention_shape<Dv>::columns]) {
  using shape = attention_shape<Dv>;
  const block_facts& f = mem.facts();
#pragma unroll
  for (int r = 0; r < shape::rows_each; ++r) {
    const int row = ty * shape::rows_each + r;
    if (row >= f.rows) continue;
    const float factor = mem.row_m()[row], divisor = mem.row_l()[row];
    const int64_t at = offset_of(p.out, f.batch, mem.row_head()[row], f.q_row + mem.row_query()[row], 0);
#pragma unroll
    for (int j = 0; j < shape::columns / 4; ++j) {
      const int channel = j * 64 + tx * 4;
      float x[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) x[c] = o[r][j * 4 + c] * factor / divisor;
      if (channel >= p.head_dim_v) continue;
      if (p.out.quads) {
        store_quad(p.out, at + channel, x);
        continue;
      }
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (channel + c < p.head_dim_v) store_element(p.out.data, p.out.kind, at + (channel + c) * p.out.stride[3], x[c]);
    }
  }
}

// Logits of the current tile of keys.
template <int Dv>
CQSA_DEVICE void compute_logits(const attention_params& p, const block_memory<Dv>& mem, bool active, int ty, int tx,
                                float (&s)[attention_shape<Dv>::rows_each][4]) {
  using shape = attention_shape<Dv>;
#pragma unroll
  for (int r = 0; r < shape::rows_each; ++r)
#pragma unroll
    for (int j = 0; j < 4; ++j) s[r][j] = 0.0f;
#pragma unroll 1
  for (int c0 = 0; c0 < p.head_dim; c0 += shape::chunk) {
    if (c0 > 0) barrier();  // the panels are in use
    load_transposed<operand_q, shape::rows>(p, mem, c0, mem.panel());
    load_transposed<operand_k, shape::keys>(p, mem, c0, mem.panel_k());
    if (!CQSA_MUTANT(1)) barrier();
    const int left = p.head_dim - c0;
    if (active) multiply_qk<Dv>(mem, left >= shape::chunk ? shape::chunk / 4 : (left + 3) / 4, ty, tx, s);
  }
}

template <int Dv>
CQSA_DEVICE void add_values(const attention_params& p, const block_memory<Dv>& mem, bool active, int ty, int tx,
                            float (&o)[attention_shape<Dv>::rows_each][attention_shape<Dv>::columns]) {
  using shape = attention_shape<Dv>;
  block_facts& f = mem.facts();
  const int keys = f.keys;
#pragma unroll 1
  for (int n0 = 0; n0 < keys; n0 += shape::v_keys) {
    barrier();  // the panel is in use, by q and k or by the part before
    if (thread_index() == 0) f.gone = 0;  // everyone has asked; the next tile's keys are looked up after another barrier
    if (load_values<Dv>(p, mem, n0)) atomic_or(&f.bad[n0 / shape::v_keys], 1);
    barrier();
    const int count = keys - n0 < shape::v_keys ? (keys - n0 + 3) / 4 * 4 : shape::v_keys;
    if (!active) continue;
    if (f.bad[n0 / shape::v_keys] && !CQSA_MUTANT(4)) multiply_pv_careful<Dv>(mem, n0, count, ty, tx, o);
    else multiply_pv<Dv>(mem, n0, count, ty, tx, o);
  }
}

template <int Lanes, int Dv> CQSA_DEVICE void attention_block(const attention_params& p) {
  using shape = attention_shape<Dv>;
  const block_memory<Dv> mem{shared_memory()};
  block_facts& f = mem.facts();
  const int t = thread_index();
  const thread_place<Dv> place(t);
  const int ty = place.ty, tx = place.tx;
  if (t == 0) begin_block(p, f);
  barrier();
  if (f.rows == 0) return;
  for (int x = t; x < shape::rows; x += block_threads()) begin_row<Dv>(p, mem, x);
  barrier();
  // All lanes of a group or none: they shuffle together.
  const bool active = ballot<Lanes>(ty * shape::rows_each < f.rows) != 0;
  float o[shape::rows_each][shape::columns];
  if (p.flags & flag_state_in) {
    exchange_state<Dv, false>(p, mem, ty, tx, o);
  } else {
#pragma unroll
    for (int r = 0; r < shape::rows_each; ++r)
#pragma unroll
      for (int c = 0; c < shape::columns; ++c) o[r][c] = 0.0f;
  }
#pragma unroll 1
  for (int64_t n = 0; n < f.num_ranges; ++n) {
    barrier();  // the last tile's facts are in use
    if (t == 0) begin_range(p, f, n, shape::keys);
    barrier();
#pragma unroll 1
    for (int64_t first = f.first; first < f.end; first += shape::keys) {
      barrier();  // likewise
      if (t == 0) begin_tile(p, f, first, shape::keys);
      if (t < shape::keys) find_key<Dv>(p, mem, first, t);
      barrier();
      float s[shape::rows_each][4];
      compute_logits<Dv>(p, mem, active, ty, tx, s);
      if (active) {
        store_logits<Dv>(mem, ty, tx, s);
        if (f.fix || f.gone) fix_logits<Dv>(p, mem, ty, tx);
        softmax<Lanes, Dv>(mem, ty, tx, o);
      }
      add_values<Dv>(p, mem, active, ty, tx, o);
    }
  }
  barrier();
  if (p.flags & flag_state_out) {
    exchange_state<Dv, true>(p, mem, ty, tx, o);
    for (int row = t; row < f.rows; row += block_threads()) {
      const int64_t at = state_index(p, f, mem.row_query()[row], mem.row_head()[row]);
      p.state_m[at] = mem.row_m()[row];
      p.state_l[at] = mem.row_l()[row];
    }
    return;
  }
  for (int row = t; row < f.rows; row += block_threads()) close_row<Dv>(p, mem, row);
  barrier();
  store_rows<Dv>(p, mem, ty, tx, o);
}

}  // namespace cqsa::gpu
