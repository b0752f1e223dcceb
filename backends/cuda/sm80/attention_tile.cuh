// SPDX-License-Identifier: Apache-2.0
// Shared memory of a block of the sm_80 attention, and how rows of q, k and v get there.
//
// A row of D halves is D / 8 chunks of sixteen bytes. Nothing is padded: chunks are exchanged by an XOR of the row, so that the
// eight rows which ldmatrix reads at once, and those which eight neighbouring threads write, lie in different banks.
#pragma once

#include "attention_shape.h"
#include "backends/gpu/attention_block.cuh"
#include "mma.cuh"

namespace cqsa::gpu::sm80 {

template <class S> struct tile_memory {
  unsigned char* base;
  CQSA_DEVICE unsigned char* q() const { return base; }
  CQSA_DEVICE unsigned char* k(int stage) const { return base + S::q_bytes + stage * (S::k_bytes + S::v_bytes); }
  CQSA_DEVICE unsigned char* v(int stage) const { return k(stage) + S::k_bytes; }
  // Sums of p over the lane's own keys, of its two rows in tile mt.
  CQSA_DEVICE float2x& lane_l(int mt) const { return reinterpret_cast<float2x*>(k(S::stages))[thread_now() * S::m_tiles + mt]; }
  CQSA_DEVICE block_facts& facts() const { return *reinterpret_cast<block_facts*>(k(S::stages) + S::lane_bytes); }
  // Of each row (row_table_bytes()). l is there at the end only, when keys are done with; offsets at the beginning.
  CQSA_DEVICE float* row_m() const { return reinterpret_cast<float*>(k(S::stages) + S::lane_bytes + S::facts_bytes); }
  CQSA_DEVICE float* row_l() const { return reinterpret_cast<float*>(k(0)); }
  CQSA_DEVICE int64_t* row_offset() const { return reinterpret_cast<int64_t*>(S::ahead ? k(1) : rest_of_rows()); }
  CQSA_DEVICE int row_query(int row) const { return S::ahead ? short_query()[row] : long_query()[row]; }
  CQSA_DEVICE int64_t row_head(int row) const {
    return S::ahead ? facts().first_head + (row - short_query()[row] * facts().heads) : int64_t(long_query()[S::rows + row]);
  }
  CQSA_DEVICE void set_row(int row, int query, int64_t head) const {
    if (S::ahead) short_query()[row] = uint8_t(query);
    else long_query()[row] = query, long_query()[S::rows + row] = int32_t(head);
  }
  CQSA_DEVICE float* row_slope() const { return reinterpret_cast<float*>(S::ahead ? rest_of_rows() : rest_of_rows() + 16 * S::rows); }
  // General kernels only.
  CQSA_DEVICE float* addend() const { return reinterpret_cast<float*>(reinterpret_cast<unsigned char*>(row_m()) + S::row_bytes); }
  CQSA_DEVICE int64_t* key_offset(int parity, int n) const {  // k, v, their scales
    return reinterpret_cast<int64_t*>(reinterpret_cast<unsigned char*>(addend()) + S::addend_bytes + parity * (S::key_bytes / 2)) + n * S::keys;
  }
  // Per key: what its logits are multiplied with, 0 or -inf to hide it, what its p is multiplied with, and not used.
  CQSA_DEVICE float* key_factor(int parity) const { return reinterpret_cast<float*>(key_offset(parity, 4)); }

 private:
  static_assert(!S::ahead || S::rows <= 128, "a query's number in a byte");
  CQSA_DEVICE unsigned char* rest_of_rows() const { return reinterpret_cast<unsigned char*>(row_m() + S::rows); }
  CQSA_DEVICE int32_t* long_query() const { return reinterpret_cast<int32_t*>(rest_of_rows() + 8 * S::rows); }
  CQSA_DEVICE uint8_t* short_query() const { return rest_of_rows() + 64; }
};

// Where chunk `chunk` of a row stands among its chunks.
template <int D> CQSA_DEVICE int swizzled(int row, int chunk) { return D % 64 == 0 ? chunk ^ (row & 7) : chunk ^ (row >> 1 & 3); }
// .. and the part of it that only depends on the row: the place of chunk c is (c ^ mixed), a multiple of sixteen bytes.
template <int D> CQSA_DEVICE int mix_of(int row) { return D % 64 == 0 ? row & 7 : row >> 1 & 3; }

// How the threads of a block share the chunks of Rows rows: `group` neighbours take neighbouring chunks.
template <class S, int D, int Rows> struct copy_plan {
  static constexpr int chunks = D / 8, group = chunks % 8 == 0 ? 8 : 4, across = chunks / group;
  static constexpr int step = S::threads / group, passes = Rows / step;
  static_assert(Rows % step == 0 && step % 8 == 0, "a thread's rows have one swizzle");
};

// Copies the rows of a tile that are there, `rows` of them, and zeros for the others. from: the thread's chunk of its first row.
template <class S, int D, int Rows>
CQSA_DEVICE void copy_rows(unsigned char* to, const char* from, int64_t row_bytes, int rows, int channels) {
  using plan = copy_plan<S, D, Rows>;
  const int t = thread_in_loop(), chunk = t % plan::group, row0 = t / plan::group;
  unsigned char* at = to + row0 * (2 * D) + 16 * swizzled<D>(row0, CQSA_MUTANT(11) ? chunk ^ 1 : chunk);
#pragma unroll
  for (int n = 0; n < plan::passes; ++n) {
#pragma unroll
    for (int j = 0; j < plan::across; ++j) {
      const bool there = row0 + n * plan::step < rows && (chunk + j * plan::group) * 8 < channels;
      cp_async_16(at + n * plan::step * (2 * D) + j * plan::group * 16, from + j * plan::group * 16, there ? 16 : 0);
    }
    from += row_bytes * plan::step;
  }
}

// One thread per row of the tile.
template <class S> CQSA_DEVICE void begin_row(const attention_params& p, const tile_memory<S>& mem, int x) {
  const block_facts& f = mem.facts();
  const bool used = x < f.rows;
  const int query = used ? x / f.heads : f.queries - 1, head = used ? x % f.heads : 0;
  const int64_t h = f.first_head + head;
  mem.set_row(x, query, h);
  mem.row_offset()[x] = used ? offset_of(p.q, f.batch, h, f.q_row + query, 0) : no_row;
  if constexpr (S::general) mem.row_slope()[x] = p.slopes.data ? load_element(p.slopes.data, kind_f32, offset_of(p.slopes, f.batch, h, 0, 0)) : 0.0f;
}

// What a warp knows of itself: its number, whether it has rows, and its first and last query.
struct warp_place {
  int warp, first_query, last_query;
  bool active;
};
template <class S> CQSA_DEVICE warp_place place_of_warp(const tile_memory<S>& mem) {
  constexpr int rows = 16 * S::m_tiles;
  const block_facts& f = mem.facts();
  const int warp = thread_now() / 32, first = warp * rows;
  return {warp, mem.row_query(first), mem.row_query(first + rows - 1), first < f.rows};
}

// Eight channels of a row from any address and stride, as the halves that are multiplied; channels past the end are 0.
template <int Kind> CQSA_DEVICE word4x gather_chunk(const gpu_view& x, int64_t at, int channel, int channels, float factor) {
  word4x out;
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    float pair[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int c = channel + 2 * i + n;
      pair[n] = c < channels ? load_element(x.data, x.kind, at + c * x.stride[3]) * factor : 0.0f;
    }
    const uint32_t bits = Kind == kind_f16 ? pack_f16(pair[0], pair[1]) : pack_bf16(pair[0], pair[1]);
    if (i == 0) out.x[0] = bits;  // a run-time index would put the words into local memory
    else if (i == 1) out.x[1] = bits;
    else if (i == 2) out.x[2] = bits;
    else out.x[3] = bits;
  }
  return out;
}

