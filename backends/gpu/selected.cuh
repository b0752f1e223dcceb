// SPDX-License-Identifier: Apache-2.0
// Portable attention over selected cells, in f32 FMA, on any GPU: one block for a query and a key head, whose query heads (16 at
// most; more take several blocks) share every cell that is gathered.
//
// For each tile of 64 entries of the list: where the cells are, logits from chunks of 64 channels of k in shared memory, softmax
// with a running maximum, then v. A cell that is not there is a row of zeros whose logit is -inf: nothing of the pool is read
// for it. Sums run over channels and entries in order and over sixteen threads in a fixed tree: results are the same every time.
#pragma once

#include "selected_cells.cuh"

namespace cqsa::gpu {

constexpr int64_t no_cell = INT64_MIN;

template <int Dv> struct selected_memory {
  using shape = selected_shape<Dv>;
  unsigned char* base;
  CQSA_DEVICE float* panel() const { return reinterpret_cast<float*>(base); }
  CQSA_DEVICE float* logits() const { return reinterpret_cast<float*>(base + shape::panel_bytes); }
  // Of k, v and their scales.
  CQSA_DEVICE int64_t* offset(int n) const {
    return reinterpret_cast<int64_t*>(base + shape::panel_bytes + shape::logit_bytes) + n * shape::cells;
  }
  CQSA_DEVICE float* row_scale() const { return reinterpret_cast<float*>(offset(4)); }
  CQSA_DEVICE float* row_sum() const { return row_scale() + shape::rows; }
  CQSA_DEVICE float* q() const { return row_sum() + shape::rows; }
};

template <int Dv> CQSA_DEVICE void load_q(const selected_params& p, const selected_memory<Dv>& mem, const selected_place& x) {
  const int pitch = p.q_pitch;
  for (int i = thread_index(); i < 16 * pitch; i += block_threads()) {
    const int row = i / pitch, c = i % pitch;
    const bool there = row < x.heads && c < p.head_dim;
    mem.q()[i] = there ? load_element(p.q.data, p.q.kind, offset_of(p.q, 0, x.first_head + row, x.query, c)) : 0.0f;
  }
}

// One thread for each entry of the tile.
template <int Dv>
CQSA_DEVICE void find_cell(const selected_params& p, const selected_memory<Dv>& mem, const selected_place& x, int64_t first, int n) {
  const cell_place c = place_of(p, x, read_cell(p, x, first + n));
  const bool gone = c.page < 0;
  const int64_t page = gone ? 0 : c.page;
  mem.offset(0)[n] = gone ? no_cell : offset_of(p.k, page, x.kv_head, c.row, 0);
  mem.offset(1)[n] = gone ? no_cell : offset_of(p.v, page, x.kv_head, c.row, 0);
  mem.offset(2)[n] = offset_of(p.k_scale, page, x.kv_head, c.row, 0);
  mem.offset(3)[n] = offset_of(p.v_scale, page, x.kv_head, c.row, 0);
}

// Channels c .. c + 3 of a row at `at`; zeros past `dim` and where the cell is not there.
template <int Kind>
CQSA_DEVICE float4x load_cell(const gpu_view& x, const gpu_view& scale, int group, int64_t at, int64_t scale_at, int c, int dim) {
  float4x out{{0.0f, 0.0f, 0.0f, 0.0f}};
  if (at == no_cell || c >= dim) return out;
  if (x.quads) {
    out = decode_quad<Kind>(load_quad<Kind>(x.data, at + c));
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (c + i < dim) out.x[i] = load_element(x.data, Kind, at + (c + i) * x.stride[3]);
  }
  if constexpr (Kind == kind_i8) {
    const float s = load_element(scale.data, kind_f16, scale_at + c / group * scale.stride[3]);
#pragma unroll
    for (int i = 0; i < 4; ++i) out.x[i] = c + i < dim ? out.x[i] * s : 0.0f;
  }
  return out;
}

// Channels c0 .. of k into the panel, cell after cell; neighbouring threads read neighbouring channels.
template <int Kind, int Dv> CQSA_DEVICE void load_keys(const selected_params& p, const selected_memory<Dv>& mem, int c0) {
  using shape = selected_shape<Dv>;
  constexpr int quads = shape::chunk / 4;
#pragma unroll
  for (int i = 0; i < shape::cells * quads / 256; ++i) {
    const int n = (thread_index() + i * 256) / quads, c = thread_index() % quads * 4;
    const float4x x = load_cell<Kind>(p.k, p.k_scale, p.kv_group, mem.offset(0)[n], mem.offset(2)[n], c0 + c, p.head_dim);
    *reinterpret_cast<float4x*>(mem.panel() + n * (shape::chunk + 4) + c) = x;
  }
}
// Cells n0 .. of v.
template <int Kind, int Dv> CQSA_DEVICE void load_values(const selected_params& p, const selected_memory<Dv>& mem, int n0) {
  using shape = selected_shape<Dv>;
#pragma unroll
  for (int i = 0; i < shape::v_cells * Dv / 4 / 256; ++i) {
    const int at = thread_index() + i * 256, n = n0 + at / (Dv / 4), c = at % (Dv / 4) * 4;
    const float4x x = load_cell<Kind>(p.v, p.v_scale, p.kv_group, mem.offset(1)[n], mem.offset(3)[n], c, p.head_dim_v);
    *reinterpret_cast<float4x*>(mem.panel() + (n - n0) * Dv + c) = x;
  }
}

// Logits of rows 2 y, 2 y + 1 and cells x, x + 32, where thread = 32 y + x: neighbours read neighbouring cells of the panel.
template <int Dv> CQSA_DEVICE void multiply_keys(const selected_params& p, const selected_memory<Dv>& mem, int c0, float (&s)[2][2]) {
  using shape = selected_shape<Dv>;
  const int pitch = p.q_pitch, left = pitch - c0;
  const int quads = left < shape::chunk ? left / 4 : shape::chunk / 4;
  const float* q = mem.q() + thread_index() / shape::half * 2 * pitch + c0;
  const float* k = mem.panel() + thread_index() % shape::half * (shape::chunk + 4);
#pragma unroll 2
  for (int i = 0; i < quads; ++i) {
    float4x a[2], b[2];
    a[0] = *reinterpret_cast<const float4x*>(q + 4 * i);
    a[1] = *reinterpret_cast<const float4x*>(q + pitch + 4 * i);
    b[0] = *reinterpret_cast<const float4x*>(k + 4 * i);
    b[1] = *reinterpret_cast<const float4x*>(k + shape::half * (shape::chunk + 4) + 4 * i);
#pragma unroll
    for (int c = 0; c < 4; ++c)
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int j = 0; j < 2; ++j) s[r][j] = fma_f32(a[r].x[c], b[j].x[c], s[r][j]);
  }
}

