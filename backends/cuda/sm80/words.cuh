// SPDX-License-Identifier: Apache-2.0
// Pairs of halves in a 32-bit word, the first one in the low bits, and its bytes.
#pragma once

#include "backends/cuda/sm80/mma.cuh"

namespace cqsa::gpu {

CQSA_DEVICE float low_half(uint32_t pair) { return f16_to_f32(uint16_t(pair)); }
CQSA_DEVICE float high_half(uint32_t pair) { return f16_to_f32(uint16_t(pair >> 16)); }

// Two bytes of a word of signed codes, to halves. The word comes with its sign bits turned over, so that a byte is code + 128: below
// the byte 0x64 that makes it the half 1024 + 128 + code, exact as all integers up to 2048.
CQSA_DEVICE uint32_t codes_to_f16x2(uint32_t turned, uint32_t selector) {
  return fma_f16x2(permute_bytes(turned, 0x64646464u, selector), 0x3c003c00u, 0xe480e480u);
}
constexpr uint32_t sign_bits = 0x80808080u;

}  // namespace cqsa::gpu
