// SPDX-License-Identifier: Apache-2.0
// Codes to numbers and sums to d, for every kernel of cqsa_fp8_gemm().
#pragma once

#include "element.cuh"
#include "fp8_gemm_params.h"

namespace cqsa::gpu {

// ------------------------------------------------------------------------------------------------------------- formats

// What tells the four formats apart; src/dtype.h is the oracle.
struct gemm_format {
  int32_t mantissa, bias;
  uint32_t largest;  // code of the largest finite number
  bool fnuz;
};
CQSA_DEVICE gemm_format gemm_format_of(int kind) {
  if (kind == gemm_e4m3fn) return {3, 7, 0x7e, false};
  if (kind == gemm_e5m2) return {2, 15, 0x7b, false};
  if (kind == gemm_e4m3fnuz) return {3, 8, 0x7f, true};
  return {2, 16, 0x7f, true};
}

CQSA_DEVICE float decode_fp8(uint32_t code, int kind) {
  const gemm_format f = gemm_format_of(kind);
  const uint32_t magnitude = code & 0x7fu, sign = (code & 0x80u) << 24;
  if (f.fnuz && code == 0x80u) return float_of(0x7fc00000u);
  if (!f.fnuz && magnitude > f.largest) return float_of(sign | 0x7f800000u | (kind == gemm_e5m2 ? (magnitude & 3u) << 21 | (magnitude & 3u ? 0x400000u : 0) : 0x400000u));
  // A product with a power of two makes subnormals right.
  const float value = float_of(magnitude << (23 - f.mantissa)) * float_of(uint32_t(254 - f.bias) << 23);
  return float_of(bits_of(value) | sign);
}

// To nearest, ties to even, saturated.
CQSA_DEVICE uint32_t encode_fp8(float x, int kind) {
  const gemm_format f = gemm_format_of(kind);
  const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
  if (magnitude > 0x7f800000u) return f.fnuz ? 0x80u : kind == gemm_e4m3fn ? sign | 0x7fu : sign | 0x7eu | (magnitude >> 21 & 3u);
  uint32_t m = magnitude & 0x7fffffu;
  int exponent = int(magnitude >> 23);
  if (exponent == 0) exponent = 1;
  else m |= 0x800000u;
  exponent += f.bias - 127;
  int shift = 23 - f.mantissa;
  if (exponent < 1) {
    shift = shift + 1 - exponent < 25 ? shift + 1 - exponent : 25;
    exponent = 1;
  }
  const uint32_t rest = m & ((1u << shift) - 1), half = 1u << (shift - 1);
  uint32_t code = m >> shift;
  code += rest > half || (rest == half && (code & 1u));
  code += uint32_t(exponent - 1) << f.mantissa;  // a carry moves into the exponent by itself
  if (code > f.largest) code = f.largest;
  return f.fnuz && code == 0 ? 0 : sign | code;
}

// ---------------------------------------------------------------------------------------------------------------- scales

// Those of a row. A division of 64 bits is a hundred instructions.
CQSA_DEVICE const float* scale_row(const gemm_scales& s, int64_t batch, int64_t row) {
  return s.data + batch * s.stride[0] + (s.stride[1] == 0 ? 0 : (s.rows == 1 ? row : row / s.rows) * s.stride[1]);
}
CQSA_DEVICE float scale_at(const gemm_scales& s, int64_t batch, int64_t row, int64_t k) {
  return s.data ? scale_row(s, batch, row)[k / gemm_promote * s.stride[2]] : 1.0f;
}

// ------------------------------------------------------------------------------------------------------------------ end

// d before its scale. `sum` has the scales of a and b.
CQSA_DEVICE float end_value(const gemm_end& e, int64_t batch, int64_t row, int64_t column, float sum) {
  float value = e.alpha * sum;
  if (e.c.data) value = fma_f32(e.beta, load_element(e.c.data, e.c.kind, batch * e.c.stride[0] + row * e.c.stride[1] + column * e.c.stride[2]), value);
  if (e.bias) value += load_element(e.bias, e.bias_kind, column * e.bias_stride);
  return value;
}

CQSA_DEVICE float scale_of_codes(const gemm_end& e) { return e.d.kind > gemm_bf16 && e.d_scale ? *e.d_scale : 1.0f; }

CQSA_DEVICE void store_end(const gemm_end& e, int64_t batch, int64_t row, int64_t column, float value, float d_scale) {
  const int64_t to = batch * e.d.stride[0] + row * e.d.stride[1] + column * e.d.stride[2];
  if (e.d.kind > gemm_bf16) e.d.data[to] = char(encode_fp8(product_f32(value, d_scale), e.d.kind));
  else store_element(e.d.data, e.d.kind, to, value);
}

// |d| as bits, of which the largest is the largest |d|, and NaN is larger than all.
CQSA_DEVICE uint32_t magnitude_bits(float value) { return bits_of(value) & 0x7fffffffu; }

// One of `tellers` threads of the launch tells the largest |d| that it knows of; the last one writes d_amax and leaves the ticket as it was. A
// workspace that nobody prepared shows as NaN.
CQSA_DEVICE void tell_amax(const gemm_end& e, uint32_t bits, uint32_t tellers) {
  if (*(e.ticket - gemm_ticket_word) != gemm_workspace_magic) {
    *e.d_amax = float_of(0x7fc00000u);
    return;
  }
  atomic_max(&e.ticket[0], bits);
  device_fence();
  if (atomic_add(&e.ticket[1], 1) != tellers - 1) return;
  device_fence();
  *e.d_amax = float_of(atomic_exchange(&e.ticket[0], 0));
  atomic_exchange(&e.ticket[1], 0);
}

}  // namespace cqsa::gpu
