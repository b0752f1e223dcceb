// SPDX-License-Identifier: Apache-2.0
// The order of k in which matrix units get activations. Of 128 elements of a row of weights a lane l of four decodes elements 32 l .. 32 l + 31 in one go;
// step s, 16 deep, takes 4 s .. 4 s + 3 of each, at positions 2 l, 2 l + 1, 2 l + 8, 2 l + 9 (sm80/mma.cuh). Activations are stored in that order.
#pragma once

#include "element.cuh"

namespace cqsa::gpu {

// Elements c .. c + 3 of a row (c a multiple of four), as two words of halves.
CQSA_DEVICE void put_ordered(unsigned short* row, int64_t c, const word2x& words) {
  const int64_t block = c / 128 * 128;
  const int l = int(c % 128) / 32, s = int(c % 32) / 4;
  uint32_t* const to = reinterpret_cast<uint32_t*>(row + block + 16 * s + 2 * l);
  to[0] = words.x[0], to[4] = words.x[1];
}

}  // namespace cqsa::gpu
