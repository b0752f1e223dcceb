// SPDX-License-Identifier: Apache-2.0
// Rows of any element type and stride to rows of f32 and back. The loops are plain: the compiler vectorises them for the
// flags of the file that includes this. Only f16 needs the target's own instruction.
#pragma once

#include "attention_job.h"
#include "simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cqsa::cpu {
namespace {
namespace HWY_NAMESPACE {

static inline int64_t element_bytes(cqsa_dtype t) { return ((t >> 8) & 0xff) / 8; }
static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

// Address of an element of a view.
static inline const char* at(const cqsa_view& x, int64_t b, int64_t h, int64_t row, int64_t c) {
  return (const char*)x.data +
         (b * x.stride[0] + h * x.stride[1] + row * x.stride[2] + c * x.stride[3]) * element_bytes(x.dtype);
}

// n elements, `stride` elements apart, to a compact array.
static inline void gather_elements(const char* from, int64_t stride, int64_t bytes, int64_t n, char* to) {
  if (stride == 1) {
    memcpy(to, from, size_t(n * bytes));
    return;
  }
  const int64_t step = stride * bytes;
  if (bytes == 4) for (int64_t i = 0; i < n; ++i) memcpy(to + 4 * i, from + step * i, 4);
  else if (bytes == 2) for (int64_t i = 0; i < n; ++i) memcpy(to + 2 * i, from + step * i, 2);
  else if (bytes == 1) for (int64_t i = 0; i < n; ++i) to[i] = from[step * i];
  else for (int64_t i = 0; i < n; ++i) memcpy(to + bytes * i, from + step * i, size_t(bytes));
}

static inline void scatter_elements(const char* from, int64_t stride, int64_t bytes, int64_t n, char* to) {
  if (stride == 1) {
    memcpy(to, from, size_t(n * bytes));
    return;
  }
  const int64_t step = stride * bytes;
  if (bytes == 4) for (int64_t i = 0; i < n; ++i) memcpy(to + step * i, from + 4 * i, 4);
  else for (int64_t i = 0; i < n; ++i) memcpy(to + step * i, from + 2 * i, 2);
}

// The formats with a sign bit, exponent, mantissa from top to bottom: move the magnitude up to where f32 has it, then
// multiply by the difference of the biases, which also makes subnormals right; the topmost codes are Inf or NaN.
static inline void widen(uint32_t mag, uint32_t sign, int shift, float factor, uint32_t special, uint32_t special_bits,
                         float* out) {
  const uint32_t up = mag << shift;
  float f;
  memcpy(&f, &up, 4);
  f *= factor;
  uint32_t bits;
  memcpy(&bits, &f, 4);
  bits |= (mag >= special ? special_bits : 0) | sign;
  memcpy(out, &bits, 4);
}

static inline void from_f16(const uint16_t* HWY_RESTRICT from, int64_t n, float* HWY_RESTRICT to) {
  int64_t i = 0;
#if !defined(CQSA_PLAIN_VECTORS)
  const hn::Rebind<hwy::float16_t, df_t> dh;
  for (; i + lanes <= n; i += lanes) storeu(hn::PromoteTo(df, hn::LoadU(dh, (const hwy::float16_t*)(from + i))), to + i);
#endif
  for (; i < n; ++i)
    widen(from[i] & 0x7fffu, uint32_t(from[i] & 0x8000u) << 16, 13, 0x1p112f, 0x7c00u, 0x7f800000u, to + i);
}

static inline void from_bf16(const uint16_t* HWY_RESTRICT from, int64_t n, float* HWY_RESTRICT to) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = uint32_t(from[i]) << 16;
    memcpy(to + i, &bits, 4);
  }
}

static inline void from_i8(const int8_t* HWY_RESTRICT from, int64_t n, float* HWY_RESTRICT to) {
  for (int64_t i = 0; i < n; ++i) to[i] = float(from[i]);
}