template <int Kind, int Dv> CQSA_DEVICE void make_logits(const selected_params& p, const selected_memory<Dv>& mem) {
  using shape = selected_shape<Dv>;
  float s[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
#pragma unroll 1
  for (int c0 = 0; c0 < p.head_dim; c0 += shape::chunk) {
    barrier();  // places are there; the panel has been read
    load_keys<Kind>(p, mem, c0);
    barrier();
    multiply_keys(p, mem, c0, s);
  }
  const int row = thread_index() / shape::half * 2, n = thread_index() % shape::half;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const bool gone = mem.offset(0)[n + shape::half * j] == no_cell && !CQSA_MUTANT(2);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      mem.logits()[(row + r) * shape::pitch + n + shape::half * j] = gone ? -infinity() : s[r][j] * p.softmax_scale;
  }
}

// What the sixteen threads of a row know of it.
struct row_state {
  float m, l;
};

// Probabilities in place of the logits; the factor for what the row has summed so far goes to row_scale.
template <int Lanes, int Dv> CQSA_DEVICE void take_softmax(const selected_memory<Dv>& mem, row_state& row) {
  using shape = selected_shape<Dv>;
  float* logits = mem.logits() + thread_index() / 16 * shape::pitch + thread_index() % 16;
  float s[4], top = row.m;
#pragma unroll
  for (int j = 0; j < 4; ++j) top = max_f32(top, s[j] = logits[16 * j]);
#pragma unroll
  for (int mask = 8; mask > 0; mask /= 2) top = max_f32(top, shuffle_xor<Lanes>(top, mask));
  // A row without any cell so far: any finite reference does, since every p is exp(-inf) = 0.
  const float ref = top == -infinity() ? 0.0f : top;
  const float scale = CQSA_MUTANT(3) ? 1.0f : exp_f32(row.m - ref);
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < 4; ++j) sum += logits[16 * j] = exp_f32(s[j] - ref);
#pragma unroll
  for (int mask = 8; mask > 0; mask /= 2) sum += shuffle_xor<Lanes>(sum, mask);
  row.m = top;
  row.l = fma_f32(row.l, scale, sum);
  if (thread_index() % 16 == 0) mem.row_scale()[thread_index() / 16] = scale;
}

template <int Dv> using selected_sums = float[selected_shape<Dv>::rows_each][4 * selected_shape<Dv>::quads];

template <int Dv> CQSA_DEVICE void multiply_values(const selected_memory<Dv>& mem, int n0, selected_sums<Dv>& o) {
  using shape = selected_shape<Dv>;
  const float* p = mem.logits() + thread_index() / shape::across * shape::rows_each * shape::pitch + n0;
  const float* v = mem.panel() + thread_index() % shape::across * 4;
#pragma unroll 1
  for (int n = 0; n < shape::v_cells; n += 4) {
    float4x a[shape::rows_each];
#pragma unroll
    for (int r = 0; r < shape::rows_each; ++r) a[r] = *reinterpret_cast<const float4x*>(p + r * shape::pitch + n);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < shape::quads; ++j) {
        const float4x b = *reinterpret_cast<const float4x*>(v + (n + i) * Dv + 256 * j);
#pragma unroll
        for (int r = 0; r < shape::rows_each; ++r)
#pragma unroll
          for (int c = 0; c < 4; ++c) o[r][4 * j + c] = fma_f32(a[r].x[i], b.x[c], o[r][4 * j + c]);
      }
  }
}

