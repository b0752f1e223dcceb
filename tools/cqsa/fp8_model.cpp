// SPDX-License-Identifier: Apache-2.0
#include "fp8_model.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include <fmt/format.h>

#include "sizes.h"

namespace tool {
namespace {

constexpr fp8_format kFormats[] = {
    {CQSA_DTYPE_E4M3FN, "e4m3fn", "F8_E4M3", 3, 7, 448, false, false},
    {CQSA_DTYPE_E5M2, "e5m2", "F8_E5M2", 2, 15, 57344, false, true},
    {CQSA_DTYPE_E4M3FNUZ, "e4m3fnuz", "F8_E4M3FNUZ", 3, 8, 240, true, false},
    {CQSA_DTYPE_E5M2FNUZ, "e5m2fnuz", "F8_E5M2FNUZ", 2, 16, 57344, true, false},
};
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

unsigned nan_code(const fp8_format& f, bool negative) {
  if (f.is_fnuz) return 0x80;
  return (negative ? 0x80u : 0u) | (f.has_infinity ? 0x7Eu : 0x7Fu);
}

}  // namespace

const fp8_format& fp8_format_by_name(std::string_view name) {
  for (const fp8_format& format : kFormats)
    if (name == format.name) return format;
  throw std::runtime_error(fmt::format("format \"{}\": e4m3fn, e5m2, e4m3fnuz or e5m2fnuz is wanted", name));
}

double fp8_decode(const fp8_format& f, unsigned code) {
  const unsigned size = code & 0x7F, exponent = size >> f.mantissa_bits, mantissa = size & ((1u << f.mantissa_bits) - 1);
  if (f.is_fnuz && code == 0x80) return kNan;
  if (f.has_infinity && exponent == 31) return mantissa ? kNan : std::copysign(std::numeric_limits<double>::infinity(), code & 0x80 ? -1 : 1);
  if (!f.is_fnuz && !f.has_infinity && size == 0x7F) return kNan;
  const double value = exponent == 0 ? std::ldexp(mantissa, 1 - f.bias - f.mantissa_bits)
                                     : std::ldexp(mantissa + (1u << f.mantissa_bits), static_cast<int>(exponent) - f.bias - f.mantissa_bits);
  return code & 0x80 ? -value : value;
}

unsigned fp8_encode(const fp8_format& f, double value, bool saturate) {
  const bool negative = std::signbit(value);
  const unsigned sign = negative ? 0x80 : 0;
  if (std::isnan(value)) return nan_code(f, negative);
  const double size = std::fabs(value);
  const int least = 1 - f.bias;  // exponent of the smallest normal number
  const int exponent = size > 0 && std::isfinite(size) ? std::max(std::ilogb(size), least) : least;
  const double unit = std::ldexp(1.0, exponent - f.mantissa_bits);
  double rounded = std::isfinite(size) ? std::nearbyint(size / unit) * unit : size;
  if (rounded > f.largest) {
    if (!saturate) return f.has_infinity ? sign | 0x7C : nan_code(f, negative);
    rounded = f.largest;
  }
  if (rounded == 0) return f.is_fnuz ? 0 : sign;
  const int top = std::ilogb(rounded);
  if (top < least) return sign | static_cast<unsigned>(rounded / std::ldexp(1.0, least - f.mantissa_bits));
  const auto mantissa = static_cast<unsigned>(rounded / std::ldexp(1.0, top - f.mantissa_bits)) - (1u << f.mantissa_bits);
  return sign | static_cast<unsigned>(top + f.bias) << f.mantissa_bits | mantissa;
}

fp8_block fp8_block_by_name(const std::string& name) {
  if (name == "tensor") return {0, 0};
  if (name == "row") return {1, 0};
  if (name == "col") return {0, 1};
  if (name == "mx") return {1, 32};
  const std::size_t cross = name.find('x');
  try {
    if (cross != std::string::npos) return {parse_count(name.substr(0, cross)), parse_count(name.substr(cross + 1))};
  } catch (const std::exception&) {
  }
  throw std::runtime_error(fmt::format("granularity \"{}\": tensor, row, col, 1x128, 128x128, mx or rows x columns as 1x64 is wanted", name));
}

fp8_scale fp8_scale_of(float amax, const fp8_scaling& rule) {
  if (amax < rule.eps) amax = rule.eps;
  if (rule.limit > 0 && amax > rule.limit) amax = rule.limit;
  if (amax == 0 || !std::isfinite(amax)) return {};
  const double largest = rule.format->largest;
  if (rule.pow2) {
    int e = 0, of_amax = 0;
    const double m = std::frexp(amax, &of_amax), l = std::frexp(largest, &e);
    e = std::clamp(of_amax - e + (m > l ? 1 : 0) + rule.margin, -127, 126);
    return {static_cast<float>(std::ldexp(1.0, -e)), static_cast<float>(std::ldexp(1.0, e)), static_cast<unsigned>(e + 127)};
  }
  const float scale = std::clamp(static_cast<float>(std::ldexp(largest, -rule.margin)) / amax, 0x1p-126f, std::numeric_limits<float>::max());
  return {scale, 1.0f / scale, 0};
}

std::vector<float> fp8_amaxes(const std::vector<float>& x, int64_t rows, int64_t columns, fp8_block block, bool ignore) {
  const int64_t across = block.across(columns);
  std::vector<float> most(static_cast<std::size_t>(block.down(rows) * across), 0.0f);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) {
      const float size = std::fabs(x[static_cast<std::size_t>(r * columns + c)]);
      float& to = most[static_cast<std::size_t>((block.rows ? r / block.rows : 0) * across + (block.columns ? c / block.columns : 0))];
      if (ignore && !std::isfinite(size)) continue;
      if (std::isnan(size) || size > to) to = std::isnan(to) ? to : size;
    }
  return most;
}

}  // namespace tool