static inline void from_e4m3(const uint8_t* HWY_RESTRICT from, int64_t n, float* HWY_RESTRICT to) {
  for (int64_t i = 0; i < n; ++i)
    widen(from[i] & 0x7fu, uint32_t(from[i] & 0x80u) << 24, 20, 0x1p120f, 0x7fu, 0x7fc00000u, to + i);
}

static inline void from_e5m2(const uint8_t* HWY_RESTRICT from, int64_t n, float* HWY_RESTRICT to) {
  for (int64_t i = 0; i < n; ++i)
    widen(from[i] & 0x7fu, uint32_t(from[i] & 0x80u) << 24, 21, 0x1p112f, 0x7cu, 0x7f800000u, to + i);
}

// n elements to f32. raw: room for n elements.
static void load_row(const char* from, cqsa_dtype type, int64_t stride, int64_t n, char* raw, float* to) {
  const int64_t bytes = element_bytes(type);
  if (type == CQSA_DTYPE_F32) {
    gather_elements(from, stride, 4, n, (char*)to);
    return;
  }
  const char* packed = from;
  if (stride != 1 || (uintptr_t(from) & uintptr_t(bytes - 1)) != 0) {
    gather_elements(from, stride, bytes, n, raw);
    packed = raw;
  }
  switch (type) {
    case CQSA_DTYPE_F16: from_f16((const uint16_t*)packed, n, to); break;
    case CQSA_DTYPE_BF16: from_bf16((const uint16_t*)packed, n, to); break;
    case CQSA_DTYPE_I8: from_i8((const int8_t*)packed, n, to); break;
    case CQSA_DTYPE_E4M3FN: from_e4m3((const uint8_t*)packed, n, to); break;
    case CQSA_DTYPE_E5M2: from_e5m2((const uint8_t*)packed, n, to); break;
    default: from_i8((const int8_t*)packed, n, to); break;  // bool, u8: only zero or not matters
  }
}

static inline void to_f16(const float* from, int64_t n, const scalar_ops* ops, uint16_t* to) {
  int64_t i = 0;
#if !defined(CQSA_PLAIN_VECTORS)
  const hn::Rebind<hwy::float16_t, df_t> dh;
  for (; i + lanes <= n; i += lanes) hn::StoreU(hn::DemoteTo(dh, loadu(from + i)), dh, (hwy::float16_t*)(to + i));
#endif
  for (; i < n; ++i) to[i] = ops->f32_to_f16(from[i]);
}

// To nearest, ties to even; a NaN is made quiet so that cutting its payload cannot turn it into Inf.
static inline void to_bf16(const float* HWY_RESTRICT from, int64_t n, uint16_t* HWY_RESTRICT to) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    memcpy(&bits, from + i, 4);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    to[i] = uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
  }
}

// n f32 to a strided row of f32, f16 or bf16. raw: room for n elements.
static void store_row(const float* from, cqsa_dtype type, int64_t stride, int64_t n, const scalar_ops* ops, char* raw,
                      char* to) {
  if (type == CQSA_DTYPE_F32) {
    scatter_elements((const char*)from, stride, 4, n, to);
    return;
  }
  if (type == CQSA_DTYPE_F16) to_f16(from, n, ops, (uint16_t*)raw);
  else to_bf16(from, n, (uint16_t*)raw);
  scatter_elements(raw, stride, 2, n, to);
}

static inline float load_f32(const char* p) {
  float x;
  memcpy(&x, p, 4);
  return x;
}

// Scale of a whole key row: 1 where there is none or where it belongs to groups of channels.
static inline float row_scale(const cqsa_view& scale, int32_t kind, int64_t b, int64_t g, int64_t row) {
  switch (kind) {
    case CQSA_SCALE_TENSOR: return load_f32((const char*)scale.data);
    // A tensor of heads only: the axis it has is the head axis.
    case CQSA_SCALE_HEAD: return load_f32(at(scale, 0, g, 0, 0));
    case CQSA_SCALE_TOKEN: return load_f32(at(scale, b, g, row, 0));
    default: return 1.0f;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace
}  // namespace cqsa::cpu
HWY_AFTER_NAMESPACE();
