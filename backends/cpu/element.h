// SPDX-License-Identifier: Apache-2.0
// What the reference needs to see the operands as the mathematics does: an element as a double, and who sees whom.
#pragma once

#include "backends/cqsa_backend.h"
#include "dtype.h"

#include <cmath>
#include <cstdint>
#include <cstring>

namespace cqsa::cpu {

inline char* element_address(const cqsa_view& x, int64_t b, int64_t h, int64_t row, int64_t c) {
  const int64_t bytes = ((x.dtype >> 8) & 0xff) / 8;
  return static_cast<char*>(x.data) + bytes * (b * x.stride[0] + h * x.stride[1] + row * x.stride[2] + c * x.stride[3]);
}

template <class T> T load_as(const char* p) {
  T x;
  std::memcpy(&x, p, sizeof x);  // any alignment
  return x;
}

inline double element(const cqsa_view& x, int64_t b, int64_t h, int64_t row, int64_t c) {
  const char* p = element_address(x, b, h, row, c);
  switch (x.dtype) {
    case CQSA_DTYPE_F64: return load_as<double>(p);
    case CQSA_DTYPE_F32: return load_as<float>(p);
    case CQSA_DTYPE_F16: return f16_to_f64(load_as<uint16_t>(p));
    case CQSA_DTYPE_BF16: return bf16_to_f64(load_as<uint16_t>(p));
    case CQSA_DTYPE_I8: return load_as<int8_t>(p);
    case CQSA_DTYPE_E4M3FN: return e4m3fn_to_f32(load_as<uint8_t>(p));
    case CQSA_DTYPE_E5M2: return e5m2_to_f32(load_as<uint8_t>(p));
    default: return load_as<uint8_t>(p);
  }
}

inline void store_element(const cqsa_view& x, int64_t b, int64_t h, int64_t row, int64_t c, double value) {
  char* p = element_address(x, b, h, row, c);
  const float f = static_cast<float>(value);
  const uint16_t half = x.dtype == CQSA_DTYPE_BF16 ? f64_to_bf16(value) : f64_to_f16(value);
  if (x.dtype == CQSA_DTYPE_F64) std::memcpy(p, &value, 8);
  else if (x.dtype == CQSA_DTYPE_F32) std::memcpy(p, &f, 4);
  else std::memcpy(p, &half, 2);
}

// Scale of channel c of a key or value.
inline double scale_of(const cqsa_view& scale, int32_t kind, int64_t group, int64_t b, int64_t g, int64_t row, int64_t c) {
  switch (kind) {
    case CQSA_SCALE_TENSOR: return element(scale, 0, 0, 0, 0);
    case CQSA_SCALE_HEAD: return element(scale, 0, g, 0, 0);
    case CQSA_SCALE_TOKEN: return element(scale, b, g, row, 0);
    case CQSA_SCALE_GROUP: return element(scale, b, g, row, c / group);
    default: return 1.0;
  }
}

// Does query position i see key position j under the causal rule and the window? off as section 8 of cqsa.h defines it.
inline bool visible(const cqsa_attention_leaf& leaf, int64_t i, int64_t j, int64_t off) {
  const int64_t ahead = j - (i + off);
  if (leaf.causal != CQSA_CAUSAL_NONE && ahead > 0) return false;
  if (leaf.window_right >= 0 && ahead > leaf.window_right) return false;
  if (leaf.window_left >= 0 && -ahead > leaf.window_left) return false;
  return true;
}

inline int64_t index_of(const void* array, cqsa_dtype type, int64_t i) {
  const char* const bytes = static_cast<const char*>(array);  // at any address
  return type == CQSA_DTYPE_I64 ? load_as<int64_t>(bytes + 8 * i) : load_as<int32_t>(bytes + 4 * i);
}

// Where key n of a range really lies: batch item or page, and row in it. False on page -1.
inline bool locate(const cqsa_attention_leaf& a, int64_t b, int64_t key, int64_t* item, int64_t* row) {
  *item = b, *row = key;
  if (!a.page_table) return true;
  *item = index_of(a.page_table, CQSA_DTYPE_I32, b * a.page_table_stride[0] + key / a.page_size * a.page_table_stride[1]);
  *row = key % a.page_size;
  return *item >= 0;
}

// The queries and keys of one batch item, or of the rectangles that share their queries.
struct query_block {
  int64_t q_pos, q_len, q_row, mask_row, off, mask_col_shift;
  const cqsa_rect* ranges;
  int64_t num_ranges;
};

// Block n of batch item b; false past the last.
inline bool find_block(const cqsa_attention_leaf& a, int64_t b, int64_t* next, query_block* t, cqsa_rect* whole) {
  if (a.rects) {
    if (*next >= a.num_rects) return false;
    const cqsa_rect& r = a.rects[*next];
    *t = {r.q_pos, r.q_len, r.q_row, r.q_row, a.seqlen_k - a.seqlen_q, 0, &r, 0};
    for (; *next < a.num_rects && a.rects[*next].q_row == r.q_row && a.rects[*next].q_len == r.q_len; ++*next)
      ++t->num_ranges;
  } else {
    if ((*next)++ > 0) return false;
    const int64_t q0 = a.cu_seqlens_q ? index_of(a.cu_seqlens_q, a.index_dtype, b) : 0;
    const int64_t k0 = a.cu_seqlens_k ? index_of(a.cu_seqlens_k, a.index_dtype, b) : 0;
    const int64_t q_len = a.cu_seqlens_q ? index_of(a.cu_seqlens_q, a.index_dtype, b + 1) - q0 : a.seqlen_q;
    int64_t k_len = a.cu_seqlens_k ? index_of(a.cu_seqlens_k, a.index_dtype, b + 1) - k0 : a.seqlen_k;
    if (a.seqused_k) k_len = index_of(a.seqused_k, a.seqused_dtype, b);
    *whole = {0, 0, q_len, k_len, q0, k0, 0};
    *t = {0, q_len, q0, 0, k_len - q_len, -k0, whole, 1};
  }
  if (a.causal == CQSA_CAUSAL_TOP_LEFT) t->off = 0;
  return true;
}

}  // namespace cqsa::cpu
