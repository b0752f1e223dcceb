// SPDX-License-Identifier: Apache-2.0
// Elements of every type from and to global memory, one at a time at any address, or four at a time where they are aligned.
#pragma once

#include "attention_params.h"
#include "port_device.cuh"

// Lanes that run in lockstep; the harness says it for itself.
#ifndef CQSA_LANES
#if defined(__GFX9__)
#define CQSA_LANES 64
#else
#define CQSA_LANES 32
#endif
#endif

// Places where the SIMT harness damages a kernel to see that its tests notice.
#ifndef CQSA_MUTANT
#define CQSA_MUTANT(n) false
#endif

namespace cqsa::gpu {

struct alignas(16) float4x {
  float x[4];
};
static_assert(sizeof(float4x) == 16, "one 16-byte access");
struct alignas(8) float2x {
  float x[2];
};
struct alignas(16) word4x {
  uint32_t x[4];
};
struct alignas(8) word2x {
  uint32_t x[2];
};

CQSA_DEVICE float infinity() { return float_of(0x7f800000u); }

CQSA_DEVICE int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
CQSA_DEVICE int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }
CQSA_DEVICE int64_t clamp_i64(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

// Words that may stand at any address.
CQSA_DEVICE uint32_t load_u16(const char* from) {
  if ((uintptr_t(from) & 1) == 0) return *reinterpret_cast<const uint16_t*>(from);
  const unsigned char* b = reinterpret_cast<const unsigned char*>(from);
  return uint32_t(b[0]) | uint32_t(b[1]) << 8;
}
CQSA_DEVICE uint32_t load_u32(const char* from) {
  if ((uintptr_t(from) & 3) == 0) return *reinterpret_cast<const uint32_t*>(from);
  const unsigned char* b = reinterpret_cast<const unsigned char*>(from);
  return uint32_t(b[0]) | uint32_t(b[1]) << 8 | uint32_t(b[2]) << 16 | uint32_t(b[3]) << 24;
}
CQSA_DEVICE void store_u16(char* to, uint32_t bits) {
  if ((uintptr_t(to) & 1) == 0) {
    *reinterpret_cast<uint16_t*>(to) = uint16_t(bits);
    return;
  }
  to[0] = char(bits);
  to[1] = char(bits >> 8);
}
CQSA_DEVICE void store_u32(char* to, uint32_t bits) {
  if ((uintptr_t(to) & 3) == 0) {
    *reinterpret_cast<uint32_t*>(to) = bits;
    return;
  }
  for (int i = 0; i < 4; ++i) to[i] = char(bits >> 8 * i);
}
// Element i of an array of i32 or i64.
CQSA_DEVICE int64_t load_index(const void* array, int bytes, int64_t i) {
  const char* from = static_cast<const char*>(array) + i * bytes;
  if (bytes == 4) return int32_t(load_u32(from));
  return int64_t(uint64_t(load_u32(from)) | uint64_t(load_u32(from + 4)) << 32);
}

CQSA_DEVICE float bf16_to_f32(uint32_t bits) { return float_of(bits << 16); }
// To nearest, ties to even; a NaN is made quiet so that cutting its payload cannot turn it into Inf.
CQSA_DEVICE uint32_t f32_to_bf16(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bits >> 16 | 0x40u;
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
// Moves the magnitude up to where f32 has it and multiplies by the difference of the biases, which makes subnormals right
// too; the topmost codes are Inf or NaN.
CQSA_DEVICE float e4m3_to_f32(uint32_t code) {
  const uint32_t mag = code & 0x7fu;
  const float f = float_of(mag << 20) * 0x1p120f;
  return float_of((mag == 0x7fu ? 0x7fc00000u : bits_of(f)) | (code & 0x80u) << 24);
}
CQSA_DEVICE float e5m2_to_f32(uint32_t code) {
  const uint32_t mag = code & 0x7fu;
  const float f = float_of(mag << 21) * 0x1p112f;
  return float_of(bits_of(f) | (mag >= 0x7cu ? 0x7f800000u : 0u) | (code & 0x80u) << 24);
}

CQSA_DEVICE float decode_u8(uint32_t code, int kind) {
  if (kind == kind_i8) return float(int8_t(uint8_t(code)));
  if (kind == kind_e4m3) return e4m3_to_f32(code);
  if (kind == kind_e5m2) return e5m2_to_f32(code);
  return float(code);
}

CQSA_DEVICE int bytes_of(int kind) { return kind == kind_f32 ? 4 : kind <= kind_bf16 ? 2 : 1; }

// Element number i of an array, at any alignment.
CQSA_DEVICE float load_element(const char* data, int kind, int64_t i) {
  if (kind == kind_f32) return float_of(load_u32(data + 4 * i));
  if (kind == kind_f16) return f16_to_f32(uint16_t(load_u16(data + 2 * i)));
  if (kind == kind_bf16) return bf16_to_f32(load_u16(data + 2 * i));
  return decode_u8(reinterpret_cast<const unsigned char*>(data)[i], kind);
}

CQSA_DEVICE void store_element(char* data, int kind, int64_t i, float value) {
  if (kind == kind_f32) store_u32(data + 4 * i, bits_of(value));
  else store_u16(data + 2 * i, kind == kind_f16 ? f32_to_f16(value) : f32_to_bf16(value));
}

CQSA_DEVICE int64_t offset_of(const gpu_view& x, int64_t b, int64_t h, int64_t row, int64_t c) {
  return b * x.stride[0] + h * x.stride[1] + row * x.stride[2] + c * x.stride[3];
}

// Four neighbouring elements as they are stored; all bits zero is four zeros in every type.
template <int Kind> struct stored_quad {
  uint32_t x[Kind == kind_f32 ? 4 : Kind <= kind_bf16 ? 2 : 1];
};

template <int Kind> CQSA_DEVICE stored_quad<Kind> load_quad(const char* data, int64_t i) {
  stored_quad<Kind> out;
  if constexpr (Kind == kind_f32) {
    const word4x w = *reinterpret_cast<const word4x*>(data + 4 * i);
    for (int n = 0; n < 4; ++n) out.x[n] = w.x[n];
  } else if constexpr (Kind <= kind_bf16) {
    const word2x w = *reinterpret_cast<const word2x*>(data + 2 * i);
    for (int n = 0; n < 2; ++n) out.x[n] = w.x[n];
  } else {
    out.x[0] = *reinterpret_cast<const uint32_t*>(data + i);
  }
  return out;
}

template <int Kind> CQSA_DEVICE stored_quad<Kind> zero_quad() {
  stored_quad<Kind> out;
  for (uint32_t& word : out.x) word = 0;
  return out;
}

template <int Kind> CQSA_DEVICE float4x decode_quad(const stored_quad<Kind>& q) {
  float4x out;
  for (int n = 0; n < 4; ++n) {
    if constexpr (Kind == kind_f32) out.x[n] = float_of(q.x[n]);
    else if constexpr (Kind == kind_f16) out.x[n] = f16_to_f32(uint16_t(q.x[n / 2] >> 16 * (n & 1)));
    else if constexpr (Kind == kind_bf16) out.x[n] = bf16_to_f32(q.x[n / 2] >> 16 * (n & 1) & 0xffffu);
    else out.x[n] = decode_u8(q.x[0] >> 8 * n & 0xffu, Kind);
  }
  return out;
}

// Calls f(kind as a type's constant): one test per panel instead of one per element.
template <int Kind> struct kind_constant {
  static constexpr int value = Kind;
};
template <bool FloatsOnly, class F> CQSA_DEVICE void with_kind(int kind, const F& f) {
  if (kind == kind_f32) f(kind_constant<kind_f32>());
  else if (kind == kind_f16) f(kind_constant<kind_f16>());
  else if (kind == kind_bf16) f(kind_constant<kind_bf16>());
  if constexpr (!FloatsOnly) {
    if (kind == kind_i8) f(kind_constant<kind_i8>());
    else if (kind == kind_e4m3) f(kind_constant<kind_e4m3>());
    else if (kind == kind_e5m2) f(kind_constant<kind_e5m2>());
  }
}

}  // namespace cqsa::gpu