// Eight codes that stand together. Every code is exact in both types of halves.
template <int Kind, int Codes> CQSA_DEVICE word4x decode_chunk(word2x codes, float factor) {
  word4x out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t two = codes.x[i / 2] >> 16 * (i % 2);
    const float low = decode_u8(two & 0xffu, Codes) * factor, high = decode_u8(two >> 8 & 0xffu, Codes) * factor;
    out.x[i] = Kind == kind_f16 ? pack_f16(low, high) : pack_bf16(low, high);
  }
  return out;
}

template <int Kind> CQSA_DEVICE word4x load_chunk(const gpu_view& x, int64_t at, int channel, int channels, float factor) {
  if (!x.quads || channel + 8 > channels) return gather_chunk<Kind>(x, at, channel, channels, factor);
  if (x.kind <= kind_bf16) return *reinterpret_cast<const word4x*>(x.data + 2 * (at + channel));
  const word2x codes = *reinterpret_cast<const word2x*>(x.data + at + channel);
  if (x.kind == kind_i8) return decode_chunk<Kind, kind_i8>(codes, factor);
  if (x.kind == kind_e4m3) return decode_chunk<Kind, kind_e4m3>(codes, factor);
  return decode_chunk<Kind, kind_e5m2>(codes, factor);
}

// q in the general kernels, and wherever its rows cannot be copied.
template <class S, int Kind> CQSA_DEVICE void gather_queries(const attention_params& p, const tile_memory<S>& mem) {
  constexpr int chunks = S::d / 8;
#pragma unroll 1
  for (int n = thread_now(); n < S::rows * chunks; n += S::threads) {
    const int row = n / chunks, chunk = n % chunks;
    const int64_t at = mem.row_offset()[row];
    word4x x = {{0, 0, 0, 0}};
    if (at != no_row && chunk * 8 < p.head_dim) x = load_chunk<Kind>(p.q, at, chunk * 8, p.head_dim, 1.0f);
    *reinterpret_cast<word4x*>(mem.q() + row * (2 * S::d) + 16 * swizzled<S::d>(row, chunk)) = x;
  }
}

