// SPDX-License-Identifier: Apache-2.0
// The wrappers of backends/cuda/sm80/words.cuh for the SIMT harness.
#pragma once

#include "simt_device.h"

namespace cqsa::gpu {

CQSA_DEVICE uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= uint32_t(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return out;
}

CQSA_DEVICE uint32_t subtract_f16x2(uint32_t a, uint32_t b) {
  const uint32_t low = f32_to_f16(f16_to_f32(uint16_t(a)) - f16_to_f32(uint16_t(b)));
  const uint32_t high = f32_to_f16(f16_to_f32(uint16_t(a >> 16)) - f16_to_f32(uint16_t(b >> 16)));
  return low | high << 16;
}

}  // namespace cqsa::gpu
