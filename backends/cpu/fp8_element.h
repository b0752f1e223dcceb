// SPDX-License-Identifier: Apache-2.0
// FP8 one element at a time: how matrices and grids of scales lie, conversions through dtype.h, the element that a quantization sees.
// Never included by a file that is compiled for one instruction set.
#pragma once

#include "backends/cqsa_backend.h"
#include "backends/fp8_rules.h"
#include "dtype.h"
#include "element.h"

#include <cmath>

namespace cqsa::cpu {

inline int64_t bytes_of(cqsa_dtype t) { return ((t >> 8) & 0xff) / 8; }

// Element (i, j) where i counts over batch * rows rows.
inline char* matrix_address(const cqsa_matrix& x, int64_t rows, int64_t i, int64_t j) {
  const int64_t b = rows > 0 ? i / rows : 0;
  return static_cast<char*>(x.data) + bytes_of(x.dtype) * (b * x.stride[0] + (i - b * rows) * x.stride[1] + j * x.stride[2]);
}

inline float code_to_f32(uint8_t code, cqsa_dtype format) {
  switch (format) {
    case CQSA_DTYPE_E4M3FN: return e4m3fn_to_f32(code);
    case CQSA_DTYPE_E5M2: return e5m2_to_f32(code);
    case CQSA_DTYPE_E4M3FNUZ: return e4m3fnuz_to_f32(code);
    default: return e5m2fnuz_to_f32(code);
  }
}

inline uint8_t f32_to_code(float x, cqsa_dtype format, bool saturate) {
  switch (format) {
    case CQSA_DTYPE_E4M3FN: return f32_to_e4m3fn(x, saturate);
    case CQSA_DTYPE_E5M2: return f32_to_e5m2(x, saturate);
    case CQSA_DTYPE_E4M3FNUZ: return f32_to_e4m3fnuz(x, saturate);
    default: return f32_to_e5m2fnuz(x, saturate);
  }
}

inline float load_f32(const char* p, cqsa_dtype type) {
  switch (type) {
    case CQSA_DTYPE_F32: return load_as<float>(p);
    case CQSA_DTYPE_F16: return f16_to_f32(load_as<uint16_t>(p));
    case CQSA_DTYPE_BF16: return bf16_to_f32(load_as<uint16_t>(p));
    default: return code_to_f32(load_as<uint8_t>(p), type);
  }
}

// Which NaN comes out of an operation differs between machines.
inline float plain_nan(float x) { return x != x ? fp8::float_of(0x7FC00000u) : x; }

// To F32, F16 or BF16.
inline void store_f32(char* p, cqsa_dtype type, float x) {
  x = plain_nan(x);
  const uint16_t half = type == CQSA_DTYPE_F16 ? f32_to_f16(x) : f32_to_bf16(x);
  if (type == CQSA_DTYPE_F32) std::memcpy(p, &x, 4);
  else std::memcpy(p, &half, 2);
}

// ---- scales -----------------------------------------------------------------------------------------------------------------

// Where the scale of a block lies.
inline char* scale_address(const cqsa_scale_grid& g, int64_t r, int64_t c) {
  char* const base = static_cast<char*>(g.data);
  if (g.layout == CQSA_FP8_SCALES_PACKED) return base + 4 * (r * g.stride[0] + c / 4 * g.stride[1]) + c % 4;
  if (g.layout == CQSA_FP8_SCALES_TILED) {
    const int64_t tile = r / 128 * ((g.columns + 3) / 4) + c / 4, y = r % 128;
    return base + tile * 512 + y % 32 * 16 + y / 32 * 4 + c % 4;
  }
  return base + bytes_of(g.dtype) * (r * g.stride[0] + c * g.stride[1]);
}

inline bool has_power_scales(const cqsa_scale_grid& g) {
  return g.data && (g.layout != CQSA_FP8_SCALES_STRIDED || g.dtype != CQSA_DTYPE_F32);
}

inline float load_scale(const cqsa_scale_grid& g, int64_t r, int64_t c) {
  const char* const p = scale_address(g, r, c);
  return has_power_scales(g) ? e8m0fnu_to_f32(load_as<uint8_t>(p)) : load_as<float>(p);
}

inline void store_scale(const cqsa_scale_grid& g, int64_t r, int64_t c, float x) {
  if (!g.data) return;
  char* const p = scale_address(g, r, c);
  const uint8_t byte = f32_to_e8m0fnu(x);
  x = plain_nan(x);
  if (has_power_scales(g)) std::memcpy(p, &byte, 1);
  else std::memcpy(p, &x, 4);
}

// What a layout has besides scales is 0.
inline void clear_padding(const cqsa_scale_grid& g) {
  if (!g.data || g.layout == CQSA_FP8_SCALES_STRIDED) return;
  const bool tiled = g.layout == CQSA_FP8_SCALES_TILED;
  const int64_t columns = (g.columns + 3) / 4 * 4, rows = tiled ? (g.rows + 127) / 128 * 128 : g.rows;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = r < g.rows ? g.columns : 0; c < columns; ++c) *scale_address(g, r, c) = 0;
}

