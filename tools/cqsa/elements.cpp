// SPDX-License-Identifier: Apache-2.0
#include "elements.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#include <fmt/format.h>

namespace tool {
namespace {

constexpr element_type kTypes[] = {
    {CQSA_DTYPE_F64, "f64", "F64", "<f8", 8},
    {CQSA_DTYPE_F32, "f32", "F32", "<f4", 4},
    {CQSA_DTYPE_F16, "f16", "F16", "<f2", 2},
    {CQSA_DTYPE_BF16, "bf16", "BF16", nullptr, 2},
    {CQSA_DTYPE_E4M3FN, "e4m3fn", "F8_E4M3", nullptr, 1},
    {CQSA_DTYPE_E5M2, "e5m2", "F8_E5M2", nullptr, 1},
    {CQSA_DTYPE_I64, "i64", "I64", "<i8", 8},
    {CQSA_DTYPE_I32, "i32", "I32", "<i4", 4},
    {CQSA_DTYPE_I8, "i8", "I8", "|i1", 1},
    {CQSA_DTYPE_U8, "u8", "U8", "|u1", 1},
    {CQSA_DTYPE_BOOL, "bool", "BOOL", "|b1", 1},
    // Only so that a file that holds them beside q, k and v can be read.
    {CQSA_DTYPE_NONE, "u64", "U64", nullptr, 8},
    {CQSA_DTYPE_NONE, "u32", "U32", nullptr, 4},
    {CQSA_DTYPE_NONE, "u16", "U16", nullptr, 2},
    {CQSA_DTYPE_NONE, "i16", "I16", nullptr, 2},
    {CQSA_DTYPE_NONE, "e8m0fnu", "F8_E8M0", nullptr, 1},
    {CQSA_DTYPE_NONE, "e4m3fnuz", "F8_E4M3FNUZ", nullptr, 1},
    {CQSA_DTYPE_NONE, "e5m2fnuz", "F8_E5M2FNUZ", nullptr, 1},
};

// 2^exponent: what ldexp(1, exponent) is, without the call. Millions of operands are made of it.
double power_of_two(int exponent) {
  if (exponent < -1022 || exponent > 1023) return std::ldexp(1.0, exponent);
  return std::bit_cast<double>(static_cast<uint64_t>(exponent + 1023) << 52);
}

// What ilogb() is of a finite value above 0.
int exponent_of(double value) {
  const auto biased = static_cast<int>(std::bit_cast<uint64_t>(value) >> 52 & 0x7FF);
  return biased == 0 ? std::ilogb(value) : biased - 1023;
}

// Layout of a small floating-point type.
struct float_layout {
  int exponent_bits, mantissa_bits, bias;
  bool has_infinity;  // false (e4m3fn): the top exponent holds numbers, and only its last code is NaN
  double largest;     // finite
};
constexpr float_layout kF16{5, 10, 15, true, 65504};
constexpr float_layout kBf16{8, 7, 127, true, 0x1.FEp127};
constexpr float_layout kE4m3fn{4, 3, 7, false, 448};
constexpr float_layout kE5m2{5, 2, 15, true, 57344};

double decode_small(unsigned code, float_layout layout) {
  const int m = layout.mantissa_bits;
  const unsigned top = (1u << layout.exponent_bits) - 1;
  const unsigned mantissa = code & ((1u << m) - 1);
  const unsigned exponent = code >> m & top;
  const double sign = code >> (m + layout.exponent_bits) & 1 ? -1.0 : 1.0;
  if (exponent == top && layout.has_infinity)
    return mantissa ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  if (exponent == top && mantissa == (1u << m) - 1) return std::numeric_limits<double>::quiet_NaN();
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - layout.bias - m);
  return sign * std::ldexp(mantissa + (1u << m), static_cast<int>(exponent) - layout.bias - m);
}

// The code of a value that the type has.
unsigned encode_small(double value, float_layout layout) {
  const int m = layout.mantissa_bits;
  const unsigned sign = std::signbit(value) ? 1u << (m + layout.exponent_bits) : 0;
  const unsigned top = ((1u << layout.exponent_bits) - 1) << m;
  if (std::isnan(value)) return top | ((1u << m) - 1);
  if (std::isinf(value)) return sign | top;
  const double size = std::fabs(value);
  if (size < power_of_two(1 - layout.bias)) return sign | static_cast<unsigned>(size * power_of_two(layout.bias - 1 + m));
  const int exponent = exponent_of(size);
  const auto mantissa = static_cast<unsigned>(size * power_of_two(m - exponent)) - (1u << m);
  return sign | static_cast<unsigned>(exponent + layout.bias) << m | mantissa;
}

// What round_to() and then encode_small() say, in one go where the result is an ordinary number, as nearly all are: the bits of a double
// from the exponent on, cut to the mantissa's length (ties to even) and moved to the type's bias.
unsigned encode_rounded(cqsa_dtype dtype, double value, float_layout layout) {
  const double size = std::fabs(value), smallest = power_of_two(1 - layout.bias);
  if (!(size >= smallest && size <= layout.largest)) return encode_small(round_to(dtype, value), layout);
  const int m = layout.mantissa_bits, cut = 52 - m;
  const auto bits = std::bit_cast<uint64_t>(size);
  const uint64_t rounded = (bits + (uint64_t{1} << (cut - 1)) - 1 + (bits >> cut & 1)) >> cut;
  const unsigned sign = std::signbit(value) ? 1u << (m + layout.exponent_bits) : 0;
  return sign | static_cast<unsigned>(rounded - (static_cast<uint64_t>(1023 - layout.bias) << m));
}

// All values of a type of at most 16 bits; floats hold them exactly.
std::vector<float> make_table(float_layout layout) {
  std::vector<float> table(std::size_t{1} << (1 + layout.exponent_bits + layout.mantissa_bits));
  for (std::size_t code = 0; code < table.size(); ++code)
    table[code] = static_cast<float>(decode_small(static_cast<unsigned>(code), layout));
  return table;
}

const float* table_of(cqsa_dtype dtype) {
  static const std::vector<float> f16 = make_table(kF16), bf16 = make_table(kBf16), e4m3fn = make_table(kE4m3fn),
                                  e5m2 = make_table(kE5m2);
  switch (dtype) {
    case CQSA_DTYPE_F16: return f16.data();
    case CQSA_DTYPE_BF16: return bf16.data();
    case CQSA_DTYPE_E4M3FN: return e4m3fn.data();
    default: return e5m2.data();
  }
}

// Elements need not be aligned.
template <class S> S load(const std::byte* from) {
  S value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class S> void store(S value, std::byte* to) { std::memcpy(to, &value, sizeof value); }

template <class S, class T> void convert(const std::byte* first, int64_t stride, int64_t count, T* out) {
  for (int64_t i = 0; i < count; ++i)
    out[i] = static_cast<T>(load<S>(first + i * stride * static_cast<int64_t>(sizeof(S))));
}

template <class S, class T>
void look_up(const float* table, const std::byte* first, int64_t stride, int64_t count, T* out) {
  for (int64_t i = 0; i < count; ++i)
    out[i] = static_cast<T>(table[load<S>(first + i * stride * static_cast<int64_t>(sizeof(S)))]);
}

// Mantissa bits, exponent of the smallest normal value, largest finite value.
struct rounding {
  int mantissa_bits, min_exponent;
  double largest;
};
rounding rounding_of(cqsa_dtype dtype) {
  switch (dtype) {
    case CQSA_DTYPE_F16: return {10, -14, kF16.largest};
    case CQSA_DTYPE_BF16: return {7, -126, kBf16.largest};
    case CQSA_DTYPE_E4M3FN: return {3, -6, kE4m3fn.largest};
    case CQSA_DTYPE_E5M2: return {2, -14, kE5m2.largest};
    case CQSA_DTYPE_F32: return {23, -126, std::numeric_limits<float>::max()};
    default: return {52, -1022, std::numeric_limits<double>::max()};
  }
}

}  // namespace

std::span<const element_type> element_types() { return kTypes; }

const element_type& type_of(cqsa_dtype dtype) {
  for (const element_type& type : kTypes)
    if (type.dtype == dtype && dtype != CQSA_DTYPE_NONE) return type;
  throw std::runtime_error(fmt::format("element type {:#x} is not one that the tool knows", dtype));
}

const element_type* type_by_safetensors(std::string_view name) {
  for (const element_type& type : kTypes)
    if (type.safetensors && name == type.safetensors) return &type;
  return nullptr;
}

const element_type* type_by_npy(std::string_view descr) {
  for (const element_type& type : kTypes)
    if (type.npy && descr == type.npy) return &type;
  return nullptr;
}

cqsa_dtype dtype_by_name(std::string_view name) {
  for (const element_type& type : kTypes)
    if (type.dtype != CQSA_DTYPE_NONE && name == type.name) return type.dtype;
  throw std::runtime_error(fmt::format("unknown element type \"{}\": f16, bf16, f32 or f64 is wanted", name));
}

template <class T> void decode_row(cqsa_dtype dtype, const std::byte* first, int64_t stride, int64_t count, T* out) {
  switch (dtype) {
    case CQSA_DTYPE_F64: return convert<double>(first, stride, count, out);
    case CQSA_DTYPE_F32: return convert<float>(first, stride, count, out);
    case CQSA_DTYPE_I64: return convert<int64_t>(first, stride, count, out);
    case CQSA_DTYPE_I32: return convert<int32_t>(first, stride, count, out);
    case CQSA_DTYPE_I8: return convert<int8_t>(first, stride, count, out);
    case CQSA_DTYPE_U8:
    case CQSA_DTYPE_BOOL: return convert<uint8_t>(first, stride, count, out);
    case CQSA_DTYPE_F16:
    case CQSA_DTYPE_BF16: return look_up<uint16_t>(table_of(dtype), first, stride, count, out);
    case CQSA_DTYPE_E4M3FN:
    case CQSA_DTYPE_E5M2: return look_up<uint8_t>(table_of(dtype), first, stride, count, out);
    default: type_of(dtype);  // throws
  }
}
template void decode_row<float>(cqsa_dtype, const std::byte*, int64_t, int64_t, float*);
template void decode_row<double>(cqsa_dtype, const std::byte*, int64_t, int64_t, double*);
template void decode_row<long double>(cqsa_dtype, const std::byte*, int64_t, int64_t, long double*);

double decode(cqsa_dtype dtype, const std::byte* element) {
  double value = 0;
  decode_row(dtype, element, 1, 1, &value);
  return value;
}

void encode(cqsa_dtype dtype, double value, std::byte* element) {
  switch (dtype) {
    case CQSA_DTYPE_F64: return store(value, element);
    case CQSA_DTYPE_F32: return store(static_cast<float>(value), element);
    case CQSA_DTYPE_F16: return store(static_cast<uint16_t>(encode_rounded(dtype, value, kF16)), element);
    case CQSA_DTYPE_BF16: return store(static_cast<uint16_t>(encode_rounded(dtype, value, kBf16)), element);
    case CQSA_DTYPE_E4M3FN: return store(static_cast<uint8_t>(encode_rounded(dtype, value, kE4m3fn)), element);
    case CQSA_DTYPE_E5M2: return store(static_cast<uint8_t>(encode_rounded(dtype, value, kE5m2)), element);
    case CQSA_DTYPE_I64: return store(static_cast<int64_t>(value), element);
    case CQSA_DTYPE_I32: return store(static_cast<int32_t>(value), element);
    case CQSA_DTYPE_I8: return store(static_cast<int8_t>(value), element);
    case CQSA_DTYPE_U8:
    case CQSA_DTYPE_BOOL: return store(static_cast<uint8_t>(value), element);
    default: type_of(dtype);  // throws
  }
}

double ulp(cqsa_dtype dtype, double magnitude) {
  const rounding r = rounding_of(dtype);
  const int exponent = magnitude > 0 && std::isfinite(magnitude) ? exponent_of(magnitude) : r.min_exponent;
  return power_of_two(std::max(exponent, r.min_exponent) - r.mantissa_bits);
}

double round_to(cqsa_dtype dtype, double value) {
  if (dtype == CQSA_DTYPE_F64 || !std::isfinite(value) || value == 0) return value;
  const double unit = ulp(dtype, std::fabs(value));
  const double rounded = std::nearbyint(value / unit) * unit;
  if (std::fabs(rounded) <= rounding_of(dtype).largest) return rounded;
  return std::copysign(std::numeric_limits<double>::infinity(), value);
}

}  // namespace tool
