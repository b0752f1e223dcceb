// SPDX-License-Identifier: Apache-2.0
// The wrappers of backends/cuda/sm80/words.cuh for the SIMT harness.
#pragma once

#include "simt_device.h"

namespace cqsa::gpu {

CQSA_DEVICE uint32_t subtract_f16x2(uint32_t a, uint32_t b) {
  const uint32_t low = f32_to_f16(f16_to_f32(uint16_t(a)) - f16_to_f32(uint16_t(b)));
  const uint32_t high = f32_to_f16(f16_to_f32(uint16_t(a >> 16)) - f16_to_f32(uint16_t(b >> 16)));
  return low | high << 16;
}

}  // namespace cqsa::gpu
