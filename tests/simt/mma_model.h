// SPDX-License-Identifier: Apache-2.0
// Models of the matrix instructions: what each lane holds, and how sums are rounded. Plain C++17 without the harness, so that
// device_check.cu can hold them against a GPU.
//
// Rounding. NVIDIA documents only that products are exact and sums are made "with at least single precision". Measured (Fasi,
// Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ CS 2021; Khattak, Mikaitis, "Accurate models of
// NVIDIA tensor cores", arXiv 2512.07004): the products of `block` neighbours in k and the accumulator are aligned to the largest
// exponent among them, where a product counts with the sum of its factors' exponents; each is cut (toward zero) below
// 2^(that exponent - 23 - extra_bits); the sum of what is left is exact, and is cut to f32. Subnormals count in full. The next
// block begins with that f32.
//                   block  extra bits
//   sm_70 (V100)      4        0
//   sm_75 (T4)        4        1
//   sm_80 (A100)      8        1
//   sm_90 (H100)     16        2
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace cqsa::simt {

struct mma_numerics {
  int block;  // 0: the exact sum, rounded once to nearest; -1: a chain of fused multiply-adds, as where m8n8k4 is emulated
  int extra_bits;
};
constexpr mma_numerics sm70_numerics{4, 0}, sm75_numerics{4, 1}, sm80_numerics{8, 1}, sm90_numerics{16, 2}, exact_numerics{0, 0}, chain_numerics{-1, 0};

enum class half_kind { f16, bf16 };

// (-1)^negative significand 2^(exponent - fraction_bits); a subnormal is not normalised, as in the hardware.
struct term {
  int64_t significand = 0;
  int exponent = 0, fraction_bits = 0;
  bool negative = false, infinite = false, nan = false;
  double value() const {
    if (nan) return std::numeric_limits<double>::quiet_NaN();
    const double m = infinite ? std::numeric_limits<double>::infinity() : std::ldexp(double(significand), exponent - fraction_bits);
    return negative ? -m : m;
  }
};

inline term split(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1), top = (1u << exponent_bits) - 1, e = bits >> mantissa_bits & top;
  const int bias = int(top / 2);
  term t;
  t.negative = bits >> (exponent_bits + mantissa_bits) & 1;
  t.fraction_bits = mantissa_bits;
  t.exponent = (e ? int(e) : 1) - bias;
  t.significand = int64_t(e ? mantissa | 1u << mantissa_bits : mantissa);
  t.infinite = e == top && mantissa == 0, t.nan = e == top && mantissa != 0;
  return t;
}
inline term split_half(uint16_t bits, half_kind kind) { return kind == half_kind::f16 ? split(bits, 5, 10) : split(bits, 8, 7); }
inline term split_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return split(bits, 8, 23);
}
inline term product(const term& a, const term& b) {
  term t;
  t.significand = a.significand * b.significand;
  t.exponent = a.exponent + b.exponent, t.fraction_bits = a.fraction_bits + b.fraction_bits;
  t.negative = a.negative != b.negative;
  const bool a_zero = a.significand == 0, b_zero = b.significand == 0;
  t.nan = a.nan || b.nan || (a.infinite && b_zero) || (b.infinite && a_zero);
  t.infinite = !t.nan && (a.infinite || b.infinite);
  return t;
}

// sum * 2^exponent as f32, cut toward zero.
inline float cut_to_float(int64_t sum, int exponent) {
  uint64_t m = uint64_t(sum < 0 ? -sum : sum);
  while (m >> 24 || (m && exponent < -149)) m >>= 1, ++exponent;
  const float x = float(std::ldexp(double(m), exponent));
  return sum < 0 ? -x : x;
}

// One block: terms[count] and the accumulator.
inline float add_block(const term* terms, int count, float accumulator, int extra_bits) {
  const term c = split_float(accumulator);
  double special = 0;
  bool any_special = false, any = false;
  int top = 0;
  auto look = [&](const term& t) {
    if (t.nan || t.infinite) any_special = true, special += t.value();
    else if (t.significand && (!any || t.exponent > top)) any = true, top = t.exponent;
  };
  for (int i = 0; i < count; ++i) look(terms[i]);
  look(c);
  if (any_special) return float(special);
  if (!any) return 0;
  const int unit = top - 23 - extra_bits;  // exponent of the last bit that is kept
  int64_t sum = 0;
  auto add = [&](const term& t) {
    const int shift = t.exponent - t.fraction_bits - unit;
    const int64_t m = shift >= 0 ? t.significand << (t.significand ? shift : 0) : shift > -63 ? t.significand >> -shift : 0;
    sum += t.negative ? -m : m;
  };
  for (int i = 0; i < count; ++i) add(terms[i]);
  add(c);
  return cut_to_float(sum, unit);
}

