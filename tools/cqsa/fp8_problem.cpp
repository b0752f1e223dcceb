// SPDX-License-Identifier: Apache-2.0
#include "fp8_problem.h"

#include <cmath>
#include <stdexcept>

#include <fmt/format.h>

#include "mapped_file.h"
#include "problem.h"
#include "problem_sets.h"
#include "sizes.h"

namespace tool {

const fp8_line::pairs kFp8QuantizeKeys = {
    {"rows", "64"},        {"cols", "64"},      {"batch", "0"},        {"dtype", "f32"},       {"data", "normal"},   {"format", "e4m3fn"},
    {"format_t", ""},      {"side", "row"},     {"granularity", "tensor"}, {"granularity_t", ""}, {"source", "current"}, {"pow2", "0"},
    {"scales", "f32"},     {"margin", "0"},     {"eps", "0"},          {"limit", "0"},         {"saturate", "1"},    {"nan", "propagate"},
    {"layout", "packed"},  {"layout_out", "packed"}, {"algorithm", "max"}, {"skip", "0"},      {"seed", ""}};

const fp8_line::pairs kFp8GemmKeys = {
    {"m", "64"},         {"n", "64"},         {"k", "64"},        {"batch", "0"},     {"batch_b", "1"},      {"format_a", "e4m3fn"}, {"format_b", "e4m3fn"},
    {"scale_a", "tensor"}, {"scale_b", "tensor"}, {"out", "f32"}, {"bias", "none"},   {"beta", "0"},         {"alpha", "1"},         {"amax", "0"},
    {"accumulate", "promote"}, {"provider", "auto"}, {"layout_a", "packed"}, {"layout_b", "packed"}, {"seed", ""}};

fp8_line::fp8_line(const pairs& defaults, std::string_view text) : defaults_(defaults), values_(defaults) {
  for (const std::string& word : split(text, ' ')) {
    if (word.empty()) continue;
    const std::size_t sign = word.find('=');
    if (sign == std::string::npos) throw std::runtime_error(fmt::format("\"{}\": key=value is wanted", word));
    set(word.substr(0, sign), word.substr(sign + 1));
  }
}

void fp8_line::set(std::string_view key, std::string value) {
  std::string known;
  for (auto& [name, old] : values_) {
    if (name == key) {
      old = std::move(value);
      return;
    }
    known += (known.empty() ? "" : ", ") + name;
  }
  throw std::runtime_error(fmt::format("unknown key {}; wanted one of {}", key, known));
}

const std::string& fp8_line::operator[](std::string_view key) const {
  for (const auto& [name, value] : values_)
    if (name == key) return value;
  throw std::logic_error("no such key");
}

int64_t fp8_line::number(std::string_view key, int64_t low, int64_t high) const {
  int64_t value = low - 1;
  const std::string& text = (*this)[key];
  const bool negative = !text.empty() && text[0] == '-';
  try {
    value = parse_count(negative ? text.substr(1) : text);
  } catch (const std::exception&) {
    throw std::runtime_error(fmt::format("{}={}: a number from {} to {} is wanted", key, text, low, high));
  }
  value = negative ? -value : value;
  if (value < low || value > high) throw std::runtime_error(fmt::format("{}={}: a number from {} to {} is wanted", key, text, low, high));
  return value;
}

double fp8_line::real(std::string_view key) const {
  const std::string& text = (*this)[key];
  std::size_t used = 0;
  double value = std::nan("");
  try {
    value = std::stod(text, &used);
  } catch (const std::exception&) {
  }
  if (used != text.size() || !std::isfinite(value)) throw std::runtime_error(fmt::format("{}={}: a finite number is wanted", key, text));
  return value;
}

std::string fp8_line::text() const {
  std::string out;
  for (std::size_t i = 0; i < values_.size(); ++i)
    if (values_[i].second != defaults_[i].second) out += (out.empty() ? "" : " ") + values_[i].first + "=" + values_[i].second;
  return out;
}

std::vector<std::string> fp8_lines(const std::string& op, const std::string& set) {
  const bool gemm = op == "fp8-gemm";
  std::string text;
  if (set == "smoke" || set == "ci")
    text = set == "smoke" ? (gemm ? kFp8GemmSmokeProblems : kFp8QuantizeSmokeProblems) : (gemm ? kFp8GemmCiProblems : kFp8QuantizeCiProblems);
  else {
    const mapped_file file(set);
    text.assign(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size());
  }
  std::vector<std::string> lines;
  for (std::string line : split(text, '\n')) {
    line = line.substr(0, line.find('#'));
    while (!line.empty() && (line.back() == ' ' || line.back() == '\r')) line.pop_back();
    if (!line.empty()) lines.push_back(line);
  }
  return lines;
}

}  // namespace tool
