// SPDX-License-Identifier: Apache-2.0
// Chunks of q, k and v from global memory to f32 panels in shared memory.
//
// q and k are transposed on the way (line = channel), so that a thread reads the rows it multiplies sixteen bytes at a time; v is
// not (line = key). Eight neighbouring threads take 32 channels of a row: global memory is read in runs.
#pragma once

#include "attention_block.cuh"

namespace cqsa::gpu {

// The three operands, by number so that which one it is costs nothing at run time.
enum operand { operand_q, operand_k, operand_v };

template <int Which> CQSA_DEVICE const gpu_view& view_of(const attention_params& p) {
  if constexpr (Which == operand_q) return p.q;
  else if constexpr (Which == operand_k) return p.k;
  else return p.v;
}
template <int Which, int Dv> CQSA_DEVICE const int64_t* offsets_of(const block_memory<Dv>& mem) {
  return Which == operand_q ? mem.row_offset() : mem.key_offset(Which == operand_k ? 0 : 1);
}
template <int Which> CQSA_DEVICE bool has_groups(const attention_params& p) {
  return Which != operand_q && (Which == operand_k ? p.scale_k : p.scale_v) == scale_per_group;
}

// Loads of sixteen bytes that a thread has in flight: as many as there are registers for beside the sums.
template <int Dv> constexpr int most_loads = Dv <= 64 ? 4 : 2;

// Only eight-bit types are read four at a time together with scales.
template <int Kind> constexpr bool has_scales = Kind >= kind_i8;

// What channel c of a row is multiplied with: of q the scale of the logits. Rows that are not there hold zeros, and are not asked.
template <int Which, int Dv>
CQSA_DEVICE float scale_at(const attention_params& p, const block_memory<Dv>& mem, int row, int c) {
  if constexpr (Which == operand_q) {
    return p.softmax_scale;
  } else {
    const float whole = mem.key_scale(Which == operand_k ? 0 : 1)[row];
    if (!has_groups<Which>(p)) return whole;
    const gpu_view& s = Which == operand_k ? p.k_scale : p.v_scale;
    return f16_to_f32(uint16_t(load_u16(s.data + 2 * (mem.key_offset(Which == operand_k ? 2 : 3)[row] + c / p.kv_group * s.stride[3]))));
  }
}

// Channels c0 .. c0 + 31 of `Rows` rows, transposed. head_dim is a multiple of four here.
template <int Kind, int Which, int Rows, int Dv>
CQSA_DEVICE void load_transposed_quads(const attention_params& p, const block_memory<Dv>& mem, int c0, float* to) {
  constexpr int passes = Rows / 32, batch = passes < most_loads<Dv> ? passes : most_loads<Dv>;
  const int t = thread_index(), line = (t & 7) * 4, row0 = t >> 3;
  const int c = c0 + line;
  if (c >= p.head_dim) return;
  const int64_t* offset = offsets_of<Which>(mem);
  const char* data = view_of<Which>(p).data;
  const int at0 = panel_index(Rows, line, CQSA_MUTANT(2) ? row0 ^ 1 : row0);
#pragma unroll
  for (int first = 0; first < passes; first += batch) {
    stored_quad<Kind> raw[batch];
#pragma unroll
    for (int n = 0; n < batch; ++n) {
      const int64_t at = offset[row0 + 32 * (first + n)];
      raw[n] = at == no_row ? zero_quad<Kind>() : load_quad<Kind>(data, at + c);
    }
#pragma unroll
    for (int n = 0; n < batch; ++n) {
      const int row = row0 + 32 * (first + n);
      const float4x x = decode_quad<Kind>(raw[n]);
      float scale = 1.0f;
      if (Which == operand_q || has_scales<Kind>) scale = has_groups<Which>(p) && offset[row] == no_row ? 0.0f : scale_at<Which>(p, mem, row, c);
#pragma unroll
      for (int i = 0; i < 4; ++i) to[at0 + i * Rows + 32 * (first + n)] = x.x[i] * scale;
    }
  }
}

// The same for any stride, length and alignment. Channels past the end are zero up to the next multiple of four.
template <int Which, int Rows, int Dv>
CQSA_DEVICE void load_transposed_elements(const attention_params& p, const block_memory<Dv>& mem, int c0, float* to) {
  const gpu_view& x = view_of<Which>(p);
  const int left = (p.head_dim - c0 + 3) / 4 * 4;
#pragma unroll 1
  for (int n = thread_index(); n < Rows * 32; n += block_threads()) {
    const int line = n & 31, row = n >> 5, c = c0 + line;
    if (line >= left) continue;
    const int64_t at = offsets_of<Which>(mem)[row];
    float value = 0.0f;
    if (at != no_row && c < p.head_dim)
      value = load_element(x.data, x.kind, at + c * x.stride[3]) * scale_at<Which>(p, mem, row, c);
    to[panel_index(Rows, line, row)] = value;
  }
}

template <int Which, int Rows, int Dv>
CQSA_DEVICE void load_transposed(const attention_params& p, const block_memory<Dv>& mem, int c0, float* to) {
  const gpu_view& x = view_of<Which>(p);
  if (!x.quads) {
    load_transposed_elements<Which, Rows>(p, mem, c0, to);
    return;
  }
  with_kind<Which == operand_q>(x.kind, [&](auto kind) { load_transposed_quads<decltype(kind)::value, Which, Rows>(p, mem, c0, to); });
}

// Keys n0 .. n0 + v_keys - 1 of v, `Dv` channels each; keys and channels past the end are zero. True when an element is NaN or Inf.
template <int Kind, int Dv> CQSA_DEVICE bool load_values_quads(const attention_params& p, const block_memory<Dv>& mem, int n0) {
  constexpr int across = Dv / 4, down = 256 / across, passes = attention_shape<Dv>::v_keys / down;
  constexpr int batch = passes < most_loads<Dv> ? passes : most_loads<Dv>;
  const int t = thread_index(), c = t % across * 4, key0 = t / across;
  const int64_t* offset = offsets_of<operand_v>(mem) + n0;
  float probe = 0.0f;
#pragma unroll
  for (int first = 0; first < passes; first += batch) {
    stored_quad<Kind> raw[batch];
#pragma unroll
    for (int n = 0; n < batch; ++n) {
      const int64_t at = offset[key0 + (first + n) * down];
      raw[n] = at == no_row || c >= p.head_dim_v ? zero_quad<Kind>() : load_quad<Kind>(p.v.data, at + c);
    }
#pragma unroll
    for (int n = 0; n < batch; ++n) {
      const int key = key0 + (first + n) * down;
      float scale = 1.0f;
      if (has_scales<Kind>) {
        const bool there = c < p.head_dim_v && !(has_groups<operand_v>(p) && offset[key] == no_row);
        scale = there ? scale_at<operand_v>(p, mem, n0 + key, c) : 0.0f;
      }
      float4x x = decode_quad<Kind>(raw[n]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x.x[i] *= scale;
        probe = fma_f32(x.x[i], 0.0f, probe);
      }
      *reinterpret_cast<float4x*>(mem.panel() + key * Dv + c) = x;
    }
  }
  return probe != probe;
}

template <int Dv> CQSA_DEVICE bool load_values_elements(const attention_params& p, const block_memory<Dv>& mem, int n0) {
  float probe = 0.0f;
#pragma unroll 1
  for (int n = thread_index(); n < attention_shape<Dv>::v_keys * Dv; n += block_threads()) {
    const int c = n % Dv, key = n0 + n / Dv;
    const int64_t at = offsets_of<operand_v>(mem)[key];
    float value = 0.0f;
    if (at != no_row && c < p.head_dim_v)
      value = load_element(p.v.data, p.v.kind, at + c * p.v.stride[3]) * scale_at<operand_v>(p, mem, key, c);
    probe = fma_f32(value, 0.0f, probe);
    mem.panel()[n] = value;
  }
  return probe != probe;
}

template <int Dv> CQSA_DEVICE bool load_values(const attention_params& p, const block_memory<Dv>& mem, int n0) {
  if (!p.v.quads) return load_values_elements<Dv>(p, mem, n0);
  bool bad = false;
  with_kind<false>(p.v.kind, [&](auto kind) { bad = load_values_quads<decltype(kind)::value, Dv>(p, mem, n0); });
  return bad;
}

}  // namespace cqsa::gpu
