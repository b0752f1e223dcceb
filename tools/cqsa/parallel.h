// SPDX-License-Identifier: Apache-2.0
// Work of the command itself on several threads: references, operands, checks.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>

namespace tool {

// asked, or one per core when that is 0.
int threads_or_all(int asked);

// body(i) for each i in [0, count), by up to `threads` threads; the first exception comes out.
void in_parallel(std::size_t count, int threads, const std::function<void(std::size_t)>& body);

// body(begin, end) for the whole of [0, count) in blocks of `grain`, the last one shorter. What fits in one block starts no thread.
void in_blocks(int64_t count, int64_t grain, int threads, const std::function<void(int64_t, int64_t)>& body);

}  // namespace tool
