// SPDX-License-Identifier: Apache-2.0
// FP8 for the tests, written from the text of cqsa.h sections 13 and 14: tensors of any layout, one loop over the elements of a block,
// scales and random rounding in double. Of the library it knows the conversions of src/dtype.h alone.
#pragma once
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#endif

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cqsa.h"
#include "dtype.h"

namespace fp8_test {

using dice = std::mt19937_64;
inline int64_t between(dice& d, int64_t low, int64_t high) { return low + static_cast<int64_t>(d() % static_cast<uint64_t>(high - low + 1)); }
inline bool chance(dice& d, int percent) { return between(d, 1, 100) <= percent; }
template <class T>
T one_of(dice& d, std::initializer_list<T> list) {
  return list.begin()[between(d, 0, static_cast<int64_t>(list.size()) - 1)];
}

constexpr cqsa_dtype formats[] = {CQSA_DTYPE_E4M3FN, CQSA_DTYPE_E5M2, CQSA_DTYPE_E4M3FNUZ, CQSA_DTYPE_E5M2FNUZ};
inline bool is_format(cqsa_dtype t) { return std::find(formats, formats + 4, t) != formats + 4; }
inline int64_t bytes_of(cqsa_dtype t) { return (t >> 8 & 0xFF) / 8; }

inline float decode_code(cqsa_dtype format, uint8_t code) {
  switch (format) {
    case CQSA_DTYPE_E4M3FN: return cqsa::e4m3fn_to_f32(code);
    case CQSA_DTYPE_E5M2: return cqsa::e5m2_to_f32(code);
    case CQSA_DTYPE_E4M3FNUZ: return cqsa::e4m3fnuz_to_f32(code);
    default: return cqsa::e5m2fnuz_to_f32(code);
  }
}

inline uint8_t encode_code(cqsa_dtype format, float x, bool saturate) {
  switch (format) {
    case CQSA_DTYPE_E4M3FN: return cqsa::f32_to_e4m3fn(x, saturate);
    case CQSA_DTYPE_E5M2: return cqsa::f32_to_e5m2(x, saturate);
    case CQSA_DTYPE_E4M3FNUZ: return cqsa::f32_to_e4m3fnuz(x, saturate);
    default: return cqsa::f32_to_e5m2fnuz(x, saturate);
  }
}

inline double fp8_max(cqsa_dtype format) { return format == CQSA_DTYPE_E4M3FN ? 448 : format == CQSA_DTYPE_E4M3FNUZ ? 240 : 57344; }

// ---- tensors ----------------------------------------------------------------------------------------------------------------

template <class T>
T load(const char* p) {
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline double get_number(const char* p, cqsa_dtype t) {
  if (is_format(t)) return decode_code(t, load<uint8_t>(p));
  switch (t) {
    case CQSA_DTYPE_F32: return load<float>(p);
    case CQSA_DTYPE_F16: return cqsa::f16_to_f32(load<uint16_t>(p));
    case CQSA_DTYPE_BF16: return cqsa::bf16_to_f32(load<uint16_t>(p));
    case CQSA_DTYPE_I32: return load<int32_t>(p);
    case CQSA_DTYPE_I64: return static_cast<double>(load<int64_t>(p));
    case CQSA_DTYPE_E8M0FNU: return cqsa::e8m0fnu_to_f32(load<uint8_t>(p));
    default: return load<uint8_t>(p);
  }
}

inline void put_number(char* p, cqsa_dtype t, double x) {
  const auto put = [p](auto v) { std::memcpy(p, &v, sizeof v); };
  const auto f = static_cast<float>(x);
  if (is_format(t)) return put(encode_code(t, f, true));
  switch (t) {
    case CQSA_DTYPE_F32: return put(f);
    case CQSA_DTYPE_F16: return put(cqsa::f32_to_f16(f));
    case CQSA_DTYPE_BF16: return put(cqsa::f32_to_bf16(f));
    case CQSA_DTYPE_I32: return put(static_cast<int32_t>(x));
    case CQSA_DTYPE_I64: return put(static_cast<int64_t>(x));
    case CQSA_DTYPE_E8M0FNU: return put(cqsa::f32_to_e8m0fnu(f));
    default: return put(static_cast<uint8_t>(x));
  }
}

enum class how { compact, any };

// A tensor in exactly the memory that it reaches; what lies between its elements holds a pattern that nothing may change.
struct box {
  cqsa_dtype dtype = CQSA_DTYPE_NONE;
  std::vector<int64_t> shape, strides;
  std::vector<char> memory, before;
  int64_t first = 0;  // byte of element 0
  cqsa_tensor view{};

  box() = default;
  box(cqsa_dtype type, std::vector<int64_t> sizes, dice& d, how layout = how::any) : dtype(type), shape(std::move(sizes)), strides(shape.size()) {
    std::vector<size_t> order(shape.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    const bool any = layout == how::any;
    if (any && chance(d, 40)) std::shuffle(order.begin(), order.end(), d);
    int64_t stride = any && chance(d, 15) ? 2 : 1, low = 0;
    for (size_t n = order.size(); n-- > 0;) {
      const size_t a = order[n];
      const int64_t size = std::max<int64_t>(shape[a], 1);
      const bool backwards = any && chance(d, 10);
      strides[a] = backwards ? -stride : stride;
      if (backwards) low += stride * (size - 1);
      stride = stride * size + (any && chance(d, 25) ? between(d, 1, 3) : 0);
    }
    first = low * bytes_of(dtype) + (any && chance(d, 15) ? 1 : 0);
    memory.resize(static_cast<size_t>(first + stride * bytes_of(dtype)) + 1);
    for (char& c : memory) c = static_cast<char>(d());
    before = memory;
  }
  bool there() const { return dtype != CQSA_DTYPE_NONE; }
  int64_t count() const {
    int64_t n = 1;
    for (const int64_t s : shape) n *= s;
    return n;
  }
  int64_t byte_of(int64_t index) const {
    int64_t at = 0;
    for (size_t a = shape.size(); a-- > 0; index /= shape[a]) at += index % shape[a] * strides[a];
    return first + at * bytes_of(dtype);
  }
  char* at(int64_t index) { return memory.data() + byte_of(index); }
  const char* at(int64_t index) const { return memory.data() + byte_of(index); }
  double get(int64_t index) const { return get_number(at(index), dtype); }
  void set(int64_t index, double x) { put_number(at(index), dtype, x); }
  uint8_t byte(int64_t index) const { return load<uint8_t>(at(index)); }
  float f32(int64_t index) const { return static_cast<float>(get(index)); }
  uint32_t bits(int64_t index) const { return load<uint32_t>(at(index)); }
  void freeze() { before = memory; }
  bool unchanged() const { return memory == before; }
  // Whether only elements have changed.
  bool padding_is_whole() const {
    std::vector<char> now = memory;
    for (int64_t i = 0; i < count(); ++i) std::memcpy(now.data() + byte_of(i), before.data() + byte_of(i), static_cast<size_t>(bytes_of(dtype)));
    return now == before;
  }
  const cqsa_tensor* tensor() {
    if (!there()) return nullptr;
    view = {memory.data(), CQSA_DEVICE_CPU, 0, static_cast<int32_t>(shape.size()), dtype, shape.data(), strides.data(), static_cast<uint64_t>(first)};
    return &view;
  }
};

// Normal, or of a hundred so many that are hard.
inline double draw_value(dice& d, int wild, double size) {
  const double normal = std::normal_distribution<double>()(d) * size;
  if (!chance(d, wild)) return normal;
  const double specials[] = {0, -0.0, std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity(),
                             std::numeric_limits<double>::quiet_NaN(), 1e-41, 6e-8, 1e4, -3e38, 1e-30};
  return specials[between(d, 0, 9)];
}

// ---- scales -----------------------------------------------------------------------------------------------------------------

struct scales {
  float scale, scale_inv;
};
struct rule {
  cqsa_dtype format;
  int margin;
  bool pow2;
  float eps, limit;
};

inline float clamp_scale(float x) { return std::clamp(x, 0x1p-126f, std::numeric_limits<float>::max()); }

inline scales scale_of(float amax, const rule& r) {
  if (!(amax >= r.eps) && !std::isnan(amax)) amax = r.eps;
  if (r.limit > 0 && amax > r.limit) amax = r.limit;
  if (amax == 0 || !std::isfinite(amax)) return {1, 1};
  const double largest = fp8_max(r.format);
  if (r.pow2) {
    int e = -300;
    while (std::ldexp(largest, e) < amax) ++e;
    e = std::clamp(e + r.margin, -127, 126);
    return {std::ldexp(1.0f, -e), std::ldexp(1.0f, e)};
  }
  const float scale = clamp_scale(static_cast<float>(std::ldexp(largest, -r.margin)) / amax);
  return {scale, 1.0f / scale};
}

inline int64_t blocks(int64_t size, int64_t block) { return block == 0 ? 1 : (size + block - 1) / block; }

// ---- random rounding --------------------------------------------------------------------------------------------------------

// Philox 4x32-10 from the paper.
inline void philox(uint64_t key, uint64_t counter, uint32_t out[4]) {
  uint32_t x[4] = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0};
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int n = 0; n < 10; ++n) {
    const uint64_t a = uint64_t{0xD2511F53} * x[0], b = uint64_t{0xCD9E8D57} * x[2];
    const uint32_t y[4] = {static_cast<uint32_t>(b >> 32) ^ x[1] ^ k0, static_cast<uint32_t>(b), static_cast<uint32_t>(a >> 32) ^ x[3] ^ k1,
                           static_cast<uint32_t>(a)};
    std::copy(y, y + 4, x);
    k0 += 0x9E3779B9, k1 += 0xBB67AE85;
  }
  std::copy(x, x + 4, out);
}

inline uint32_t random_word(int64_t seed, int64_t offset, int64_t e) {
  uint32_t words[4];
  philox(static_cast<uint64_t>(seed), static_cast<uint64_t>(offset) + static_cast<uint64_t>(e) / 4, words);
  return words[e % 4];
}

// y, rounded up in magnitude with the probability of what is cut off; too_large: past the largest code.
inline double round_at_random(float y, cqsa_dtype format, uint32_t word, bool& too_large) {
  const bool wide = format == CQSA_DTYPE_E5M2 || format == CQSA_DTYPE_E5M2FNUZ;
  const bool fnuz = format == CQSA_DTYPE_E4M3FNUZ || format == CQSA_DTYPE_E5M2FNUZ;
  const int mantissa = wide ? 2 : 3, smallest = 1 - ((wide ? 15 : 7) + (fnuz ? 1 : 0));  // exponent of the smallest normal number
  const double size = std::fabs(static_cast<double>(y));
  too_large = std::isinf(y);
  if (too_large || size == 0) return y;
  const double unit = std::ldexp(1.0, std::max(std::ilogb(size), smallest) - mantissa);
  const double down = std::floor(size / unit), cut = size / unit - down;
  const bool up = static_cast<uint64_t>(word) + static_cast<uint64_t>(std::floor(std::ldexp(cut, 32))) >= uint64_t{1} << 32;
  const double result = (down + up) * unit;
  too_large = result > fp8_max(format);
  return std::copysign(result, y);
}

struct code_result {
  uint8_t code;
  bool saturated;  // finite x, too large
};

inline code_result quantize_element(float x, float scale, cqsa_dtype format, bool saturate, const uint32_t* word) {
  const volatile float product = x * scale;
  const float y = product;
  if (std::isnan(x)) return {encode_code(format, x, saturate), false};
  bool too_large = false;
  if (word) {
    const double rounded = round_at_random(y, format, *word, too_large);
    const float infinite = std::copysign(std::numeric_limits<float>::infinity(), y);
    return {encode_code(format, too_large ? infinite : static_cast<float>(rounded), saturate), too_large && std::isfinite(x)};
  }
  const float back = decode_code(format, encode_code(format, y, false));
  too_large = !std::isfinite(back);
  return {encode_code(format, y, saturate), too_large && std::isfinite(x)};
}

// ---- the ring ---------------------------------------------------------------------------------------------------------------

struct ring_model {
  rule r;
  bool most_recent;
  std::vector<float> history;
  int index = 0, refused = 0;
  float staged = 0;
  scales now{1, 1};

  ring_model(const rule& of, int length, bool recent, float amax)
      : r(of), most_recent(recent), history(static_cast<size_t>(length), 0.0f), now(scale_of(amax, of)) {}
  void take(float amax) {
    if (!std::isfinite(amax) || amax < 0) return void(++refused);
    history[static_cast<size_t>(index)] = amax;
    index = (index + 1) % static_cast<int>(history.size());
    const float from = most_recent ? amax : *std::max_element(history.begin(), history.end());
    if (from > 0) now = scale_of(from, r);
  }
  void stage(float amax) {
    if (!std::isfinite(amax)) return void(++refused);
    staged = std::max(staged, amax);
  }
  void fold() {
    if (staged != 0) take(staged);
    staged = 0;
  }
};

}  // namespace fp8_test
