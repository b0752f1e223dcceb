// SPDX-License-Identifier: Apache-2.0
#include "fake_memory.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace fake {

void* memory::take(uint64_t bytes, bool pinned, bool counted) {
  const std::lock_guard hold(lock_);
  if (counted && (bytes > limit_[pinned] || live_[pinned] > limit_[pinned] - bytes)) return nullptr;
  const uint64_t padded = (bytes + 255) / 256 * 256 + (bytes == 0 ? 256 : 0);
  void* real = std::aligned_alloc(256, padded);
  if (!real) return nullptr;
  std::memset(real, 0xFF, padded);  // NaN in every float type
  blocks_[pinned][reinterpret_cast<uintptr_t>(real)] = {bytes, counted};
  if (counted) live_[pinned] += bytes;
  peak_[pinned] = std::max(peak_[pinned], live_[pinned]);
  return pinned ? real : to_device(real);
}

bool memory::give(void* p, bool pinned) {
  const std::lock_guard hold(lock_);
  if (is_device(p) == pinned) return false;
  const auto found = blocks_[pinned].find(reinterpret_cast<uintptr_t>(to_real(p)));
  if (found == blocks_[pinned].end()) return false;
  if (found->second.counted) live_[pinned] -= found->second.bytes;
  std::memset(to_real(p), 0xDB, found->second.bytes);
  blocks_[pinned].erase(found);
  std::free(to_real(p));
  return true;
}

cqsa_pointer_info memory::find(const void* p) {
  const std::lock_guard hold(lock_);
  const auto at = reinterpret_cast<uintptr_t>(to_real(p));
  auto after = blocks_[0].upper_bound(at);
  if (after == blocks_[0].begin() || at - (--after)->first >= after->second.bytes) return {CQSA_POINTER_DEVICE, 0, 0, 0};
  return {CQSA_POINTER_DEVICE, 0, after->first | device_bit, after->second.bytes};
}

bool memory::holds(const void* p, uint64_t bytes, bool pinned) {
  const std::lock_guard hold(lock_);
  if (is_device(p) == pinned) return false;
  const auto at = reinterpret_cast<uintptr_t>(to_real(p));
  auto after = blocks_[pinned].upper_bound(at);
  if (after == blocks_[pinned].begin()) return false;
  --after;
  const uint64_t offset = at - after->first;
  return offset <= after->second.bytes && bytes <= after->second.bytes - offset;
}

void memory::limit(uint64_t device, uint64_t pinned) {
  const std::lock_guard hold(lock_);
  limit_[0] = device ? device : uint64_t{1} << 30;
  limit_[1] = pinned ? pinned : uint64_t{1} << 30;
  for (int kind = 0; kind < 2; ++kind) peak_[kind] = before_[kind] = live_[kind];
}

void memory::fill(fake_counters& out) {
  const std::lock_guard hold(lock_);
  out.live_bytes = live_[0];
  out.peak_bytes = peak_[0];
  out.pinned_live_bytes = live_[1];
  out.pinned_peak_bytes = peak_[1];
  out.pinned_before = before_[1];
  out.live_allocations = out.live_pinned = 0;
  for (const auto& kind : blocks_)
    for (const auto& [address, b] : kind) out.live_allocations += b.counted;
  for (const auto& [address, b] : blocks_[1]) out.live_pinned += b.counted;
}

uint64_t memory::free_bytes() {
  const std::lock_guard hold(lock_);
  return limit_[0] - std::min(limit_[0], live_[0]);
}

uint64_t memory::total_bytes() {
  const std::lock_guard hold(lock_);
  return limit_[0];
}

memory& the_memory() {
  static memory instance;
  return instance;
}

namespace {
thread_local char error_text[256];
std::mutex fault_lock;
std::string& first_fault() {
  static std::string text;
  return text;
}
}  // namespace

cqsa_status fail(cqsa_status status, const std::string& text) {
  std::snprintf(error_text, sizeof error_text, "%s", text.c_str());
  return status;
}

const char* last_error() { return error_text; }

void report_fault(const std::string& text) {
  const std::lock_guard hold(fault_lock);
  if (first_fault().empty()) first_fault() = text;
}

std::string fault() {
  const std::lock_guard hold(fault_lock);
  return first_fault();
}

void clear_fault() {
  const std::lock_guard hold(fault_lock);
  first_fault().clear();
}

}  // namespace fake
