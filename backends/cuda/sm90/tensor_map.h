// SPDX-License-Identifier: Apache-2.0
// A tensor as the copy engine of Hopper knows it, for host and device.
#pragma once

#include <cstdint>

namespace cqsa::gpu {

// The driver's CUtensorMap, which is opaque.
struct alignas(64) tensor_map {
  uint64_t words[16];
};

// A tensor of four axes, innermost first, whose first one is contiguous, and the box of it that one copy brings: 128 bytes wide, as chunks of
// 16 bytes in rows of 128 that are exchanged by an XOR with the row modulo 8.
struct tensor_box {
  const void* data;      // aligned to 16
  int32_t kind;          // kind_f16, kind_bf16, or kind_u8 for anything of one byte
  uint64_t size[4];      // 1 .. 2^32
  uint64_t stride[3];    // bytes of axes 1 to 3, multiples of 16 below 2^40
  uint32_t box[4];       // 1 .. 256; box[0] is 64, of bytes 128
};

}  // namespace cqsa::gpu