// accumulator + sum of a[i] b[i], i < count <= 16.
inline float dot(const uint16_t* a, const uint16_t* b, int count, float accumulator, half_kind kind, mma_numerics how) {
  term terms[16];
  for (int i = 0; i < count; ++i) terms[i] = product(split_half(a[i], kind), split_half(b[i], kind));
  if (how.block == 0) {
    long double sum = accumulator;  // 64 bits of significand: as good as exact here
    for (int i = 0; i < count; ++i) sum += static_cast<long double>(terms[i].value());
    return float(sum);
  }
  if (how.block < 0) {
    for (int i = 0; i < count; ++i) accumulator = std::fma(float(split_half(a[i], kind).value()), float(split_half(b[i], kind).value()), accumulator);
    return accumulator;
  }
  for (int at = 0; at < count; at += how.block)
    accumulator = add_block(terms + at, count - at < how.block ? count - at : how.block, accumulator, how.extra_bits);
  return accumulator;
}

inline uint16_t half_of(const uint32_t* registers, int i) { return uint16_t(registers[i / 2] >> 16 * (i % 2)); }

// m16n8k8 (Registers of a: 2, of b: 1) and m16n8k16 (4 and 2); the two differ in K only. c: 4 floats a lane.
template <int K> void model_m16n8(const uint32_t (&a)[32][K / 4], const uint32_t (&b)[32][K / 8], float (&c)[32][4], half_kind kind, mma_numerics how) {
  uint16_t A[16][K], B[8][K];  // B by columns
  float C[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, l = lane % 4;
    for (int i = 0; i < K / 2; ++i) A[g + 8 * (i / 2 % 2)][2 * l + i % 2 + 8 * (i / 4)] = half_of(a[lane], i);
    for (int i = 0; i < K / 4; ++i) B[g][2 * l + i % 2 + 8 * (i / 2)] = half_of(b[lane], i);
    for (int i = 0; i < 4; ++i) C[g + 8 * (i / 2)][2 * l + i % 2] = c[lane][i];
  }
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + 8 * (i / 2), col = 2 * (lane % 4) + i % 2;
      c[lane][i] = dot(A[row], B[col], K, C[row][col], kind, how);
    }
}

// The four products of the quad pairs.
inline void model_m8n8k4(const uint32_t (&a)[32][2], const uint32_t (&b)[32][2], float (&c)[32][8], bool a_row, bool b_row, mma_numerics how) {
  for (int pair = 0; pair < 4; ++pair) {
    uint16_t A[8][4], B[8][4];  // B by columns
    for (int n = 0; n < 8; ++n) {
      const int l = n % 4, h = n < 4 ? 0 : 4, lane = 4 * pair + l + 4 * h;
      for (int i = 0; i < 4; ++i) {
        (a_row ? A[l + h][i] : A[i + h][l]) = half_of(a[lane], i);
        (b_row ? B[i + h][l] : B[l + h][i]) = half_of(b[lane], i);
      }
    }
    for (int n = 0; n < 8; ++n) {
      const int l = n % 4, h = n < 4 ? 0 : 4, lane = 4 * pair + l + 4 * h;
      for (int i = 0; i < 8; ++i) {
        const int row = (l & 1) + (i & 2) + h, col = (i & 4) + (l & 2) + (i & 1);
        c[lane][i] = dot(A[row], B[col], 4, c[lane][i], half_kind::f16, how);
      }
    }
  }
}

// Register m of each lane from `count` matrices, rows[8 m + r] being row r of matrix m: 8 halves.
inline void model_ldmatrix(const void* const (&rows)[32], int count, bool trans, uint32_t (&registers)[32][4]) {
  for (int m = 0; m < count; ++m) {
    uint16_t matrix[8][8];
    for (int r = 0; r < 8; ++r) std::memcpy(matrix[r], rows[8 * m + r], 16);
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, l = 2 * (lane % 4);
      const uint16_t low = trans ? matrix[l][g] : matrix[g][l], high = trans ? matrix[l + 1][g] : matrix[g][l + 1];
      registers[lane][m] = low | uint32_t(high) << 16;
    }
  }
}

}  // namespace cqsa::simt
