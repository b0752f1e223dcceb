// SPDX-License-Identifier: Apache-2.0
// Rows to and from key-value caches, section 12 of cqsa.h: the same bits as the CPU backend. Values of cells and pages are used
// only where they name a place in the pool.
#pragma once

#include "kv_params.h"
#include "rotate.cuh"

namespace cqsa::gpu {

// Page of row n's cell and its row there; false where there is none.
CQSA_DEVICE bool find_cell(const kv_params& p, int64_t n, int64_t* page, int64_t* row) {
  const int64_t cell = load_index(p.cells, p.cells_bytes, n * p.cells_stride);
  if (cell < 0) return false;
  const int64_t entry = cell / p.page_size;
  if (entry >= p.pages) return false;
  *page = load_index(p.page_table, 4, n * p.page_table_stride[0] + entry * p.page_table_stride[1]);
  *row = cell - entry * p.page_size;
  return *page >= 0 && *page < p.num_pages;
}

CQSA_DEVICE uint32_t magnitude(float x) { return bits_of(x) & 0x7fffffffu; }

// f16() of section 12.
CQSA_DEVICE uint32_t scale_to_f16(float x) { return f32_to_f16(x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x); }

template <class T> CQSA_DEVICE T larger_of(T a, T b) { return a > b ? a : b; }

// Over 2^k neighbouring lanes.
template <int Lanes, class T> CQSA_DEVICE T largest_among(T value, int lanes) {
  for (int mask = 1; mask < lanes; mask *= 2) value = larger_of(value, shuffle_xor<Lanes>(value, mask));
  return value;
}

// ---- append -----------------------------------------------------------------------------------------------------------------

// Adding 1.5 * 2^23 leaves no room for a fraction. Limits before rounding are the same as behind it, and keep it in range.
CQSA_DEVICE uint32_t encode_code(float x, float scale) {
  float y = x / scale;
  y = y < -127.0f ? -127.0f : y;
  y = y > 127.0f ? 127.0f : y;
  return uint32_t(int32_t((y + 12582912.0f) - 12582912.0f)) & 0xffu;
}

// Four neighbouring channels of group / 4 lanes each: the codes of a row and their scales. All lanes go along.
template <int Lanes> CQSA_DEVICE void append_codes(const kv_params& p, int64_t from, int64_t to, int64_t scales, bool there, int lane) {
  const int team = p.group / 4;
  for (int64_t base = 0; base < p.head_dim; base += 4 * Lanes) {
    const int64_t c = base + 4 * lane;
    const float4x x = there ? load_four(p.x, from, c, p.head_dim) : float4x{{0.0f, 0.0f, 0.0f, 0.0f}};
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) most = larger_of(most, magnitude(x.x[i]));
    most = largest_among<Lanes>(most, CQSA_MUTANT(22) ? team / 2 : team);
    if (!there || c >= p.head_dim) continue;
    const bool wild = most >= infinite_bits;
    const uint32_t bits = wild ? 0x7e00u : scale_to_f16(float_of(most) / 127.0f);
    const float scale = CQSA_MUTANT(23) ? float_of(most) / 127.0f : f16_to_f32(uint16_t(bits));
    uint32_t codes = 0;
    if (!wild && bits != 0)
#pragma unroll
      for (int i = 0; i < 4; ++i) codes |= encode_code(x.x[i], scale) << 8 * i;
    if (p.pool.quads) {
      *reinterpret_cast<uint32_t*>(p.pool.data + to + c) = codes;
    } else {
      for (int i = 0; i < 4 && c + i < p.head_dim; ++i) p.pool.data[to + (c + i) * p.pool.stride[3]] = char(codes >> 8 * i);
    }
    if (lane % team == 0) store_u16(p.scale.data + 2 * (scales + c / p.group * p.scale.stride[3]), bits);
  }
}

// A row of a head for every Lanes threads; elements and int8.
template <int Lanes> CQSA_DEVICE void kv_append_block(const kv_params& p) {
  const int lane = thread_index() % Lanes, each = block_threads() / Lanes;
  const int64_t units = p.rows * p.heads;
  for (int64_t unit = block_index_x() * each + thread_index() / Lanes; unit < units; unit += grid_size_x() * each) {
    const int64_t n = unit / p.heads, head = unit - n * p.heads;
    int64_t page = 0, row = 0;
    const bool there = find_cell(p, n, &page, &row);
    const int64_t from = offset_of(p.x, 0, head, n, 0), to = offset_of(p.pool, page, head, row, 0);
    if (p.pool.kind == kind_i8) {
      append_codes<Lanes>(p, from, to, offset_of(p.scale, page, head, row, 0), there, lane);
      continue;
    }
    for (int64_t c = 4 * lane; there && c < p.head_dim; c += 4 * Lanes) {
      if (p.x.kind == p.pool.kind) copy_four(p.x, from, p.pool, to, c, p.head_dim);
      else store_four(p.pool, to, c, p.head_dim, load_four(p.x, from, c, p.head_dim));
    }
  }
}

// ---- append, rotated --------------------------------------------------------------------------------------------------------

