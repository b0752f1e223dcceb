// SPDX-License-Identifier: Apache-2.0
// The memory of a block: shared memory between red zones, and copies under way.
#include "block.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#if defined(CQSA_SIMT_ASAN)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#define ASAN_UNPOISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#endif

namespace cqsa::simt {
namespace {
// 0xfdff is NaN in f16 and bf16, and twice in f32; memory that the kernel may use begins as 0xff.
unsigned char zone_byte(size_t i) { return i % 2 ? 0xfd : 0xff; }
}  // namespace

shared_block::shared_block(int64_t bytes)
    : bytes_(size_t(bytes)), memory_(static_cast<unsigned char*>(std::aligned_alloc(zone, (bytes_ + zone - 1) / zone * zone + 2 * zone))) {
  if (!memory_) throw std::bad_alloc();
}
shared_block::~shared_block() {
  ASAN_UNPOISON_MEMORY_REGION(memory_, bytes_ + 2 * zone);
  std::free(memory_);
}

void shared_block::fill() {
  ASAN_UNPOISON_MEMORY_REGION(memory_, bytes_ + 2 * zone);
  for (size_t i = 0; i < zone; ++i) memory_[i] = memory_[zone + bytes_ + i] = zone_byte(i);
  std::memset(data(), 0xff, bytes_);
  ASAN_POISON_MEMORY_REGION(memory_, zone);
  ASAN_POISON_MEMORY_REGION(memory_ + zone + bytes_, zone);
}

std::string shared_block::damage() const {
  ASAN_UNPOISON_MEMORY_REGION(memory_, bytes_ + 2 * zone);
  for (size_t i = 0; i < zone; ++i) {
    if (memory_[zone + bytes_ + i] != zone_byte(i)) return "written " + std::to_string(i) + " bytes behind the shared memory";
    if (memory_[zone - 1 - i] != zone_byte(zone - 1 - i)) return "written " + std::to_string(i + 1) + " bytes before the shared memory";
  }
  return "";
}

void async_copies::copy::take() {
  if (read) return;
  std::memset(data, 0, sizeof data);
  std::memcpy(data, from, size_t(read_bytes));
  read = true;
}

void async_copies::issue(void* to, const void* from, int bytes, int read_bytes, uint64_t random) {
  pending_.push_back({static_cast<unsigned char*>(to), static_cast<const unsigned char*>(from), bytes, read_bytes, committed_, false, {}});
  if (random % 2) pending_.back().take();
  std::memset(to, 0xff, size_t(bytes));
}
void async_copies::commit() { ++committed_; }
void async_copies::wait(int most_pending) {
  while (!pending_.empty() && pending_.front().group < committed_ - most_pending) {
    copy& c = pending_.front();
    c.take();
    std::memcpy(c.to, c.data, size_t(c.bytes));
    pending_.pop_front();
  }
}
void async_copies::think(uint64_t random) {
  for (copy& c : pending_)
    if ((random = random * 6364136223846793005ull + 1) >> 62 == 0) c.take();
}

}  // namespace cqsa::simt
