// SPDX-License-Identifier: Apache-2.0
// One row to or from a cache, and one rotation; section 12 of cqsa.h says what each bit has to be. Every step is an operation in
// f32 that is rounded by itself, so vectors of any width give the same bits; the files are compiled without contraction. The loops
// are plain: the compiler vectorises them for the flags of the file that includes this.
#pragma once

#include "kv_job.h"
#include "convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cqsa::cpu {
namespace {
namespace HWY_NAMESPACE {

constexpr uint32_t infinite_bits = 0x7f800000u;
constexpr uint16_t f16_nan = 0x7e00;
constexpr int64_t block_channels = 32, block_bytes = 18;

static inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

static inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// Which NaN comes out of an operation differs between machines.
static inline void make_nan_plain(float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = bits_of(x[i]);
    x[i] = float_of((bits & 0x7fffffffu) > infinite_bits ? 0x7fc00000u : bits);
  }
}

// Bits of the largest magnitude: as integers magnitudes are in order, and NaN is above infinity.
static inline uint32_t largest_bits(const float* x, int64_t n) {
  uint32_t most = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t mag = bits_of(x[i]) & 0x7fffffffu;
    most = mag > most ? mag : most;
  }
  return most;
}

// f16() of section 12.
static inline uint16_t scale_to_f16(float x, const scalar_ops* ops) {
  return ops->f32_to_f16(x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x);
}

static void copy_elements(const char* from, int64_t from_stride, char* to, int64_t to_stride, int64_t bytes, int64_t n) {
  if (from_stride == 1 && to_stride == 1) memcpy(to, from, size_t(n * bytes));
  else if (bytes == 4) for (int64_t i = 0; i < n; ++i) memcpy(to + 4 * to_stride * i, from + 4 * from_stride * i, 4);
  else for (int64_t i = 0; i < n; ++i) memcpy(to + 2 * to_stride * i, from + 2 * from_stride * i, 2);
}

// ---- int8 -------------------------------------------------------------------------------------------------------------------

// Limits before rounding are the same as behind it, and keep what is rounded small. n <= 128.
static inline void encode_codes(const float* x, float scale, int64_t n, int8_t* codes) {
  float y[128 + lanes];
  memcpy(y, x, size_t(n) * 4);
  memset(y + n, 0, sizeof(float) * lanes);
  for (int64_t i = 0; i < n; i += lanes) {
    const vf limited = vmin(set(127.0f), vmax(set(-127.0f), div(loadu(y + i), set(scale))));
    storeu(round_int(limited), y + i);
  }
  for (int64_t i = 0; i < n; ++i) codes[i] = int8_t(int32_t(y[i]));
}

// Codes of a group, and its scale.
static inline uint16_t encode_group(const float* x, int64_t n, const scalar_ops* ops, int8_t* codes) {
  const uint32_t most = largest_bits(x, n);
  const uint16_t scale = most >= infinite_bits ? f16_nan : scale_to_f16(float_of(most) / 127.0f, ops);
  if (most >= infinite_bits || scale == 0) memset(codes, 0, size_t(n));
  else encode_codes(x, ops->f16_to_f32(scale), n, codes);
  return scale;
}

static void store_codes(const int8_t* codes, int64_t n, char* to, int64_t stride) {
  if (stride == 1) memcpy(to, codes, size_t(n));
  else for (int64_t i = 0; i < n; ++i) to[i * stride] = char(codes[i]);
}

static void append_groups(const cqsa_kv_leaf* leaf, const float* x, int64_t n, char* pool, char* scale, kv_scratch* mem) {
  int8_t* const codes = reinterpret_cast<int8_t*>(mem->raw);
  const int64_t group = leaf->kv_group;
  for (int64_t c = 0; c < n; c += group) {
    const uint16_t bits = encode_group(x + c, min64(group, n - c), mem->ops, codes + c);
    memcpy(scale + c / group * leaf->scale.stride[3] * 2, &bits, 2);
  }
  store_codes(codes, n, pool, leaf->pool.stride[3]);
}

