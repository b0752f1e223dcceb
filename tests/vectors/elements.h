// SPDX-License-Identifier: Apache-2.0
// Element types for tests: names, sizes, and conversion one element at a time, written for clarity and apart from the library.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cqsa.h"

namespace vectors {

struct element_type {
  const char* name;
  cqsa_dtype dtype;
  int64_t bytes;
  int exponent_bits, mantissa_bits;  // of the small float types, otherwise 0
};

inline constexpr element_type element_types[] = {
    {"f64", CQSA_DTYPE_F64, 8, 0, 0},   {"f32", CQSA_DTYPE_F32, 4, 0, 0},       {"f16", CQSA_DTYPE_F16, 2, 5, 10},
    {"bf16", CQSA_DTYPE_BF16, 2, 8, 7}, {"e4m3fn", CQSA_DTYPE_E4M3FN, 1, 4, 3}, {"e5m2", CQSA_DTYPE_E5M2, 1, 5, 2},
    {"i8", CQSA_DTYPE_I8, 1, 0, 0},     {"i32", CQSA_DTYPE_I32, 4, 0, 0},       {"i64", CQSA_DTYPE_I64, 8, 0, 0},
    {"bool", CQSA_DTYPE_BOOL, 1, 0, 0}, {"u8", CQSA_DTYPE_U8, 1, 0, 0},
};

inline const element_type& type_named(const std::string& name) {
  for (const element_type& type : element_types)
    if (name == type.name) return type;
  throw std::runtime_error("unknown type " + name);
}

inline const element_type& type_of(cqsa_dtype dtype) {
  for (const element_type& type : element_types)
    if (dtype == type.dtype) return type;
  throw std::runtime_error("unknown type");
}

// A finite value within the type's range rounded to nearest even, or NaN.
inline uint32_t encode_small(double value, const element_type& type) {
  if (std::isnan(value)) return (1u << (type.exponent_bits + type.mantissa_bits)) - 1;
  const int lowest = 2 - (1 << (type.exponent_bits - 1));  // exponent of the smallest normal number
  const double size = std::fabs(value);
  int exponent = lowest;
  if (size != 0) {
    std::frexp(size, &exponent);
    exponent = std::max(exponent - 1, lowest);
  }
  const double units = std::nearbyint(std::ldexp(size, type.mantissa_bits - exponent));
  const uint32_t code = (static_cast<uint32_t>(exponent - lowest) << type.mantissa_bits) + static_cast<uint32_t>(units);
  return code | (std::signbit(value) ? 1u << (type.exponent_bits + type.mantissa_bits) : 0u);
}

inline double decode_small(uint32_t code, const element_type& type) {
  const int lowest = 2 - (1 << (type.exponent_bits - 1));
  const int top = (1 << type.exponent_bits) - 1;
  const int exponent = static_cast<int>(code >> type.mantissa_bits) & top;
  const int mantissa = static_cast<int>(code & ((1u << type.mantissa_bits) - 1));
  const int hidden = exponent == 0 ? 0 : 1 << type.mantissa_bits;
  double size = std::ldexp(mantissa + hidden, std::max(exponent, 1) - 1 + lowest - type.mantissa_bits);
  if (type.dtype == CQSA_DTYPE_E4M3FN) {
    if ((code & 0x7F) == 0x7F) size = std::nan("");
  } else if (exponent == top) {
    size = mantissa == 0 ? HUGE_VAL : std::nan("");
  }
  return code >> (type.exponent_bits + type.mantissa_bits) ? -size : size;
}

template <class T>
void put(unsigned char* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

template <class T>
T get(const unsigned char* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

inline void store(unsigned char* at, const element_type& type, double value) {
  switch (type.dtype) {
    case CQSA_DTYPE_F64: return put(at, value);
    case CQSA_DTYPE_F32: return put(at, static_cast<float>(value));
    case CQSA_DTYPE_I64: return put(at, static_cast<int64_t>(value));
    case CQSA_DTYPE_I32: return put(at, static_cast<int32_t>(value));
    case CQSA_DTYPE_I8: return put(at, static_cast<int8_t>(value));
    case CQSA_DTYPE_U8:
    case CQSA_DTYPE_BOOL: return put(at, static_cast<uint8_t>(value));
  }
  const uint32_t code = encode_small(value, type);
  type.bytes == 2 ? put(at, static_cast<uint16_t>(code)) : put(at, static_cast<uint8_t>(code));
}

inline double load(const unsigned char* at, const element_type& type) {
  switch (type.dtype) {
    case CQSA_DTYPE_F64: return get<double>(at);
    case CQSA_DTYPE_F32: return get<float>(at);
    case CQSA_DTYPE_I64: return static_cast<double>(get<int64_t>(at));
    case CQSA_DTYPE_I32: return get<int32_t>(at);
    case CQSA_DTYPE_I8: return get<int8_t>(at);
    case CQSA_DTYPE_U8:
    case CQSA_DTYPE_BOOL: return get<uint8_t>(at);
  }
  return decode_small(type.bytes == 2 ? get<uint16_t>(at) : get<uint8_t>(at), type);
}

// Element n of the sequence of a seed, as README.md defines it.
inline uint64_t splitmix64(uint64_t seed, uint64_t n) {
  uint64_t z = seed + (n + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// In [-1, 1), exact in f32.
inline float uniform(uint64_t z) { return static_cast<float>(z >> 40) * 0x1p-23f - 1.0f; }

}  // namespace vectors
