// SPDX-License-Identifier: Apache-2.0
// Pieces of rows of quantized matrices to f32, f16 and bf16; section 15 of cqsa.h says what each bit has to be. Compiled without contraction.
#pragma once

#include "quant_job.h"
#include "quant_unpack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cqsa::cpu {
namespace {
namespace HWY_NAMESPACE {

// Which NaN comes out of an operation differs between machines.
static inline float plain_nan(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bits = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits;
  memcpy(&x, &bits, 4);
  return x;
}

template <class Format> static inline void emit(const unpacked* u, float* HWY_RESTRICT to) {
  for (int g = 0; g < Format::elements / Format::group; ++g) {
    const float scale = u->scale[g], least = u->min[g];
    const int8_t* HWY_RESTRICT const code = u->code + g * Format::group;
    for (int i = 0; i < Format::group; ++i) {
      const float product = scale * float(code[i]);
      to[g * Format::group + i] = plain_nan(Format::has_min ? product - least : product);
    }
  }
}

template <class Format> static void decode_blocks(const uint8_t* from, int64_t n, float* to) {
  unpacked u;
  memset(&u.min, 0, sizeof u.min);
  for (int64_t i = 0; i < n; i += Format::elements, from += Format::bytes) {
    Format::unpack(from, &u);
    emit<Format>(&u, to + i);
  }
}

static void decode_floats(const uint8_t* from, cqsa_dtype dtype, int64_t n, char* raw, float* to) {
  load_row((const char*)from, dtype, 1, n, raw, to);
  for (int64_t i = 0; i < n; ++i) to[i] = plain_nan(to[i]);
}

static void decode_f32(cqsa_quant_format format, const uint8_t* from, int64_t n, char* raw, float* to) {
  switch (format) {
    case CQSA_QUANT_F32: return decode_floats(from, CQSA_DTYPE_F32, n, raw, to);
    case CQSA_QUANT_F16: return decode_floats(from, CQSA_DTYPE_F16, n, raw, to);
    case CQSA_QUANT_BF16: return decode_floats(from, CQSA_DTYPE_BF16, n, raw, to);
    case CQSA_QUANT_Q1_0: return decode_blocks<q1_0>(from, n, to);
    case CQSA_QUANT_Q2_0: return decode_blocks<q2_0>(from, n, to);
    case CQSA_QUANT_Q4_0: return decode_blocks<q4_0>(from, n, to);
    case CQSA_QUANT_Q4_1: return decode_blocks<q4_1>(from, n, to);
    case CQSA_QUANT_Q5_0: return decode_blocks<q5_0>(from, n, to);
    case CQSA_QUANT_Q5_1: return decode_blocks<q5_1>(from, n, to);
    case CQSA_QUANT_Q8_0: return decode_blocks<q8_0>(from, n, to);
    case CQSA_QUANT_Q2_K: return decode_blocks<q2_k>(from, n, to);
    case CQSA_QUANT_Q3_K: return decode_blocks<q3_k>(from, n, to);
    case CQSA_QUANT_Q4_K: return decode_blocks<q4_k>(from, n, to);
    case CQSA_QUANT_Q5_K: return decode_blocks<q5_k>(from, n, to);
    case CQSA_QUANT_Q6_K: return decode_blocks<q6_k>(from, n, to);
    case CQSA_QUANT_IQ1_S: return decode_blocks<iq1_s>(from, n, to);
    case CQSA_QUANT_IQ1_M: return decode_blocks<iq1_m>(from, n, to);
    case CQSA_QUANT_IQ2_XXS: return decode_blocks<iq2_xxs>(from, n, to);
    case CQSA_QUANT_IQ2_XS: return decode_blocks<iq2_xs>(from, n, to);
    case CQSA_QUANT_IQ2_S: return decode_blocks<iq2_s>(from, n, to);
    case CQSA_QUANT_IQ3_XXS: return decode_blocks<iq3_xxs>(from, n, to);
    case CQSA_QUANT_IQ3_S: return decode_blocks<iq3_s>(from, n, to);
    case CQSA_QUANT_IQ4_NL: return decode_blocks<iq4_nl>(from, n, to);
    case CQSA_QUANT_IQ4_XS: return decode_blocks<iq4_xs>(from, n, to);
    case CQSA_QUANT_TQ1_0: return decode_blocks<tq1_0>(from, n, to);
    case CQSA_QUANT_TQ2_0: return decode_blocks<tq2_0>(from, n, to);
    case CQSA_QUANT_MXFP4: return decode_blocks<mxfp4>(from, n, to);
    default: return decode_blocks<nvfp4>(from, n, to);
  }
}

static inline bool moves_only(cqsa_quant_format format, cqsa_dtype out) {
  return (format == CQSA_QUANT_F32 && out == CQSA_DTYPE_F32) || (format == CQSA_QUANT_F16 && out == CQSA_DTYPE_F16) ||
         (format == CQSA_QUANT_BF16 && out == CQSA_DTYPE_BF16);
}

static void decode_piece(const cqsa_dequantize_leaf* leaf, const uint8_t* from, int64_t n, char* to, quant_scratch* mem) {
  const cqsa_dtype dtype = leaf->out_dtype;
  const int64_t stride = leaf->out_stride[1];
  if (moves_only(leaf->format, dtype)) return scatter_elements((const char*)from, stride, element_bytes(dtype), n, to);
  if (dtype == CQSA_DTYPE_F32 && stride == 1 && uintptr_t(to) % 4 == 0) return decode_f32(leaf->format, from, n, mem->raw, (float*)to);
  decode_f32(leaf->format, from, n, mem->raw, mem->row);
  store_row(mem->row, dtype, stride, n, mem->ops, mem->raw, to);
}

static void load_piece(const char* from, cqsa_dtype dtype, int64_t stride, int64_t n, quant_scratch* mem) {
  load_row(from, dtype, stride, n, mem->raw, mem->row);
}

}  // namespace HWY_NAMESPACE
}  // namespace
}  // namespace cqsa::cpu
HWY_AFTER_NAMESPACE();