static void gather_groups(const cqsa_kv_leaf* leaf, const char* pool, const char* scale, int64_t n, kv_scratch* mem) {
  load_row(pool, CQSA_DTYPE_I8, leaf->pool.stride[3], n, mem->raw, mem->row);
  const int64_t group = leaf->kv_group;
  for (int64_t c = 0; c < n; c += group) {
    uint16_t bits;
    memcpy(&bits, scale + c / group * leaf->scale.stride[3] * 2, 2);
    const float factor = mem->ops->f16_to_f32(bits);
    const int64_t end = min64(c + group, n);
    for (int64_t i = c; i < end; ++i) mem->row[i] *= factor;
  }
}

// ---- rotation ---------------------------------------------------------------------------------------------------------------

static inline void butterfly(float& a, float& b) {
  const float sum = a + b, difference = a - b;
  a = sum, b = difference;
}

// The steps 1, 2, 4 of eight neighbours.
static inline void rotate_eight(float* x) {
  for (int i = 0; i < 8; i += 2) butterfly(x[i], x[i + 1]);
  for (int i = 0; i < 8; i += 4) butterfly(x[i], x[i + 2]), butterfly(x[i + 1], x[i + 3]);
  for (int i = 0; i < 4; ++i) butterfly(x[i], x[i + 4]);
}

