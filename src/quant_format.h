// SPDX-License-Identifier: Apache-2.0
// The formats of quantized matrices, and a caller's matrix looked at as bytes.
#pragma once
#include "backends/cqsa_backend.h"
#include "error.h"

namespace cqsa {

struct quant_format {
  const char* name;
  int32_t ggml_type;
  int32_t block_elements, block_bytes;
  bool can_quantize;
};

// At CQSA_QUANT_*; the first is none.
inline constexpr quant_format quant_formats[] = {
    {"", -1, 0, 0, false},
    {"F32", 0, 1, 4, true},
    {"F16", 1, 1, 2, true},
    {"BF16", 30, 1, 2, true},
    {"Q1_0", 41, 128, 18, false},
    {"Q2_0", 42, 64, 18, true},
    {"Q4_0", 2, 32, 18, true},
    {"Q4_1", 3, 32, 20, false},
    {"Q5_0", 6, 32, 22, false},
    {"Q5_1", 7, 32, 24, false},
    {"Q8_0", 8, 32, 34, true},
    {"Q2_K", 10, 256, 84, false},
    {"Q3_K", 11, 256, 110, false},
    {"Q4_K", 12, 256, 144, false},
    {"Q5_K", 13, 256, 176, false},
    {"Q6_K", 14, 256, 210, false},
    {"IQ1_S", 19, 256, 50, false},
    {"IQ1_M", 29, 256, 56, false},
    {"IQ2_XXS", 16, 256, 66, false},
    {"IQ2_XS", 17, 256, 74, false},
    {"IQ2_S", 22, 256, 82, false},
    {"IQ3_XXS", 18, 256, 98, false},
    {"IQ3_S", 21, 256, 110, false},
    {"IQ4_NL", 20, 32, 18, true},
    {"IQ4_XS", 23, 256, 136, false},
    {"TQ1_0", 34, 256, 54, false},
    {"TQ2_0", 35, 256, 66, false},
    {"MXFP4", 39, 32, 17, true},
    {"NVFP4", 40, 64, 36, false},
};
inline constexpr int32_t quant_format_count = sizeof quant_formats / sizeof *quant_formats;
static_assert(quant_format_count == CQSA_QUANT_NVFP4 + 1, "a row for every CQSA_QUANT_*");

// nullptr where there is none.
constexpr const quant_format* find_quant_format(cqsa_quant_format format) {
  return format > CQSA_QUANT_NONE && format < quant_format_count ? quant_formats + format : nullptr;
}
// CQSA_QUANT_NONE where there is none.
constexpr cqsa_quant_format quant_format_of_ggml(uint32_t type) {
  for (cqsa_quant_format format = 1; format < quant_format_count; ++format)
    if (static_cast<uint32_t>(quant_formats[format].ggml_type) == type) return format;
  return CQSA_QUANT_NONE;
}

// value = scale * code - minimum, with codes of 0 and more.
constexpr bool quant_has_minimum(cqsa_quant_format format) {
  return format == CQSA_QUANT_Q4_1 || format == CQSA_QUANT_Q5_1 || format == CQSA_QUANT_Q2_K || format == CQSA_QUANT_Q4_K || format == CQSA_QUANT_Q5_K;
}

cqsa_status describe_quant_format(cqsa_quant_format format, cqsa_quant_format_info* info_out);

// A caller's matrix, checked but for its memory: whether that may be used is asked with bytes().
class quant_matrix {
 public:
  quant_matrix() = default;
  quant_matrix(const quant_matrix&) = delete;  // bytes_ points into it
  quant_matrix& operator=(const quant_matrix&) = delete;
  cqsa_status read(const cqsa_quant_tensor* caller, const char* name);
  // What it touches, U8 [rows, bytes of a row]. Lives as long as this.
  const cqsa_tensor& bytes() const { return bytes_; }
  const quant_format& format() const { return *format_; }
  cqsa_quant_format format_id() const { return tensor_.format; }
  int64_t rows() const { return tensor_.rows; }
  int64_t row_elements() const { return tensor_.row_elements; }
  int64_t row_bytes() const { return strides_[0]; }
  void* data() const { return tensor_.data; }

 private:
  cqsa_status check_sizes(const char* name);
  cqsa_status check_addresses(const char* name) const;
  cqsa_status check_length(const char* name) const;

  cqsa_quant_tensor tensor_{};
  const quant_format* format_ = nullptr;
  cqsa_tensor bytes_{};
  int64_t shape_[2]{}, strides_[2]{};
};

}  // namespace cqsa
