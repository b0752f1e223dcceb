// SPDX-License-Identifier: Apache-2.0
// 32 elements of a row of any format.
#pragma once

#include "moe_common.cuh"
#include "quant_decode.cuh"

namespace cqsa::gpu {

CQSA_DEVICE bool is_iq(int32_t format) { return format >= CQSA_QUANT_IQ1_S && format <= CQSA_QUANT_IQ4_XS && format != CQSA_QUANT_IQ4_NL; }

// Calls f with the constant of a format of blocks.
template <class F> CQSA_DEVICE void with_block_format(int32_t format, const F& f) {
  if (format >= CQSA_QUANT_Q2_K && format <= CQSA_QUANT_Q6_K) with_k_format(format, f);
  else if (is_iq(format)) with_iq_format(format, f);
  else with_simple_format(format, f);
}

CQSA_DEVICE void clear_codes(quant_codes* out) {
#pragma unroll
  for (int i = 0; i < 8; ++i) out->code[i] = 0;
  set_scale(out, 0.0f);
}

// Elements 32 piece .. 32 piece + 31.
template <class Format> CQSA_DEVICE typename Format::words load_piece(const char* row, int64_t piece, int* part) {
  constexpr int parts = Format::elements / 32;
  *part = int(piece % parts);
  return Format::load(row + piece / parts * Format::bytes, *part);
}
CQSA_DEVICE void decode_piece(const char* row, int32_t format, int64_t piece, quant_codes* out) {
  with_block_format(format, [&](auto constant) {
    using type = typename decltype(constant)::type;
    int part;
    const typename type::words w = load_piece<type>(row, piece, &part);
    type::unpack(w, part, out);
  });
}

// Of a row of F32, F16 or BF16 elements first + 4 i .. first + 4 i + 3, zeros past the end.
CQSA_DEVICE float4x plain_four(const char* row, int32_t format, int64_t c, int64_t n) {
  const int kind = format == CQSA_QUANT_F32 ? kind_f32 : format == CQSA_QUANT_F16 ? kind_f16 : kind_bf16;
  float4x out;
#pragma unroll
  for (int i = 0; i < 4; ++i) out.x[i] = c + i < n ? load_element(row, kind, c + i) : 0.0f;
  return out;
}

// value = scale * code - least, each operation rounded.
CQSA_DEVICE float4x value_of_word(const quant_codes& c, int word) {
  float4x out;
#pragma unroll
  for (int i = 0; i < 4; ++i) out.x[i] = value_of(c.scale[word / 4], code_at(c.code[word], i), c.least[word / 4]);
  return out;
}

CQSA_DEVICE int32_t dot_four_words(const uint32_t* a, const uint32_t* b) {
  int32_t sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) sum = dot4(a[i], b[i], sum);
  return sum;
}

}  // namespace cqsa::gpu
