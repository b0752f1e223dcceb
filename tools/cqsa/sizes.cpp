// SPDX-License-Identifier: Apache-2.0
#include "sizes.h"

#include <cctype>
#include <charconv>
#include <cmath>
#include <optional>
#include <stdexcept>

#include <fmt/format.h>

namespace tool {
namespace {

constexpr std::string_view kLetters = "KMGT";

// Factor of a unit, in any case: "", "B", "K", "KiB", "KB" ..
std::optional<double> factor_of(std::string_view unit, bool bytes) {
  std::string upper;
  for (const char c : unit) upper.push_back(static_cast<char>(std::toupper(static_cast<unsigned char>(c))));
  if (upper.empty() || (bytes && upper == "B")) return 1.0;
  const std::size_t power = kLetters.find(upper[0]);
  if (power == std::string_view::npos) return {};
  const std::string rest = upper.substr(1);
  const double exponent = static_cast<double>(power) + 1;
  if (rest.empty() || (bytes && rest == "IB")) return std::pow(1024.0, exponent);
  if (bytes && rest == "B") return std::pow(1000.0, exponent);
  return {};
}

// A number with a unit as an integer up to 2^63 - 1; nothing when the text is something else.
std::optional<int64_t> parse_number(std::string_view text, bool bytes) {
  const std::size_t digits = std::min(text.find_first_not_of("0123456789."), text.size());
  if (digits == 0) return {};  // an unset shell variable is not "no limit"
  std::string_view unit = text.substr(digits);
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  const std::optional<double> factor = factor_of(unit, bytes);
  if (!factor) return {};

  const char *begin = text.data(), *end = begin + digits;
  int64_t whole = 0;
  const auto as_integer = std::from_chars(begin, end, whole);
  if (as_integer.ec == std::errc() && as_integer.ptr == end) {
    int64_t product = 0;  // exact, where a double would round
    if (__builtin_mul_overflow(whole, static_cast<int64_t>(*factor), &product)) return {};
    return product;
  }
  double value = 0;
  const auto as_double = std::from_chars(begin, end, value, std::chars_format::fixed);
  if (as_double.ec != std::errc() || as_double.ptr != end || value * *factor >= 0x1p63) return {};
  return static_cast<int64_t>(value * *factor);
}

std::string scaled(double value, double step, const char* const* units, int count) {
  int unit = 0;
  while (value >= step && unit + 1 < count) {
    value /= step;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} {}", value, units[0]) : fmt::format("{:.2f} {}", value, units[unit]);
}

}  // namespace

uint64_t parse_bytes(std::string_view text) {
  if (const auto value = parse_number(text, true)) return static_cast<uint64_t>(*value);
  throw std::runtime_error(fmt::format("\"{}\" is not a size; write bytes, or for example 512MiB, 3GiB, 1.5GB", text));
}

int64_t parse_count(std::string_view text) {
  if (const auto value = parse_number(text, false)) return *value;
  throw std::runtime_error(fmt::format("\"{}\" is not a count; write digits, or for example 64K, 1M", text));
}

std::pair<int64_t, int64_t> parse_pair(std::string_view text) {
  int64_t a = 0, b = 0;
  const char* end = text.data() + text.size();
  const auto first = std::from_chars(text.data(), end, a);
  if (first.ec == std::errc() && first.ptr != end && *first.ptr == ',') {
    const auto second = std::from_chars(first.ptr + 1, end, b);
    if (second.ec == std::errc() && second.ptr == end) return {a, b};
  }
  throw std::runtime_error(fmt::format("\"{}\" is not two integers with a comma between them", text));
}

std::string bytes_text(double bytes) {
  static const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  return scaled(bytes, 1024, units, 6);
}

std::string flops_text(double flops) {
  static const char* const units[] = {"FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP"};
  return scaled(flops, 1000, units, 8);
}

std::string seconds_text(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.1f} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.1f} ms", seconds * 1e3);
  if (seconds < 120) return fmt::format("{:.2f} s", seconds);
  if (seconds < 7200) return fmt::format("{:.0f} min {:.0f} s", std::floor(seconds / 60), std::fmod(seconds, 60));
  if (seconds < 172800) return fmt::format("{:.1f} h", seconds / 3600);
  return fmt::format("{:.1f} days", seconds / 86400);
}

std::string count_text(int64_t count) {
  for (int power = 4; power > 0; --power) {
    const int64_t unit = int64_t{1} << (10 * power);
    if (count >= unit && count % unit == 0) return fmt::format("{}{}", count / unit, kLetters[power - 1]);
  }
  return fmt::format("{}", count);
}

}  // namespace tool