// ---- groups -----------------------------------------------------------------------------------------------------------------

// Rows of a job or of codes. Values of groups are taken as they must be: never falling, from 0 to at most all rows.
struct fp8_groups {
  const void* data;
  cqsa_dtype dtype;
  int64_t stride, count, rows;
  int64_t begin(int64_t g) const {
    const int64_t at = index_of(data, dtype, g * stride);
    return at < 0 ? 0 : at > rows ? rows : at;
  }
  int64_t end(int64_t g) const { return begin(g + 1) < begin(g) ? begin(g) : begin(g + 1); }
};

// ---- elements of a quantization -----------------------------------------------------------------------------------------------

inline float silu(float x) { return x / (1.0f + std::exp(-x)); }

inline float job_element(const cqsa_fp8_job& job, int64_t i, int64_t j) {
  float x = load_f32(matrix_address(job.x, job.rows, i, j), job.x.dtype);
  if (job.x_scale_inv.data) x *= load_scale(job.x_scale_inv, i / job.x_scale_inv.block[0], j / job.x_scale_inv.block[1]);
  if (job.up.data) x = silu(x) * load_f32(matrix_address(job.up, job.rows, i, j), job.up.dtype);
  return x;
}

// Magnitude as bits, which are in the order of magnitudes, NaN last; 0 for what does not count.
inline uint32_t magnitude_bits(float x, int32_t nan_policy) {
  const uint32_t mag = fp8::bits_of(x) & 0x7FFFFFFFu;
  return nan_policy == CQSA_FP8_NAN_IGNORE && mag > 0x7F7FFFFFu ? 0 : mag;
}

inline float amax_of(uint32_t bits) { return plain_nan(fp8::float_of(bits)); }

inline fp8::scale_rule job_rule(const cqsa_fp8_job& job, const cqsa_fp8_output& side) {
  const bool pow2 = (job.flags & CQSA_FP8_POW2) || has_power_scales(side.scale_inv);
  return {side.codes.dtype, job.margin, pow2, job.eps, job.amax_limit};
}

// The scale of a block that is not found in this call.
inline fp8::scale_pair given_scale(const cqsa_fp8_job& job, const cqsa_fp8_output& side, int64_t r, int64_t c) {
  if (job.source == CQSA_FP8_RING) return fp8::scale_times(static_cast<const fp8::ring_state*>(job.ring.state)->scale, side.ratio);
  if (side.scale_in.data) return fp8::scale_times(load_scale(side.scale_in, r, c), 1.0f);
  const cqsa_fp8_output& other = &side == &job.row ? job.transposed : job.row;
  return fp8::scale_times(load_scale(other.scale_in, r, c), side.ratio);
}

// Largest magnitude of a code, as in dtype.h.
inline uint32_t largest_code(cqsa_dtype format) { return format == CQSA_DTYPE_E4M3FN ? 0x7E : format == CQSA_DTYPE_E5M2 ? 0x7B : 0x7F; }

// ... and what stands for a finite x, rounded at random.
inline uint8_t code_at_random(float x, cqsa_dtype format, bool saturate, uint32_t word) {
  if (x != x) return f32_to_code(x, format, saturate);
  const uint32_t mag = fp8::magnitude_at_random(x, format, word);
  if (mag > largest_code(format)) return f32_to_code(std::copysign(INFINITY, x), format, saturate);
  if (mag == 0 && (format == CQSA_DTYPE_E4M3FNUZ || format == CQSA_DTYPE_E5M2FNUZ)) return 0;
  return static_cast<uint8_t>(mag | (std::signbit(x) ? 0x80u : 0u));
}

// Whether a finite x is too large for the format, rounded to nearest.
inline bool overflows(float x, cqsa_dtype format) {
  const uint8_t code = f32_to_code(x, format, false);
  const bool fnuz = format == CQSA_DTYPE_E4M3FNUZ || format == CQSA_DTYPE_E5M2FNUZ;
  return fnuz ? code == 0x80 : (code & 0x7Fu) > largest_code(format);
}

}  // namespace cqsa::cpu