template <class S, int Kind> CQSA_DEVICE void load_queries(const attention_params& p, const tile_memory<S>& mem) {
  if (!p.q.quads) {
    gather_queries<S, Kind>(p, mem);
    return;
  }
  using plan = copy_plan<S, S::d, S::rows>;
  const int t = thread_now(), chunk = t % plan::group, row0 = t / plan::group;
  unsigned char* to = mem.q() + row0 * (2 * S::d) + 16 * swizzled<S::d>(row0, chunk);
#pragma unroll
  for (int n = 0; n < plan::passes; ++n) {
    const int64_t at = mem.row_offset()[row0 + n * plan::step];
    const char* from = p.q.data + 2 * (at == no_row ? 0 : at) + chunk * 16;
#pragma unroll
    for (int j = 0; j < plan::across; ++j) {
      const bool there = at != no_row && (chunk + j * plan::group) * 8 < p.head_dim;
      cp_async_16(to + n * plan::step * (2 * S::d) + j * plan::group * 16, from + j * plan::group * 16, there ? 16 : 0);
    }
  }
}

// ------------------------------------------------------------------------------------------ keys of the general kernels

// What the codes of a row of v are measured by where groups of channels have scales of their own: the largest of them. A chunk is
// multiplied with its scale over this before it is rounded to halves, which can so neither overflow nor vanish, and p with this.
// Codes of k stay what they are: there the product of each group has its scale (multiply_qk_grouped).
CQSA_DEVICE float largest_scale(const gpu_view& scale, int64_t at, int groups) {
  float most = 0.0f;
#pragma unroll 1
  for (int i = 0; i < groups; ++i) {
    const float x = f16_to_f32(uint16_t(load_u16(scale.data + 2 * (at + i * scale.stride[3]))));
    most = max_f32(most, x < 0 ? -x : x);
  }
  return most > 0 ? most : 1.0f;
}

