// SPDX-License-Identifier: Apache-2.0
// The instructions of sm_80 that its attention uses, by those of sm_75: a fragment of m16n8k16 is two of m16n8k8 side by side, and
// an asynchronous copy one by way of registers that is over at once. They stand in the namespace of that attention, whose source
// finds them there before the real ones; so this comes before it.
#pragma once

#include "backends/cuda/sm80/mma.cuh"
#include "backends/gpu/element.cuh"

namespace cqsa::gpu::sm80 {

CQSA_DEVICE void mma_m16n8k16_f16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  const uint32_t left[2] = {a[0], a[1]}, right[2] = {a[2], a[3]};
  mma_m16n8k8_f16(c, left, b[0]);
  if (!CQSA_MUTANT(21)) mma_m16n8k8_f16(c, right, b[1]);
}

CQSA_DEVICE uint32_t pack_f16(float low, float high) { return uint32_t(f32_to_f16(low)) | uint32_t(f32_to_f16(high)) << 16; }
CQSA_DEVICE uint32_t pack_bf16(float low, float high) { return f32_to_bf16(low) | f32_to_bf16(high) << 16; }

// valid: 16, or 0 for zeros.
CQSA_DEVICE void cp_async_16(void* shared, const void* global, int valid = 16) {
  word4x x = {{0, 0, 0, 0}};
  if (valid != 0) x = *static_cast<const word4x*>(global);
  *static_cast<word4x*>(shared) = x;
}
CQSA_DEVICE void cp_async_commit() {}
template <int Pending> CQSA_DEVICE void cp_async_wait() {}

}  // namespace cqsa::gpu::sm80
