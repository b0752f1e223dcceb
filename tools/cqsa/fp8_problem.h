// SPDX-License-Identifier: Apache-2.0
// Problems of `cqsa parity --op fp8-quantize` and `--op fp8-gemm`: lines of key=value, which say all that is needed to make them again.
// docs/parity.md has the keys.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tool {

// A line whose keys all have defaults, in the order of the defaults.
class fp8_line {
 public:
  using pairs = std::vector<std::pair<std::string, std::string>>;
  fp8_line(const pairs& defaults, std::string_view text);  // throws for an unknown key
  const std::string& operator[](std::string_view key) const;
  int64_t number(std::string_view key, int64_t low, int64_t high) const;
  double real(std::string_view key) const;
  bool truth(std::string_view key) const { return number(key, 0, 1) != 0; }
  void set(std::string_view key, std::string value);
  std::string text() const;  // what is not as the defaults are

 private:
  const pairs& defaults_;
  pairs values_;
};

extern const fp8_line::pairs kFp8QuantizeKeys, kFp8GemmKeys;

// Lines of a set, "smoke" or "ci", or of a file; without empty ones and comments.
std::vector<std::string> fp8_lines(const std::string& op, const std::string& set);

}  // namespace tool
