// SPDX-License-Identifier: Apache-2.0
// Pages of a mapped operand that a piece of a tile makes resident on its way through a staging slot.
#pragma once
#include "ops/attention/device_gather.h"

namespace cqsa {

// A page fault maps the pages around it that are in memory, 64 KiB aligned (fault_around_bytes of Linux): the grain in which
// resident bytes come and go.
inline constexpr uint64_t page_grain = 64 << 10;

// What one piece through a slot of so many bytes may make resident.
constexpr uint64_t resident_of_piece(uint64_t slot_bytes) { return slot_bytes + 2 * page_grain; }

// Bytes that lines [begin, end) touch, in grains.
uint64_t touched_bytes(const host_tile& tile, int64_t begin, int64_t end);
// The most lines from `begin` on, at least one and none from `end` on, that touch no more than `limit` bytes.
int64_t lines_within(const host_tile& tile, int64_t begin, int64_t end, uint64_t limit);
// Lines [begin, end) from the mapping's file into compact memory, without a page of the mapping becoming resident. False: there
// is no file, or the lines lie too far apart in it, or it was not all there; then nothing is certain about what is in `compact`.
bool read_lines(const host_tile& tile, int64_t begin, int64_t end, char* compact);
// Has the pages brought in together, before they are read; and lets them go.
void want_lines(const host_tile& tile, int64_t begin, int64_t end);
void drop_lines(const host_tile& tile, int64_t begin, int64_t end, bool written);

}  // namespace cqsa