CQSA_DEVICE float value_scale(const attention_params& p, int64_t item, int64_t g, int64_t row) {
  if (p.scale_v != scale_per_group) return row_scale(p.v_scale, p.scale_v, item, g, row);
  return largest_scale(p.v_scale, offset_of(p.v_scale, item, g, row, 0), (p.head_dim_v + p.kv_group - 1) / p.kv_group);
}
CQSA_DEVICE float group_scale(const attention_params& p, const gpu_view& scale, int64_t row_at, int channel) {
  return f16_to_f32(uint16_t(load_u16(scale.data + 2 * (row_at + channel / p.kv_group * scale.stride[3]))));
}

// One thread per key of a tile: where it is in k and v, and its scales.
template <class S> CQSA_DEVICE void find_key(const attention_params& p, const tile_memory<S>& mem, int parity, int64_t first, int64_t end, int n) {
  const block_facts& f = mem.facts();
  int64_t item = f.batch, row = f.range.row + first + n;
  bool gone = first + n >= end;
  if (!gone && p.page_table) {
    item = page_of(p, f.batch, row);
    row %= p.page_size;
    gone = item < 0;
  }
  mem.key_offset(parity, 0)[n] = gone ? no_row : offset_of(p.k, item, f.kv_head, row, 0);
  mem.key_offset(parity, 1)[n] = gone ? no_row : offset_of(p.v, item, f.kv_head, row, 0);
  mem.key_offset(parity, 2)[n] = offset_of(p.k_scale, item, f.kv_head, row, 0);
  mem.key_offset(parity, 3)[n] = offset_of(p.v_scale, item, f.kv_head, row, 0);
  float* factor = mem.key_factor(parity) + n;
  factor[0] = gone ? 1.0f : row_scale(p.k_scale, p.scale_k, item, f.kv_head, row);
  factor[S::keys] = gone ? -infinity() : 0.0f;
  factor[2 * S::keys] = gone ? 1.0f : value_scale(p, item, f.kv_head, row);
}

template <class S> CQSA_DEVICE void find_keys(const attention_params& p, const tile_memory<S>& mem, int parity, int64_t first, int64_t end) {
  if (thread_now() < S::keys) find_key<S>(p, mem, parity, first, end, thread_now());
}

// What p is not multiplied with of a scale: its sign, which an infinite code takes; with 0 it is NaN.
CQSA_DEVICE float sign_of(float scale) { return scale < 0.0f ? -1.0f : scale == 0.0f ? 0.0f : 1.0f; }

// k (Which 0) or v (1) of a tile whose keys have been looked up.
template <class S, int Kind, int D, int Which>
CQSA_DEVICE void load_keys(const attention_params& p, const tile_memory<S>& mem, int parity, unsigned char* to) {
  const gpu_view& x = Which ? p.v : p.k;
  const int64_t* offset = mem.key_offset(parity, Which);
  const int channels = Which ? p.head_dim_v : p.head_dim;
  const bool copied = x.quads && x.kind == Kind, grouped = Which && p.scale_v == scale_per_group;
  constexpr int chunks = D / 8;
#pragma unroll 1
  for (int n = thread_now(); n < S::keys * chunks; n += S::threads) {
    const int row = n / chunks, chunk = n % chunks;
    const int64_t at = offset[row];
    const bool there = at != no_row && chunk * 8 < channels;
    unsigned char* place = to + row * (2 * D) + 16 * swizzled<D>(row, chunk);
    if (copied) {
      cp_async_16(place, x.data + (there ? 2 * (at + chunk * 8) : 0), there ? 16 : 0);
      continue;
    }
    word4x value = {{0, 0, 0, 0}};
    if (there) {
      float factor = 1.0f;
      if (grouped) factor = group_scale(p, p.v_scale, mem.key_offset(parity, 3)[row], chunk * 8) / mem.key_factor(parity)[2 * S::keys + row];
      else if (Which) factor = sign_of(mem.key_factor(parity)[2 * S::keys + row]);
      value = load_chunk<Kind>(x, at, chunk * 8, channels, factor);
    }
    *reinterpret_cast<word4x*>(place) = value;
  }
}

}  // namespace cqsa::gpu::sm80
