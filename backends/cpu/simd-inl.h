// SPDX-License-Identifier: Apache-2.0
// The few vector operations that the attention kernels need, on 32-bit lanes.
//
// Included once by each attention_<target>.cpp, inside that file's own flags. Highway supplies the operations where it has
// a SIMD target for those flags. Plain x86-64 (SSE2) is none in Highway 1.0, hence the second half: the compiler's own
// four-lane vectors.
//
// Everything here has internal linkage: an inline function with a weak symbol, compiled for AVX-512 in one file and for SSE2
// in another, would be merged by the linker, and the wrong one might win.
#pragma once

#include <hwy/highway.h>

#include <stdint.h>
#include <string.h>

HWY_BEFORE_NAMESPACE();
namespace cqsa::cpu {
namespace {
namespace HWY_NAMESPACE {

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

namespace hn = hwy::HWY_NAMESPACE;
// Fixed-size vectors only: arrays of vectors are kept in registers by the kernels.
using df_t = hn::ScalableTag<float>;
using di_t = hn::RebindToSigned<df_t>;
using vf = hn::Vec<df_t>;
using vi = hn::Vec<di_t>;
using mask = hn::Mask<df_t>;
constexpr int lanes = HWY_MAX_BYTES / 4;
constexpr df_t df{};
constexpr di_t di{};

HWY_INLINE vf load(const float* p) { return hn::Load(df, p); }
HWY_INLINE vf loadu(const float* p) { return hn::LoadU(df, p); }
HWY_INLINE void store(vf v, float* p) { hn::Store(v, df, p); }
HWY_INLINE void storeu(vf v, float* p) { hn::StoreU(v, df, p); }
HWY_INLINE vf set(float x) { return hn::Set(df, x); }
HWY_INLINE vf zero() { return hn::Zero(df); }
HWY_INLINE vf add(vf a, vf b) { return hn::Add(a, b); }
HWY_INLINE vf sub(vf a, vf b) { return hn::Sub(a, b); }
HWY_INLINE vf mul(vf a, vf b) { return hn::Mul(a, b); }
HWY_INLINE vf div(vf a, vf b) { return hn::Div(a, b); }
HWY_INLINE vf fma(vf a, vf b, vf c) { return hn::MulAdd(a, b, c); }   // a * b + c
HWY_INLINE vf fnma(vf a, vf b, vf c) { return hn::NegMulAdd(a, b, c); }  // c - a * b
// On x86 both give b when one of them is NaN.
HWY_INLINE vf vmax(vf a, vf b) { return hn::Max(a, b); }
HWY_INLINE vf vmin(vf a, vf b) { return hn::Min(a, b); }
HWY_INLINE vf vabs(vf a) { return hn::Abs(a); }
HWY_INLINE vf copysign(vf magnitude, vf sign) { return hn::CopySign(magnitude, sign); }
HWY_INLINE mask eq(vf a, vf b) { return hn::Eq(a, b); }
HWY_INLINE mask lt(vf a, vf b) { return hn::Lt(a, b); }
HWY_INLINE mask both(mask a, mask b) { return hn::And(a, b); }
HWY_INLINE vf select(mask m, vf yes, vf no) { return hn::IfThenElse(m, yes, no); }
HWY_INLINE bool any(mask m) { return !hn::AllFalse(df, m); }

HWY_INLINE vi loadi(const int32_t* p) { return hn::Load(di, p); }
HWY_INLINE vi seti(int32_t x) { return hn::Set(di, x); }
// lo <= j < hi
HWY_INLINE mask between(vi lo, vi j, vi hi) {
  return hn::RebindMask(df, hn::AndNot(hn::Lt(j, lo), hn::Lt(j, hi)));
}
HWY_INLINE mask same_bits(vf a, int32_t bits) { return hn::RebindMask(df, hn::Eq(hn::BitCast(di, a), seti(bits))); }
HWY_INLINE vf round_int(vf a) { return hn::Round(a); }

// p * 2^n for an integral n in [-160, 160]. Two steps, since neither 2^-149 nor 2^128 is a normal float.
HWY_INLINE vf scale_exp2(vf p, vf n) {
#if defined(__AVX512F__)
  return vf{_mm512_scalef_ps(p.raw, n.raw)};
#else
  const vi i = hn::ConvertTo(di, n);
  const vi half = hn::ShiftRight<1>(i);
  const vi bias = hn::Set(di, 127);
  const vf a = hn::BitCast(df, hn::ShiftLeft<23>(hn::Add(half, bias)));
  const vf b = hn::BitCast(df, hn::ShiftLeft<23>(hn::Add(hn::Sub(i, half), bias)));
  return hn::Mul(hn::Mul(p, a), b);
#endif
}

#else  // four lanes of the compiler's

#define CQSA_PLAIN_VECTORS 1
constexpr int lanes = 4;
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef vi mask;

HWY_INLINE vf load(const float* p) {
  vf v;
  memcpy(&v, p, sizeof v);
  return v;
}
HWY_INLINE vf loadu(const float* p) { return load(p); }
HWY_INLINE void store(vf v, float* p) { memcpy(p, &v, sizeof v); }
HWY_INLINE void storeu(vf v, float* p) { store(v, p); }
HWY_INLINE vf set(float x) { return vf{x, x, x, x}; }
HWY_INLINE vf zero() { return vf{0, 0, 0, 0}; }
HWY_INLINE vf add(vf a, vf b) { return a + b; }
HWY_INLINE vf sub(vf a, vf b) { return a - b; }
HWY_INLINE vf mul(vf a, vf b) { return a * b; }
HWY_INLINE vf div(vf a, vf b) { return a / b; }
HWY_INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }
HWY_INLINE vf fnma(vf a, vf b, vf c) { return c - a * b; }
HWY_INLINE vf select(mask m, vf yes, vf no) { return (vf)((m & (vi)yes) | (~m & (vi)no)); }
HWY_INLINE vf vmax(vf a, vf b) { return select((mask)(a > b), a, b); }
HWY_INLINE vf vmin(vf a, vf b) { return select((mask)(a < b), a, b); }
HWY_INLINE vi seti(int32_t x) { return vi{x, x, x, x}; }
HWY_INLINE vf vabs(vf a) { return (vf)((vi)a & seti(0x7fffffff)); }
HWY_INLINE vf copysign(vf magnitude, vf sign) {
  return (vf)(((vi)magnitude & seti(0x7fffffff)) | ((vi)sign & seti(INT32_MIN)));
}
HWY_INLINE mask eq(vf a, vf b) { return (mask)(a == b); }
HWY_INLINE mask lt(vf a, vf b) { return (mask)(a < b); }
HWY_INLINE mask both(mask a, mask b) { return a & b; }
HWY_INLINE bool any(mask m) { return (m[0] | m[1] | m[2] | m[3]) != 0; }
HWY_INLINE vi loadi(const int32_t* p) {
  vi v;
  memcpy(&v, p, sizeof v);
  return v;
}
HWY_INLINE mask between(vi lo, vi j, vi hi) { return (mask)((lo <= j) & (j < hi)); }
HWY_INLINE mask same_bits(vf a, int32_t bits) { return (mask)((vi)a == seti(bits)); }
// Adding 1.5 * 2^23 leaves no room for a fraction; |a| < 2^22 or NaN.
HWY_INLINE vf round_int(vf a) { return (a + set(12582912.0f)) - set(12582912.0f); }
HWY_INLINE vf scale_exp2(vf p, vf n) {
  const vi i = (vi)(n + set(12582912.0f)) - seti(0x4b400000);
  const vi half = i >> 1;
  const vi a = (half + 127) << 23, b = (i - half + 127) << 23;
  return p * (vf)a * (vf)b;
}

#endif

// e^x within 2 ulp for every x: subnormal results included, -inf gives 0, NaN stays NaN, exp(0) is exactly 1 (what a row
// does in a tile that is hidden from it depends on that). 1 + r + r^2 g(r) on |r| <= ln2 / 2, g fitted to 0.06 ulp.
HWY_INLINE vf exp(vf x) {
  // The constant comes first: then a NaN in x passes through min and max.
  x = vmax(set(-105.0f), vmin(set(89.5f), x));
  const vf n = round_int(mul(x, set(1.44269504f)));
  vf r = fnma(n, set(0.693145752f), x);  // ln2 in two parts, the first with 16 bits: its product with n is exact
  r = fnma(n, set(1.42860677e-6f), r);
  vf g = fma(set(0.001381459878757596f), r, set(0.008368716575205326f));
  g = fma(g, r, set(0.04166838899254799f));
  g = fma(g, r, set(0.1666652113199234f));
  g = fma(g, r, set(0.4999999403953552f));
  const vf y = add(set(1.0f), fma(mul(r, r), g, r));
  return scale_exp2(y, n);
}

// tanh within 2 ulp: an odd polynomial near 0, where the quotient would cancel.
HWY_INLINE vf tanh(vf x) {
  const vf ax = vabs(x);
  const vf z = mul(x, x);
  vf g = fma(set(-0.0056793116964399815f), z, set(0.020618129521608353f));
  g = fma(g, z, set(-0.05373400077223778f));
  g = fma(g, z, set(0.1333138346672058f));
  g = fma(g, z, set(-0.3333328068256378f));
  const vf near = fma(mul(x, z), g, x);
  const vf e = exp(add(ax, ax));
  const vf far = copysign(sub(set(1.0f), div(set(2.0f), add(e, set(1.0f)))), x);
  // NaN compares false and takes `far`, where it survives.
  return select(lt(ax, set(0.625f)), near, far);
}

}  // namespace HWY_NAMESPACE
}  // namespace
}  // namespace cqsa::cpu
HWY_AFTER_NAMESPACE();