template <int Kind, int Dv>
CQSA_DEVICE void add_values(const selected_params& p, const selected_memory<Dv>& mem, int cells, selected_sums<Dv>& o) {
  using shape = selected_shape<Dv>;
#pragma unroll 1
  for (int n0 = 0; n0 < cells; n0 += shape::v_cells) {
    barrier();  // probabilities are there; the panel has been read
    if (n0 == 0) {
#pragma unroll
      for (int r = 0; r < shape::rows_each; ++r)
#pragma unroll
        for (int c = 0; c < 4 * shape::quads; ++c) o[r][c] *= mem.row_scale()[thread_index() / shape::across * shape::rows_each + r];
    }
    load_values<Kind>(p, mem, n0);
    barrier();
    multiply_values<Dv>(mem, n0, o);
  }
}

template <int Lanes, int Kind, int Dv>
CQSA_DEVICE void add_cells(const selected_params& p, const selected_memory<Dv>& mem, const selected_place& x, row_state& row,
                           selected_sums<Dv>& o) {
  using shape = selected_shape<Dv>;
#pragma unroll 1
  for (int64_t first = 0; first < x.count; first += shape::cells) {
    // Everyone has read the last tile's places: a barrier stood behind the last of its values.
    if (thread_index() < shape::cells) find_cell<Dv>(p, mem, x, first, thread_index());
    make_logits<Kind>(p, mem);
    barrier();
    take_softmax<Lanes>(mem, row);
    const int left = int(x.count - first);
    add_values<Kind>(p, mem, left < shape::cells ? left : shape::cells, o);
  }
}

// One thread of the sixteen for each row: its divisor, and its lse.
template <int Dv>
CQSA_DEVICE void close_row(const selected_params& p, const selected_memory<Dv>& mem, const selected_place& x, const row_state& row) {
  const int r = thread_index() / 16;
  if (thread_index() % 16 != 0 || r >= x.heads) return;
  const bool empty = row.l == 0.0f && row.m == -infinity();
  mem.row_sum()[r] = empty ? 1.0f : row.l;
  if (!p.lse.data) return;
  const float lse = empty ? -infinity() : float(double(row.m) + log_f64(double(row.l)));
  store_u32(p.lse.data + 4 * offset_of(p.lse, 0, x.first_head + r, x.query, 0), bits_of(lse));
}

template <int Dv>
CQSA_DEVICE void store_sums(const selected_params& p, const selected_memory<Dv>& mem, const selected_place& x, const selected_sums<Dv>& o) {
  using shape = selected_shape<Dv>;
#pragma unroll
  for (int r = 0; r < shape::rows_each; ++r) {
    const int row = thread_index() / shape::across * shape::rows_each + r;
    if (row >= x.heads) continue;
    const float sum = mem.row_sum()[row];
    const int64_t at = offset_of(p.out, 0, x.first_head + row, x.query, 0);
#pragma unroll
    for (int j = 0; j < shape::quads; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int c = 256 * j + thread_index() % shape::across * 4 + i;
        if (c < p.head_dim_v) store_element(p.out.data, p.out.kind, at + c * p.out.stride[3], o[r][4 * j + i] / sum);
      }
  }
}

template <int Lanes, int Dv> CQSA_DEVICE void selected_block(const selected_params& p) {
  using shape = selected_shape<Dv>;
  const selected_memory<Dv> mem{shared_memory()};
  const selected_place x = find_place(p);
  load_q<Dv>(p, mem, x);
  row_state row{-infinity(), 0.0f};
  selected_sums<Dv> o;
#pragma unroll
  for (int r = 0; r < shape::rows_each; ++r)
#pragma unroll
    for (int c = 0; c < 4 * shape::quads; ++c) o[r][c] = 0.0f;
  if (p.k.kind == kind_i8) add_cells<Lanes, kind_i8, Dv>(p, mem, x, row, o);
  else if (p.k.kind == kind_f16) add_cells<Lanes, kind_f16, Dv>(p, mem, x, row, o);
  else if (p.k.kind == kind_bf16) add_cells<Lanes, kind_bf16, Dv>(p, mem, x, row, o);
  else add_cells<Lanes, kind_f32, Dv>(p, mem, x, row, o);
  close_row<Dv>(p, mem, x, row);
  barrier();
  store_sums<Dv>(p, mem, x, o);
}

}  // namespace cqsa::gpu
