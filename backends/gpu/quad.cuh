// SPDX-License-Identifier: Apache-2.0
// Four neighbouring channels of a row at a time: at once where the view allows it (quads), one by one at any stride and address.
#pragma once

#include "element.cuh"

namespace cqsa::gpu {

constexpr uint32_t infinite_bits = 0x7f800000u;

// Which NaN comes out of an operation differs between machines.
CQSA_DEVICE float plain_nan(float x) { return (bits_of(x) & 0x7fffffffu) > infinite_bits ? float_of(0x7fc00000u) : x; }
CQSA_DEVICE uint32_t encode_u16(int kind, float x) {
  if ((bits_of(x) & 0x7fffffffu) > infinite_bits) return kind == kind_f16 ? 0x7e00u : 0x7fc0u;
  return kind == kind_f16 ? f32_to_f16(x) : f32_to_bf16(x);
}

// Channels c .. c + 3 of the n of a row whose first is element `row` of the view; zeros past the end.
CQSA_DEVICE float4x load_four(const gpu_view& x, int64_t row, int64_t c, int64_t n) {
  float4x out = {{0.0f, 0.0f, 0.0f, 0.0f}};
  if (c >= n) return out;
  if (x.quads) {
    with_kind<false>(x.kind, [&](auto kind) { out = decode_quad<kind.value>(load_quad<kind.value>(x.data, row + c)); });
    return out;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (c + i < n) out.x[i] = load_element(x.data, x.kind, row + (c + i) * x.stride[3]);
  return out;
}

// f32, f16 or bf16.
CQSA_DEVICE void store_four(const gpu_view& x, int64_t row, int64_t c, int64_t n, const float4x& value) {
  if (x.quads && c < n) {
    if (x.kind == kind_f32) {
      float4x plain;
#pragma unroll
      for (int i = 0; i < 4; ++i) plain.x[i] = plain_nan(value.x[i]);
      *reinterpret_cast<float4x*>(x.data + 4 * (row + c)) = plain;
    } else {
      word2x words;
#pragma unroll
      for (int i = 0; i < 2; ++i) words.x[i] = encode_u16(x.kind, value.x[2 * i]) | encode_u16(x.kind, value.x[2 * i + 1]) << 16;
      *reinterpret_cast<word2x*>(x.data + 2 * (row + c)) = words;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (c + i >= n) continue;
    const int64_t at = row + (c + i) * x.stride[3];
    if (x.kind == kind_f32) store_u32(x.data + 4 * at, bits_of(plain_nan(value.x[i])));
    else store_u16(x.data + 2 * at, encode_u16(x.kind, value.x[i]));
  }
}

// The bits of four elements of two or four bytes from one view to another of the same type.
CQSA_DEVICE void copy_four(const gpu_view& from, int64_t from_row, const gpu_view& to, int64_t to_row, int64_t c, int64_t n) {
  const bool wide = from.kind == kind_f32;
  if (from.quads && to.quads && c < n) {
    if (wide) *reinterpret_cast<word4x*>(to.data + 4 * (to_row + c)) = *reinterpret_cast<const word4x*>(from.data + 4 * (from_row + c));
    else *reinterpret_cast<word2x*>(to.data + 2 * (to_row + c)) = *reinterpret_cast<const word2x*>(from.data + 2 * (from_row + c));
    return;
  }
  for (int i = 0; i < 4 && c + i < n; ++i) {
    const int64_t a = from_row + (c + i) * from.stride[3], b = to_row + (c + i) * to.stride[3];
    if (wide) store_u32(to.data + 4 * b, load_u32(from.data + 4 * a));
    else store_u16(to.data + 2 * b, load_u16(from.data + 2 * a));
  }
}

}  // namespace cqsa::gpu
