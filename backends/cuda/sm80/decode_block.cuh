// SPDX-License-Identifier: Apache-2.0
// Where a block of the decode kernels stands: its rows, its keys, and how stages of keys come to shared memory.
//
// A block has the query rows of one batch item and one key head (row = query * heads + head) and the keys of one split. Keys come
// in stages of 64, k and v at once, by a ring of asynchronous copies. Thread t looks up key t % 64, of k or of v, a stage before
// its copies are issued, and its scales a turn later: no copy waits for the page table, and no product for a scale.
#pragma once

#include "backends/cuda/sm80/decode_codes.cuh"
#include "backends/cuda/sm80/decode_params.h"
#include "backends/gpu/attention_block.cuh"

namespace cqsa::gpu::decode {

// D: channels that there is room for. Type: of q. Bytes: of an element of k and v.
template <int D, int Type, int Bytes> struct variant {
  static constexpr int d = D, type = Type, bytes = Bytes;
  static constexpr bool narrow = Bytes == 1;
  static constexpr int value_type = narrow ? int(kind_bf16) : Type;  // in which v is multiplied
  static constexpr int chunk_channels = 16 / Bytes;
  static constexpr int pad = 64;  // channels come in multiples of this: between these steps no product waits for a branch
  using shape = decode_shape<D, Bytes>;
};

// Rows of less than 128 bytes lie two to a line of the banks.
template <int RowBytes> CQSA_DEVICE int mix_of(int row) { return RowBytes >= 128 ? row & 7 : row >> 1 & 3; }
template <int RowBytes> CQSA_DEVICE int chunk_offset(int row, int chunk) { return row * RowBytes + ((chunk ^ mix_of<RowBytes>(row)) << 4); }

template <class V> struct block_memory {
  using shape = typename V::shape;
  unsigned char* base;
  int32_t stages, q_bytes, slot, ring_bytes;
  CQSA_DEVICE explicit block_memory(const decode_params& p)
      : base(shared_memory()), stages(p.stages), q_bytes(p.m_tiles * 16 * V::d * 2), slot(p.slot_bytes) {
    ring_bytes = stages * shape::stage_bytes;
    if (ring_bytes < shape::merge_bytes) ring_bytes = shape::merge_bytes;
  }
  // n: of `stages`.
  CQSA_DEVICE unsigned char* panel(int n, int which) const { return base + n * shape::stage_bytes + which * shape::panel_bytes; }
  CQSA_DEVICE unsigned char* q() const { return base + ring_bytes; }
  // n: of `stages` + 1.
  CQSA_DEVICE unsigned char* table(int n) const { return q() + q_bytes + n * slot; }
  CQSA_DEVICE int64_t* places(int n, int which) const { return reinterpret_cast<int64_t*>(table(n)) + which * keys; }
  CQSA_DEVICE uint32_t* present(int n) const { return reinterpret_cast<uint32_t*>(table(n) + 2 * 8 * keys); }
  CQSA_DEVICE float* scales(int n, int which, int group) const {
    return reinterpret_cast<float*>(table(n) + 2 * 8 * keys + 16) + (group * 2 + which) * keys;
  }
  CQSA_DEVICE block_facts& facts() const { return *reinterpret_cast<block_facts*>(q() + q_bytes + (stages + 1) * slot); }
};

// Number `back` places before n in a ring.
CQSA_DEVICE int before(int n, int back, int size) { return n >= back ? n - back : n - back + size; }

// One thread: the keys of this block's split.
CQSA_DEVICE void begin_split(const decode_params& p, block_facts& f) {
  const int64_t split = block_index_y();
  const int64_t stages = (max_i64(f.end - f.first, 0) + keys - 1) / keys;
  const int64_t from = f.first;
  f.first = from + stages * split / p.splits * keys;
  f.end = min_i64(f.end, from + stages * (split + 1) / p.splits * keys);
}

// Where a key is: its row in k or v, `bytes` from their start, and its scales, an element of theirs.
struct key_place {
  int64_t bytes, scale;
};

// Page of key t % 64 of a stage; whoever asks does other things before place_in() needs the answer.
CQSA_DEVICE int32_t ask_page(const decode_params& p, const block_facts& f, int stage) {
  const int64_t key = f.first + int64_t(stage) * keys + thread_index() % keys;
  if (key >= f.end || !p.a.page_table) return 0;
  const int64_t index = uint32_t(f.range.row + key) / uint32_t(p.page_size);
  return int32_t(load_u32(p.a.page_table + 4 * (f.batch * p.a.page_table_stride[0] + index * p.a.page_table_stride[1])));
}

// Key t % 64 of a stage, for k or v as t / 64 says.
template <class V> CQSA_DEVICE key_place place_in(const decode_params& p, const block_facts& f, int stage, int32_t page) {
  const int t = thread_index(), which = t / keys;
  const int64_t key = f.first + int64_t(stage) * keys + t % keys;
  int64_t item = f.batch, row = f.range.row + key;
  if (p.a.page_table) item = page, row = uint32_t(row) % uint32_t(p.page_size);
  if (key >= f.end || (p.a.page_table && (item < 0 || item >= p.a.num_pages))) return {no_row, 0};
  const gpu_view &view = which ? p.a.v : p.a.k, &scale = which ? p.a.v_scale : p.a.k_scale;
  return {offset_of(view, item, f.kv_head, row, 0) * V::bytes, V::narrow ? offset_of(scale, item, f.kv_head, row, 0) : 0};
}

template <class V> CQSA_DEVICE void keep_place(const block_memory<V>& mem, int table, const key_place& place) {
  const int t = thread_index();
  mem.places(table, t / keys)[t % keys] = place.bytes;
  const uint32_t there = uint32_t(ballot<32>(place.bytes != no_row));
  if (t < keys && t % 32 == 0) mem.present(table)[t / 32] = there;
}

// Scales of one key in registers, until the tables they belong to are free.
template <int Most> struct key_scales {
  float x[Most];
};
template <class V> constexpr int most_groups = V::narrow ? V::d / 32 : 1;

template <class V>
CQSA_DEVICE key_scales<most_groups<V>> load_scales(const decode_params& p, const block_facts& f, const key_place& place) {
  key_scales<most_groups<V>> out;
  const bool values = thread_index() / keys != 0;
  const gpu_view& scale = values ? p.a.v_scale : p.a.k_scale;
  const int kind = values ? p.a.scale_v : p.a.scale_k, groups = values ? p.v_groups : p.k_groups;
#pragma unroll
  for (int i = 0; i < most_groups<V>; ++i) {
    const bool there = kind == scale_per_group && place.bytes != no_row && i < groups;
    out.x[i] = there ? f16_to_f32(uint16_t(load_u16(scale.data + 2 * (place.scale + i * scale.stride[3])))) : 0.0f;
  }
  if (kind == scale_per_group || place.bytes == no_row) return out;
  // One for the whole row, all f32.
  out.x[0] = kind == scale_none ? 1.0f
                                : load_element(scale.data, kind_f32,
                                               kind == scale_per_token  ? place.scale
                                               : kind == scale_per_head ? f.kv_head * scale.stride[1]
                                                                        : 0);
  return out;
}
template <class V>
CQSA_DEVICE void keep_scales(const decode_params& p, const block_memory<V>& mem, int table, const key_scales<most_groups<V>>& scales) {
  const int t = thread_index(), groups = t / keys ? p.v_groups : p.k_groups;
#pragma unroll
  for (int i = 0; i < most_groups<V>; ++i)
    if (i < groups) mem.scales(table, t / keys, i)[t % keys] = scales.x[i];
}

// Copies of a panel are issued; keys that are not there become zeros, as do channels up to a multiple of V::pad.
template <class V> CQSA_DEVICE void copy_panel(const gpu_view& view, int channels, const int64_t* places, unsigned char* to) {
  constexpr int row_bytes = V::shape::row_bytes, across = row_bytes / 16, down = threads / across;
  const int t = thread_index(), chunk = t % across, row0 = t / across, c = chunk * V::chunk_channels;
  if (c >= (channels + V::pad - 1) / V::pad * V::pad) return;
#pragma unroll
  for (int n = 0; n < keys / down; ++n) {
    const int row = row0 + n * down;
    const int64_t at = places[row];
    const bool there = at != no_row && c < channels;
    cp_async_16(to + chunk_offset<row_bytes>(row, CQSA_MUTANT(1) ? chunk ^ 1 : chunk), view.data + (there ? at + chunk * 16 : 0),
                there ? 16 : 0);
  }
}

// The same for any stride and alignment, done when it returns.
template <class V> CQSA_DEVICE void load_panel(const gpu_view& view, int channels, const int64_t* places, unsigned char* to) {
  constexpr int row_bytes = V::shape::row_bytes;
  const int padded = (channels + V::pad - 1) / V::pad * V::pad;
#pragma unroll 1
  for (int row = thread_index() / 32; row < keys; row += threads / 32)
#pragma unroll 1
    for (int c = thread_index() % 32; c < padded; c += 32) {
      const int64_t at = places[row];
      const bool there = at != no_row && c < channels;
      const char* from = view.data + (there ? at + c * view.stride[3] * V::bytes : 0);
      unsigned char* const byte = to + chunk_offset<row_bytes>(row, c / V::chunk_channels) + c % V::chunk_channels * V::bytes;
      if constexpr (V::narrow) *byte = there ? static_cast<unsigned char>(*from) : 0;
      else *reinterpret_cast<uint16_t*>(byte) = there ? uint16_t(load_u16(from)) : 0;
    }
}

template <class V> CQSA_DEVICE void issue_stage(const decode_params& p, const block_memory<V>& mem, int slot, int table) {
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const gpu_view& view = which ? p.a.v : p.a.k;
    const int channels = which ? p.a.head_dim_v : p.a.head_dim;
    if (view.quads) copy_panel<V>(view, channels, mem.places(table, which), mem.panel(slot, which));
    else load_panel<V>(view, channels, mem.places(table, which), mem.panel(slot, which));
  }
}

