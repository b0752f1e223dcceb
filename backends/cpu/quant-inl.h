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

// n codes of one group, a multiple of 16.
template <bool has_min> static inline void emit_group(const int8_t* code, float scale, float least, int n, float* to) {
#if defined(CQSA_PLAIN_VECTORS)
  for (int i = 0; i < n; ++i) {
    const float product = scale * float(code[i]);
    to[i] = plain_nan(has_min ? product - least : product);
  }
#else
  const hn::Rebind<int8_t, df_t> d8;
  const vf factor = set(scale), less = set(least), nan = hn::BitCast(df, hn::Set(di, 0x7fc00000));
  for (int i = 0; i < n; i += lanes) {
    const vf product = mul(factor, hn::ConvertTo(df, hn::PromoteTo(di, hn::LoadU(d8, code + i))));
    const vf value = has_min ? sub(product, less) : product;
    storeu(select(eq(value, value), value, nan), to + i);
  }
#endif
}

template <class Format> static inline void emit(const unpacked* u, float* to) {
  for (int g = 0; g < Format::elements / Format::group; ++g)
    emit_group<Format::has_min != 0>(u->code + g * Format::group, u->scale[g], u->min[g], Format::group, to + g * Format::group);
}

template <class Format> static void decode_blocks(const uint8_t* from, int64_t n, float* to) {
  unpacked u;
  memset(&u.min, 0, sizeof u.min);
  for (int64_t i = 0; i < n; i += Format::elements, from += Format::bytes) {
    Format::unpack(from, &u);
    emit<Format>(&u, to + i);
  }
}

template <cqsa_dtype dtype> static void decode_floats(const uint8_t* from, int64_t n, float* to) {
  if (dtype == CQSA_DTYPE_F32) {
    memcpy(to, from, size_t(4 * n));
  } else {
    alignas(64) char raw[2 * quant_piece];  // for those at an odd address
    load_row((const char*)from, dtype, 1, n, raw, to);
  }
  for (int64_t i = 0; i < n; ++i) to[i] = plain_nan(to[i]);
}

// At CQSA_QUANT_*. Called through pointers also because g++ 12 takes a direct call of decode_blocks<q2_k>() for one without effect, and drops it.
using decode_fn = void (*)(const uint8_t* from, int64_t n, float* to);
static const decode_fn decoders[] = {
    nullptr,
    decode_floats<CQSA_DTYPE_F32>,
    decode_floats<CQSA_DTYPE_F16>,
    decode_floats<CQSA_DTYPE_BF16>,
    decode_blocks<q1_0>,
    decode_blocks<q2_0>,
    decode_blocks<q4_0>,
    decode_blocks<q4_1>,
    decode_blocks<q5_0>,
    decode_blocks<q5_1>,
    decode_blocks<q8_0>,
    decode_blocks<q2_k>,
    decode_blocks<q3_k>,
    decode_blocks<q4_k>,
    decode_blocks<q5_k>,
    decode_blocks<q6_k>,
    decode_blocks<iq1_s>,
    decode_blocks<iq1_m>,
    decode_blocks<iq2_xxs>,
    decode_blocks<iq2_xs>,
    decode_blocks<iq2_s>,
    decode_blocks<iq3_xxs>,
    decode_blocks<iq3_s>,
    decode_blocks<iq4_nl>,
    decode_blocks<iq4_xs>,
    decode_blocks<tq1_0>,
    decode_blocks<tq2_0>,
    decode_blocks<mxfp4>,
    decode_blocks<nvfp4>,
};
static_assert(sizeof decoders / sizeof *decoders == CQSA_QUANT_NVFP4 + 1, "a decoder for every format");

static inline bool moves_only(cqsa_quant_format format, cqsa_dtype out) {
  return (format == CQSA_QUANT_F32 && out == CQSA_DTYPE_F32) || (format == CQSA_QUANT_F16 && out == CQSA_DTYPE_F16) ||
         (format == CQSA_QUANT_BF16 && out == CQSA_DTYPE_BF16);
}

[[maybe_unused]] static void decode_piece(const cqsa_dequantize_leaf* leaf, const uint8_t* from, int64_t n, char* to, quant_scratch* mem) {
  const cqsa_dtype dtype = leaf->out_dtype;
  const int64_t stride = leaf->out_stride[1];
  if (moves_only(leaf->format, dtype)) return scatter_elements((const char*)from, stride, element_bytes(dtype), n, to);
  if (dtype == CQSA_DTYPE_F32 && stride == 1 && uintptr_t(to) % 4 == 0) return decoders[leaf->format](from, n, (float*)to);
  decoders[leaf->format](from, n, mem->row);
  store_row(mem->row, dtype, stride, n, mem->ops, mem->raw, to);
}

[[maybe_unused]] static void load_piece(const char* from, cqsa_dtype dtype, int64_t stride, int64_t n, quant_scratch* mem) {
  load_row(from, dtype, stride, n, mem->raw, mem->row);
}

}  // namespace HWY_NAMESPACE
}  // namespace
}  // namespace cqsa::cpu
HWY_AFTER_NAMESPACE();
