// SPDX-License-Identifier: Apache-2.0
#include "cpu_features.h"

#if defined(CQSA_CPU_X86)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace cqsa::cpu {
namespace {

#if defined(CQSA_CPU_X86)
bool has(unsigned word, unsigned bits) { return (word & bits) == bits; }
constexpr unsigned bit(int n) { return 1u << n; }

// Palette 1: eight registers of 16 rows of 64 bytes, as tiles-inl.h takes them to be.
bool usual_palette() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(0x1d, 1, &a, &b, &c, &d)) return false;
  return a >> 16 == 1024 && (b & 0xffff) == 64 && b >> 16 >= 8 && (c & 0xffff) >= 16;
}

features detect() {
  features out{};
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return out;
  if (!has(c, bit(27) | bit(12) | bit(29))) return out;  // XSAVE in use, FMA, F16C
  unsigned low, high;
  // What the operating system saves: xmm and ymm are bits 1 and 2, the AVX-512 registers bits 5 to 7, the tiles 17 and 18.
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return out;
  out.avx2 = has(low, 0x06) && has(b, bit(5) | bit(3) | bit(8));  // AVX2, BMI1, BMI2
  out.avx512 = out.avx2 && has(low, 0xe6) && has(b, bit(16) | bit(17) | bit(28) | bit(30) | bit(31));  // F, DQ, CD, BW, VL
  out.avx512_vnni = out.avx512 && has(c, bit(11));
  const bool tiles = has(d, bit(22) | bit(24)) && has(low, bit(17) | bit(18));  // AMX-BF16, AMX-TILE
  if (a < 1 || !__get_cpuid_count(7, 1, &a, &b, &c, &d)) return out;
  out.avx512_bf16 = out.avx512 && has(a, bit(5));
  out.amx = out.avx512_bf16 && tiles && usual_palette();
  return out;
}
#endif

bool ask_for_tiles() {
#if defined(CQSA_CPU_X86) && defined(__linux__)
  constexpr int request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

}  // namespace

const features& this_cpu() {
#if defined(CQSA_CPU_X86)
  static const features found = detect();
#else
  static const features found{};
#endif
  return found;
}

bool may_use_tiles() {
  static const bool granted = this_cpu().amx && ask_for_tiles();
  return granted;
}

}  // namespace cqsa::cpu