// Eight lanes have a block of 32 channels, four neighbours each. d and the codes of this lane's four.
template <int Lanes> CQSA_DEVICE uint32_t encode_block(const float4x& x, int lane, uint32_t* d_bits) {
  // Larger magnitudes win, then earlier channels.
  uint64_t best = 0;
  float m = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint64_t key = uint64_t(magnitude(x.x[i])) << 8 | uint32_t(31 - (4 * (lane & 7) + i));
    if (key > best) best = key, m = x.x[i];
  }
  const uint64_t mine = best;
  best = largest_among<Lanes>(best, 8);
  const uint32_t most = uint32_t(best >> 8);
  // The winner's value: its sign is all that the others do not know.
  const uint64_t winners = ballot<Lanes>(mine == best && bits_of(m) >> 31 != 0);
  m = float_of(most | uint32_t(winners >> (lane & ~7) & 0xffu ? most != 0 : 0) << 31);
  const float d = m / -8.0f;
  float inverse = 1.0f / d;
  if (magnitude(inverse) >= infinite_bits) inverse = 0;
  const bool wild = most >= infinite_bits;
  *d_bits = wild ? 0x7e00u : scale_to_f16(d);
  uint32_t codes = 0x08080808u;
  if (wild) return codes;
  codes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int code = int(CQSA_MUTANT(24) ? fma_f32(x.x[i], inverse, 8.0f) : fma_f32(x.x[i], inverse, 8.5f));
    codes |= uint32_t(code > 15 ? 15 : code) << 8 * i;
  }
  return codes;
}

// The eight lanes write their 18 bytes.
template <int Lanes> CQSA_DEVICE void store_block(char* to, uint32_t d, uint32_t codes, int lane, bool there) {
  const uint32_t bytes = codes | shuffle_xor<Lanes>(codes, 4) << 4, part = lane & 7;
  if (!there || part >= 4) return;
  if (part == 0) store_u16(to, d);
  store_u16(to + 2 + 4 * part, bytes);
  store_u16(to + 4 + 4 * part, bytes >> 16);
}

// A block takes some rows at a time; their number of fours is a multiple of its threads.
template <int Lanes> CQSA_DEVICE void kv_append_q4_block(const kv_params& p) {
  float* const values = reinterpret_cast<float*>(shared_memory());
  const int n = 1 << p.n_shift, fours_shift = p.n_shift - 2, fours = 1 << (p.rows_shift + fours_shift);
  const int lane = thread_index() % Lanes;
  const int64_t rows_each = int64_t(1) << p.rows_shift, units = p.rows * p.heads;
  for (int64_t first = block_index_x() * rows_each; first < units; first += grid_size_x() * rows_each) {
    for (int i = thread_index(); i < fours; i += block_threads()) {
      const int64_t unit = first + (i >> fours_shift);
      const int c = (i & ((1 << fours_shift) - 1)) * 4;
      float4x four = {{0.0f, 0.0f, 0.0f, 0.0f}};
      if (unit < units) four = load_four(p.x, offset_of(p.x, 0, unit % p.heads, unit / p.heads, 0), c, n);
      put_four(values, (i >> fours_shift << p.n_shift) + c, 4, four);
    }
    barrier();
    rotate_rows(values, p.rows_shift + p.n_shift, p.n_shift);
    // No barrier behind this loop: a thread puts its next values where it has taken these.
    for (int i = thread_index(); i < fours; i += block_threads()) {
      const int64_t unit = first + (i >> fours_shift);
      const int c = (i & ((1 << fours_shift) - 1)) * 4;
      int64_t page = 0, row = 0;
      const bool there = unit < units && find_cell(p, unit / p.heads, &page, &row);
      uint32_t d = 0;
      const uint32_t codes = encode_block<Lanes>(take_four(values, (i >> fours_shift << p.n_shift) + c, 4, p.factor), lane, &d);
      store_block<Lanes>(p.pool.data + offset_of(p.pool, page, unit % p.heads, row, 0) + c / 32 * 18, d, codes, lane, there);
    }
  }
}

// ---- gather -----------------------------------------------------------------------------------------------------------------

CQSA_DEVICE float4x decode_four(const char* block, int part) {
  const float d = f16_to_f32(uint16_t(load_u16(block)));
  float4x out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t byte = reinterpret_cast<const unsigned char*>(block)[2 + (4 * part + i) % 16];
    out.x[i] = d * float(int(part < 4 ? byte & 15u : byte >> 4) - 8);
  }
  return out;
}

template <int Lanes> CQSA_DEVICE void gather_unit(const kv_params& p, int64_t to, int64_t page, int64_t head, int64_t row, int lane) {
  const int64_t from = offset_of(p.pool, page, head, row, 0), n = p.head_dim;
  const char* const scales = p.scale.data + 2 * offset_of(p.scale, page, head, row, 0);
  for (int64_t c = 4 * lane; c < n; c += 4 * Lanes) {
    if (p.pool.kind == p.x.kind) {
      copy_four(p.pool, from, p.x, to, c, n);
      continue;
    }
    float4x four;
    if (p.blocks) four = decode_four(p.pool.data + from + c / 32 * 18, int(c % 32 / 4));
    else four = load_four(p.pool, from, c, n);
    if (p.pool.kind == kind_i8) {
      const float scale = f16_to_f32(uint16_t(load_u16(scales + 2 * (c / p.group * p.scale.stride[3]))));
#pragma unroll
      for (int i = 0; i < 4; ++i) four.x[i] *= scale;
    }
    store_four(p.x, to, c, n, four);
  }
}

template <int Lanes> CQSA_DEVICE void kv_gather_block(const kv_params& p) {
  const int lane = thread_index() % Lanes, each = block_threads() / Lanes;
  const int64_t units = p.rows * p.heads;
  for (int64_t unit = block_index_x() * each + thread_index() / Lanes; unit < units; unit += grid_size_x() * each) {
    const int64_t n = unit / p.heads, head = unit - n * p.heads, to = offset_of(p.x, 0, head, n, 0);
    int64_t page = 0, row = 0;
    if (find_cell(p, n, &page, &row)) {
      gather_unit<Lanes>(p, to, page, head, row, lane);
      continue;
    }
    for (int64_t c = 4 * lane; c < p.head_dim; c += 4 * Lanes) store_four(p.x, to, c, p.head_dim, {{0.0f, 0.0f, 0.0f, 0.0f}});
  }
}

}  // namespace cqsa::gpu
