// SPDX-License-Identifier: Apache-2.0
// Pairs of f16 in a register for the sm_70 kernels: f32 as a sum of two f16, and int8 codes to f16 without a conversion each.
#pragma once

#include "backends/gpu/element.cuh"

namespace cqsa::gpu {

#if defined(CQSA_SIMT)
CQSA_DEVICE void forget_loads() {}
#define CQSA_SM70_PHASE(name, parts)
CQSA_DEVICE int unknown(int x) { return x; }
// a - b in both halves.
CQSA_DEVICE uint32_t subtract_halves(uint32_t a, uint32_t b) {
  const uint16_t low = f32_to_f16(f16_to_f32(uint16_t(a)) - f16_to_f32(uint16_t(b)));
  return low | uint32_t(f32_to_f16(f16_to_f32(uint16_t(a >> 16)) - f16_to_f32(uint16_t(b >> 16)))) << 16;
}
#else
// What was read from memory before is read again after: registers are dearer than loads from shared memory.
CQSA_DEVICE void forget_loads() { asm volatile("" ::: "memory"); }
// A comment in the PTX, by which tools/sm70_counts.py knows what belongs to what.
#define CQSA_SM70_PHASE(name, parts) asm volatile("// phase " name " %0" ::"n"(parts))
// x, of which the compiler does not know that it is the same every time: what is computed from it inside a loop stays there. Dozens of
// addresses would otherwise wait in registers for the whole kernel, to save two instructions each.
CQSA_DEVICE int unknown(int x) {
  int y;
  asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
CQSA_DEVICE uint32_t subtract_halves(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
#endif

// Codes 0 .. 3 of a word as two pairs. A byte below 0x6400 is the f16 1024 + byte: with the sign bit turned, code + 1152.
CQSA_DEVICE void unpack_codes(uint32_t codes, uint32_t* out) {
  const uint32_t shifted = codes ^ 0x80808080u;
  out[0] = subtract_halves(pick_bytes(shifted, 0x64646464u, 0x4140u), 0x64806480u);
  out[1] = subtract_halves(pick_bytes(shifted, 0x64646464u, 0x4342u), 0x64806480u);
}

CQSA_DEVICE uint32_t pack_halves(uint16_t low, uint16_t high) { return low | uint32_t(high) << 16; }

// x = hi + lo, up to 2^-22 of it: out[0] holds hi of both, out[1] lo.
template <int Parts> CQSA_DEVICE void split_pair(float x, float y, uint32_t (&out)[Parts]) {
  const uint16_t a = f32_to_f16(x), b = f32_to_f16(y);
  out[0] = pack_halves(a, b);
  if constexpr (Parts == 2) out[1] = pack_halves(f32_to_f16(x - f16_to_f32(a)), f32_to_f16(y - f16_to_f32(b)));
}

// Whether a half of the pair is NaN or Inf.
CQSA_DEVICE bool not_finite(uint32_t pair) { return (((pair & 0x7fff7fffu) + 0x04000400u) & 0x80008000u) != 0; }

// 2^(wanted - n) for |x| in [2^n, 2^(n + 1)), as far as f32 reaches, and 1 over it: both exact.
struct power_pair {
  float up, down;
};
CQSA_DEVICE power_pair power_for(float x, int wanted) {
  int field = 254 + wanted - int(bits_of(x) >> 23 & 0xffu);
  field = field < 1 ? 1 : field > 253 ? 253 : field;
  return {float_of(uint32_t(field) << 23), float_of(uint32_t(254 - field) << 23)};
}

}  // namespace cqsa::gpu
