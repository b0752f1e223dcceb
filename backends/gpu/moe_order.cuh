// SPDX-License-Identifier: Apache-2.0
// The order of k in which matrix units get activations. Of 128 elements of a row of weights a lane l of four decodes elements 32 l .. 32 l + 31 in one go;
// step s, 16 deep, takes 4 s .. 4 s + 3 of each, at positions 2 l, 2 l + 1, 2 l + 8, 2 l + 9 (sm80/mma.cuh). Activations are stored in that order.
#pragma once

#include "element.cuh"

namespace cqsa::gpu {

// Of those 32 elements step s takes words 2 s and 2 s + 1, each of two elements: by default neighbours. Codes of two bits come out of a word of 16 in pairs
// that are eight apart.
enum moe_order : int32_t { order_of_neighbours = 0, order_of_pairs = 1 };

CQSA_DEVICE int place_in_block(int c, int order) {
  const int l = c / 32, e = c % 32, word = order == order_of_pairs ? e / 16 * 8 + e % 8 : e / 2, high = order == order_of_pairs ? e / 8 % 2 : e % 2;
  return 16 * (word / 2) + 8 * (word % 2) + 2 * l + high;
}
// Elements c .. c + 3 of a row (c a multiple of four), as two words of halves.
CQSA_DEVICE void put_ordered(unsigned short* row, int64_t c, const word2x& words, int order) {
  unsigned short* const block = row + c / 128 * 128;
  const int in_block = int(c % 128);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (order == order_of_neighbours && i % 2 == 0) *reinterpret_cast<uint32_t*>(block + place_in_block(in_block + i, order)) = words.x[i / 2];
    if (order != order_of_neighbours) block[place_in_block(in_block + i, order)] = static_cast<unsigned short>(words.x[i / 2] >> 16 * (i % 2));
  }
}

}  // namespace cqsa::gpu
