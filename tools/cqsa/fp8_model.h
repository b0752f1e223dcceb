// SPDX-License-Identifier: Apache-2.0
// The rules of cqsa.h section 13 once more, in double and as plainly as can be. They share no code with the library: `cqsa quantize --check`
// and `cqsa parity --op fp8-*` compare it with them, bit for bit.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cqsa.h"

namespace tool {

struct fp8_format {
  cqsa_dtype dtype;
  const char* name;         // "e4m3fn"
  const char* safetensors;  // "F8_E4M3"
  int mantissa_bits, bias;
  double largest;
  bool is_fnuz, has_infinity;
};

const fp8_format& fp8_format_by_name(std::string_view name);  // throws
double fp8_decode(const fp8_format& format, unsigned code);
unsigned fp8_encode(const fp8_format& format, double value, bool saturate);

// Rows and columns that share a scale, 0: all. Of "tensor", "row", "col", "1x128", "128x128", "mx" (1x32), "1x64" ..
struct fp8_block {
  int64_t rows = 0, columns = 0;
  int64_t down(int64_t all) const { return rows == 0 ? 1 : (all + rows - 1) / rows; }
  int64_t across(int64_t all) const { return columns == 0 ? 1 : (all + columns - 1) / columns; }
};
fp8_block fp8_block_by_name(const std::string& name);  // throws

struct fp8_scaling {
  const fp8_format* format = nullptr;
  int margin = 0;
  bool pow2 = false;
  float eps = 0, limit = 0;
};
struct fp8_scale {
  float scale = 1, scale_inv = 1;
  unsigned e8m0 = 127;  // the byte of scale_inv, with pow2
};
fp8_scale fp8_scale_of(float amax, const fp8_scaling& rule);

// Largest |x| of each block, row-major. ignore: NaN and infinities do not count.
std::vector<float> fp8_amaxes(const std::vector<float>& x, int64_t rows, int64_t columns, fp8_block block, bool ignore);

}  // namespace tool