static void rotate_few(float* x, int64_t n, float factor) {
  for (int64_t h = 1; h < n; h *= 2)
    for (int64_t i = 0; i < n; ++i)
      if (!(i & h)) butterfly(x[i], x[i + h]);
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

static void rotate(float* x, int64_t n, float factor) {
  if (n < 8) return rotate_few(x, n, factor);
  for (int64_t i = 0; i < n; i += 8) rotate_eight(x + i);
  for (int64_t h = 8; h < n; h *= 2)
    for (int64_t i = 0; i < n; i += 2 * h) {
      float* HWY_RESTRICT low = x + i;
      float* HWY_RESTRICT high = x + i + h;
      for (int64_t j = 0; j < h; ++j) butterfly(low[j], high[j]);
    }
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

// 1/sqrt(n) in f32: n is a power of two.
static inline float rotation_factor(int64_t n) {
  float factor = 1;
  for (; n >= 4; n /= 4) factor *= 0.5f;
  return n == 2 ? factor * 0.70710678118654752f : factor;
}

// ---- q4_0 -------------------------------------------------------------------------------------------------------------------

static inline float largest_of(const float* x, uint32_t most) {
  if (most == 0) return 0;
  int64_t i = 0;
  while ((bits_of(x[i]) & 0x7fffffffu) != most) ++i;
  return x[i];
}

// In f64 the product is exact, and so is the sum wherever the whole number depends on it: this is the fused operation.
static inline void encode_nibbles(const float* x, float inverse, uint8_t* nibbles) {
  for (int64_t i = 0; i < block_channels; ++i) {
    const int32_t code = int32_t(float(double(x[i]) * double(inverse) + 8.5));
    nibbles[i] = uint8_t(code > 15 ? 15 : code);
  }
}

static void encode_block(const float* x, const scalar_ops* ops, char* to) {
  const uint32_t most = largest_bits(x, block_channels);
  const float d = largest_of(x, most) / -8.0f;
  float inverse = 1.0f / d;
  if ((bits_of(inverse) & 0x7fffffffu) >= infinite_bits) inverse = 0;
  const bool wild = most >= infinite_bits;
  const uint16_t bits = wild ? f16_nan : scale_to_f16(d, ops);
  uint8_t nibbles[block_channels], bytes[block_channels / 2];
  if (wild) memset(nibbles, 8, sizeof nibbles);
  else encode_nibbles(x, inverse, nibbles);
  for (int64_t i = 0; i < block_channels / 2; ++i) bytes[i] = uint8_t(nibbles[i] | nibbles[i + block_channels / 2] << 4);
  memcpy(to, &bits, 2);
  memcpy(to + 2, bytes, sizeof bytes);
}

static void decode_block(const char* from, const scalar_ops* ops, float* to) {
  uint16_t bits;
  uint8_t bytes[block_channels / 2];
  memcpy(&bits, from, 2);
  memcpy(bytes, from + 2, sizeof bytes);
  const float d = ops->f16_to_f32(bits);
  for (int64_t i = 0; i < block_channels / 2; ++i) {
    to[i] = d * float(int32_t(bytes[i] & 15) - 8);
    to[i + block_channels / 2] = d * float(int32_t(bytes[i] >> 4) - 8);
  }
}

static void decode_blocks(const char* from, int64_t n, kv_scratch* mem) {
  for (int64_t i = 0; i < n; i += block_channels) decode_block(from + i / block_channels * block_bytes, mem->ops, mem->row + i);
}

// ---- rows -------------------------------------------------------------------------------------------------------------------

static void append_rotated(const cqsa_kv_leaf* leaf, const char* x, char* pool, kv_scratch* mem) {
  const int64_t n = leaf->head_dim;
  load_row(x, leaf->x.dtype, leaf->x.stride[3], n, mem->raw, mem->row);
  rotate(mem->row, n, rotation_factor(n));
  for (int64_t c = 0; c < n; c += block_channels) encode_block(mem->row + c, mem->ops, pool + c / block_channels * block_bytes);
}

static void append_row(const cqsa_kv_leaf* leaf, const char* x, char* pool, char* scale, kv_scratch* mem) {
  const cqsa_dtype from = leaf->x.dtype, to = leaf->pool.dtype;
  const int64_t x_bytes = element_bytes(from), x_step = leaf->x.stride[3], pool_step = leaf->pool.stride[3];
  if (leaf->format == CQSA_KV_FORMAT_Q4_0) return append_rotated(leaf, x, pool, mem);
  if (from == to) return copy_elements(x, x_step, pool, pool_step, x_bytes, leaf->head_dim);
  for (int64_t c = 0; c < leaf->head_dim; c += kv_most_channels) {
    const int64_t n = min64(kv_most_channels, leaf->head_dim - c);
    char* const at = pool + c * pool_step * element_bytes(to);
    load_row(x + c * x_step * x_bytes, from, x_step, n, mem->raw, mem->row);
    if (to == CQSA_DTYPE_I8) {
      append_groups(leaf, mem->row, n, at, scale + c / leaf->kv_group * leaf->scale.stride[3] * 2, mem);
    } else {
      make_nan_plain(mem->row, n);
      store_row(mem->row, to, pool_step, n, mem->ops, mem->raw, at);
    }
  }
}

static void gather_row(const cqsa_kv_leaf* leaf, const char* pool, const char* scale, char* x, kv_scratch* mem) {
  const cqsa_dtype from = leaf->pool.dtype, to = leaf->x.dtype;
  const int64_t x_bytes = element_bytes(to), x_step = leaf->x.stride[3], pool_step = leaf->pool.stride[3];
  const bool blocks = leaf->format == CQSA_KV_FORMAT_Q4_0;
  if (from == to) return copy_elements(pool, pool_step, x, x_step, x_bytes, leaf->head_dim);
  for (int64_t c = 0; c < leaf->head_dim; c += kv_most_channels) {
    const int64_t n = min64(kv_most_channels, leaf->head_dim - c);
    const char* const at = pool + c * pool_step * element_bytes(from);
    if (blocks) decode_blocks(pool, n, mem);
    else if (from == CQSA_DTYPE_I8) gather_groups(leaf, at, scale + c / leaf->kv_group * leaf->scale.stride[3] * 2, n, mem);
    else load_row(at, from, pool_step, n, mem->raw, mem->row);
    make_nan_plain(mem->row, n);
    store_row(mem->row, to, x_step, n, mem->ops, mem->raw, x + c * x_step * x_bytes);
  }
}

static void rotate_row(const cqsa_hadamard_leaf* leaf, const char* x, char* out, kv_scratch* mem) {
  const int64_t n = leaf->n;
  load_row(x, leaf->dtype_x, leaf->x_stride[3], n, mem->raw, mem->row);
  rotate(mem->row, n, rotation_factor(n));
  make_nan_plain(mem->row, n);
  store_row(mem->row, leaf->dtype_out, leaf->out_stride[3], n, mem->ops, mem->raw, out);
}

}  // namespace HWY_NAMESPACE
}  // namespace
}  // namespace cqsa::cpu
HWY_AFTER_NAMESPACE();