// Until at most `pending` of the newest groups of copies are under way.
CQSA_DEVICE void wait_for_copies(int pending) {
  static_assert(most_stages == 8, "the cases");
  switch (pending) {
    case 0: cp_async_wait<0>(); break;
    case 1: cp_async_wait<1>(); break;
    case 2: cp_async_wait<2>(); break;
    case 3: cp_async_wait<3>(); break;
    case 4: cp_async_wait<4>(); break;
    case 5: cp_async_wait<5>(); break;
    default: cp_async_wait<6>(); break;
  }
}

// Channel c of a row of q stands where a fragment of codes, four in a word, has that channel.
template <class V> CQSA_DEVICE int query_channel(int c) {
  if (!V::narrow) return c;
  const int i = c % 16;
  return c - i + (i / 4) * 2 + i % 2 + (i & 2) * 4;
}

// All rows of the tiles; those and the channels that are not there hold zeros.
template <class V> CQSA_DEVICE void load_queries(const decode_params& p, const block_memory<V>& mem) {
  const block_facts& f = mem.facts();
  const int rows = p.m_tiles * 16;
#pragma unroll 1
  for (int row = thread_index() / 32; row < rows; row += threads / 32) {
    const bool used = row < f.rows;
    const int query = used ? row / f.heads : 0, head = used ? row % f.heads : 0;
    const int64_t at = offset_of(p.a.q, f.batch, f.first_head + head, f.q_row + query, 0);
#pragma unroll 4
    for (int c = thread_index() % 32; c < V::d; c += 32) {
      uint32_t x = 0;
      if (used && c < p.a.head_dim) x = load_u16(p.a.q.data + 2 * (at + c * p.a.q.stride[3]));
      const int to = query_channel<V>(c);
      *reinterpret_cast<uint16_t*>(mem.q() + chunk_offset<V::d * 2>(row, to / 8) + to % 8 * 2) = uint16_t(x);
    }
  }
}

}  // namespace cqsa::gpu::decode
